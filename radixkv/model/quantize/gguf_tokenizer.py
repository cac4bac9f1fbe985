# SPDX-License-Identifier: Apache-2.0
"""A tokenizer in a GGUF file: the whole of its tokenizer.json, and the lists that other readers know."""

from __future__ import annotations

import json
from typing import Any

from radixkv.errors import ModelLoadError

#: Of gguf's token types.
_NORMAL, _CONTROL, _USER, _UNUSED, _BYTE = 1, 3, 4, 5, 6
TOKENIZER_KEY = "tokenizer.huggingface.json"


def add_tokenizer(writer: Any, tokenizer: Any, vocab_size: int) -> None:
    """Write a tokenizer: the whole of its tokenizer.json, and the lists that other readers know.

    Args:
        tokenizer: of transformers, backed by the tokenizers library.

    Raises:
        ModelLoadError: it is not.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ModelLoadError(
            f"The tokenizer ({type(tokenizer).__name__}) has no tokenizer.json, which a GGUF file is made "
            "from; convert it with transformers first."
        )
    text = tokenizer.backend_tokenizer.to_str()
    model = json.loads(text)["model"]
    fallback = bool(model.get("byte_fallback")) or model["type"] == "Unigram"
    writer.add_tokenizer_model("llama" if fallback else "gpt2")
    writer.add_tokenizer_pre("default")
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    writer.add_token_list([by_id.get(index, f"[PAD{index}]") for index in range(vocab_size)])
    writer.add_token_types(
        [_type(by_id.get(index), added.get(index), fallback) for index in range(vocab_size)]
    )
    if fallback:
        listed = model["vocab"] if isinstance(model["vocab"], list) else []
        scores = [float(score) for _, score in listed][:vocab_size]
        writer.add_token_scores(scores + [-float(index) for index in range(len(scores), vocab_size)])
    merges = model.get("merges") or []
    if merges:
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for name in ("bos", "eos", "pad", "unk"):
        token = getattr(tokenizer, f"{name}_token_id", None)
        if isinstance(token, int):
            getattr(writer, f"add_{name}_token_id")(token)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
    writer.add_string(TOKENIZER_KEY, text)


def _type(token: str | None, added: Any, fallback: bool) -> int:
    if token is None:
        return _UNUSED
    if added is not None:
        return _CONTROL if added.special else _USER
    return _BYTE if fallback and len(token) == 6 and token.startswith("<0x") else _NORMAL
