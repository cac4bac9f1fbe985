"""Serving workloads over HTTP: `radixkv bench`, and what the scripts in benchmarks/ share."""
