# SPDX-License-Identifier: Apache-2.0
"""Layers of transformers models that keep a state: their forward, by `radixkv_kernels`' states."""
