"""Why a prompt missed: ghosts of evicted blocks, explanations, events."""
