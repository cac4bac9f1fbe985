"""Routing: a request goes to the replica expected to answer soonest, by the blocks each really holds."""
