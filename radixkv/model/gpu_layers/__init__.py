# SPDX-License-Identifier: Apache-2.0
"""Decoder layers with fewer kernels, for a GPU."""
