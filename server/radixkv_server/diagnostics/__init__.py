"""Requests compared with earlier ones, by fingerprints: what broke the prefix that they would have shared."""
