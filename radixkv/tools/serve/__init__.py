"""Serving: `radixkv serve` with its flags and its configuration file, and `radixkv keys`."""
