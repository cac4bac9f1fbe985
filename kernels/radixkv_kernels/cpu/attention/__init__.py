# SPDX-License-Identifier: Apache-2.0
"""Attention that reads cache blocks in place, compiled by numba."""
