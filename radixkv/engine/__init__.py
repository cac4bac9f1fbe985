"""The loop that serves requests: input, the step, output, recovery from faults."""
