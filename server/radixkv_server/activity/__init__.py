"""What the server remembers of its cache for those who watch it."""
