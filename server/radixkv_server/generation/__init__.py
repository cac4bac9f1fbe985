"""From the body of a request, through the engine, to an answer that is counted; in no dialect."""
