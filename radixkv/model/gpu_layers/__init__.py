"""Decoder layers with fewer kernels, for a GPU."""
