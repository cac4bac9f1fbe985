# SPDX-License-Identifier: Apache-2.0
"""Attention of a model's layers by the paged kernel: the hook, its shapes, latents and rotary embeddings."""
