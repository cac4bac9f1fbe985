"""Tenants: their API keys, limits, quotas and counts."""
