"""An engine in another process: what `EngineClient` offers, as pickled messages over a connection."""
