"""Several engines as one: block events, routing, engine processes, replicas."""
