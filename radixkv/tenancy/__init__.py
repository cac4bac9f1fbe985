"""Tenancy: quotas, public prefixes and pins, added to the prefix cache by `TenantCache`."""
