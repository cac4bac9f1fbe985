"""Attention that reads cache blocks in place, compiled by numba."""
