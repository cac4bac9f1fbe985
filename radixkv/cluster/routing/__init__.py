"""Which replica gets a request: the one that is expected to answer soonest, by what each really holds."""
