# SPDX-License-Identifier: Apache-2.0
"""WritingEngine: an engine for server tests whose model writes given texts with a real tokenizer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from scripted_engine import ScriptedEngine
from tiny_models import byte_level_tokenizer
from tokenizers import AddedToken

from radixkv.text.tokenizer import Tokenizer


def tokenizer_with(special: Sequence[str] = (), chat_template: str | None = None, **facts: Any) -> Tokenizer:
    """Return a byte-level tokenizer with further special tokens.

    Args:
        facts: attributes of the tokenizer of transformers.
    """
    hf = byte_level_tokenizer()
    hf.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    for name, value in facts.items():
        setattr(hf, name, value)
    return Tokenizer(hf, chat_template=chat_template)


class WritingEngine(ScriptedEngine):
    """Answers a prompt that holds `write:NAME:` with the text of that name.

    Args:
        texts: name -> what the model writes.
        step: tokens in each delta of a stream.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Mapping[str, str], *, step: int = 1) -> None:
        super().__init__(
            tokenizer=tokenizer,
            num_blocks=2048,
            max_model_len=16384,
            script=lambda prompt: texts[re.findall(r"write:(\w+):", prompt)[-1]],
            step=step,
        )
