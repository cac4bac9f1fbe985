"""The CPU backend of the attention interface; a dense fallback in torch where numba is missing."""
