"""Threads: an event loop of their own, and how much of the cores they get."""
