"""HTTP itself: the listener, limits, keys, bodies, errors, streaming, observation. Knows no API."""
