# SPDX-License-Identifier: Apache-2.0
"""The APIs that clients speak: one folder for each dialect."""
