"""Comparison of requests with earlier ones, by fingerprints, to find the first break of a shared prefix."""
