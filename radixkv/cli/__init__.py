"""What runs on top of the engine and the cache: the command line, serving workloads, trace replay."""
