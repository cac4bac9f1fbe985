"""The prefix cache: radix tree, block pool, eviction, retention and explanation. Imports no torch."""
