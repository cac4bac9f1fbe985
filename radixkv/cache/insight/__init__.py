"""Why a prompt missed: ghosts of evicted blocks, prefix hashes, explanations, advice, events."""
