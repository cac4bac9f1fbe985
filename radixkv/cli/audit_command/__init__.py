"""`radixkv audit`: find out from recorded requests why prompts miss the cache, whoever serves them."""
