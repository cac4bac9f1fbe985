"""Causes of diverging prompts, and the contents of the cache, seen from outside."""
