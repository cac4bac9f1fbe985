"""Serving workloads over HTTP: `radixkv bench`, and helpers of the scripts in benchmarks/."""
