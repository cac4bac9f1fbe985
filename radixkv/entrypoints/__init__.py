"""Entry points: an engine built from its settings, and used synchronously (`LLM`) or from asyncio."""
