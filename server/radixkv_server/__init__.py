"""The HTTP server: OpenAI-compatible API over `radixkv.AsyncEngine`."""
