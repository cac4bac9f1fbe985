"""Memories below the pool: what they promise, and moving blocks to and from them."""
