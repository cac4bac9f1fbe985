# SPDX-License-Identifier: Apache-2.0
"""Routes that belong to no dialect: health, version, models, tokenisation."""
