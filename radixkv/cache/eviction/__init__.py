"""Which cached block goes first: the order's index and one small class for each policy."""
