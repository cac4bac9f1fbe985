"""Attention by torch's dense operators, for CPUs where numba is not installed."""
