"""Order of eviction: its index, and one small class for each policy."""
