"""Replaying request traces against the real prefix cache: hit rates, policies, fragmentation. No torch."""
