"""`radixkv explain`: how much of a prompt would come from the cache, and why not the rest."""
