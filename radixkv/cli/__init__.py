"""The command line, on top of engine, server and cache."""
