"""What stays longer than the order would keep it: pins, quotas of tenants, public prefixes."""
