"""Other engines that `benchmarks.compare` sets up and measures; one module each."""
