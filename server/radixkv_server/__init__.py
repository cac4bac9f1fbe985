"""The HTTP server: OpenAI's API over a `radixkv.engine.client.EngineClient`."""
