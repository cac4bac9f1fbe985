"""The console: a page at `/` that shows what the prefix cache holds and why prompts missed it."""
