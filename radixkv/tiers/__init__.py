"""Memories below the pool: their protocol, and moving blocks to and from them."""
