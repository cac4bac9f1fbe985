# SPDX-License-Identifier: Apache-2.0
"""A transparent reverse proxy before any model API, which records what is asked of its prefix cache."""
