"""The HTTP server: OpenAI's API over a `radixkv.client.EngineClient`."""
