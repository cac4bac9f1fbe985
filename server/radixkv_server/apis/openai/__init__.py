"""OpenAI's dialect: chat and text completions."""
