"""`radixkv proxy`."""
