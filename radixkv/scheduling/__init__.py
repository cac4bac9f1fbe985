"""Which requests run in the next step, and with how many tokens. Imports no torch."""
