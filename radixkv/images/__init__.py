# SPDX-License-Identifier: Apache-2.0
"""Between text and token ids: tokenizer, chat templates, control tokens, incremental decoding."""
