# SPDX-License-Identifier: Apache-2.0
"""From a name, a folder or a GGUF file to a checked transformers model and its tokenizer."""
