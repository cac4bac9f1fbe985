"""Attention over a paged KV cache. Imports torch and triton only, nothing of radixkv."""
