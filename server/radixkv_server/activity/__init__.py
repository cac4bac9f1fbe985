"""The server's memory of its cache for people who watch it."""
