"""Who may ask what, and how much: tenants, their keys, limits and counts."""
