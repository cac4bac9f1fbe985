"""What makes prompts part from earlier ones, and what the cache holds, seen from outside."""
