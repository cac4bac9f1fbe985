# SPDX-License-Identifier: Apache-2.0
"""Transparent reverse proxy before any model API, which records the requests to its prefix cache."""
