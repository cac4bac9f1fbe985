"""Why a prompt missed: ghosts of evicted blocks, explanations, advice, events."""
