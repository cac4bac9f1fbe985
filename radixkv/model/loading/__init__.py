"""From a name, a folder or a GGUF file to a checked transformers model and its tokenizer."""
