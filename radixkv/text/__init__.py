"""Between text and token ids: tokenizer, chat templates, control tokens, incremental decoding."""
