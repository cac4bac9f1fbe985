"""A transparent reverse proxy before any model API, which records what is asked of its prefix cache."""
