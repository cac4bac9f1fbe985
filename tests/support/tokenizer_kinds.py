# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of thirty kinds, by what they do to the text around their added tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tiny_models import byte_fallback_tokenizer, byte_level_tokenizer, unigram_tokenizer, wordpiece_tokenizer
from tokenizers import AddedToken, Tokenizer

#: Pieces of texts that are hard on normalisers, on pre-tokenizers and on the search for added tokens.
PIECES = [
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "a",
        "the",
        " fn ",
        "fn",
        "Hello",
        "HELLO",
        "hello",
        "é",
        "e\u0301",
        "ﬁ",
    ),
    *("東京", "👩‍🚀", "\u0300", "'s", "_", "0", "123", "▁", "<", "|>", "<|", "im_start", "<|im_", "end|>\n"),
    *("user", "<0x0A>", "\u00a0", "\u200b", "<think>", "tool", ".", ",", "Ω", "\r\n", "<s", "s>"),
]


def _changed(base: Tokenizer, **parts: Any) -> Tokenizer:
    """A copy with parts of its state replaced, or changed by a function."""
    state = json.loads(base.to_str())
    for name, part in parts.items():
        state[name] = part(state[name]) if callable(part) else part
    return Tokenizer.from_str(json.dumps(state))


def _with_tokens(base: Tokenizer, *tokens: AddedToken) -> Tokenizer:
    copy = Tokenizer.from_str(base.to_str())
    copy.add_tokens(list(tokens))
    return copy


def _flags(*ids: int, **flags: bool) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda tokens: [{**token, **flags} if token["id"] in ids else token for token in tokens]


def tokenizer_kinds() -> dict[str, Tokenizer]:
    """Name -> tokenizer."""
    kinds = {
        make.__name__.removesuffix("_tokenizer"): make().backend_tokenizer
        for make in (
            byte_level_tokenizer,
            byte_fallback_tokenizer,
            unigram_tokenizer,
            wordpiece_tokenizer,
        )
    }
    byte_level, fallback = kinds["byte_level"], kinds["byte_fallback"]
    for scheme in ("first", "always", "never"):
        for base, split in (("unigram", True), ("unigram", False), ("byte_fallback", False)):
            metaspace = {
                "type": "Metaspace",
                "replacement": "▁",
                "prepend_scheme": scheme,
                "split": split,
            }
            kinds[f"{base} metaspace {scheme} {split}"] = _changed(
                kinds[base], pre_tokenizer=metaspace, normalizer=None
            )
    kinds["prefix space"] = _changed(
        byte_level,
        pre_tokenizer={
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
    )
    for name, flags in (
        ("lstrip", {"lstrip": True}),
        ("rstrip", {"rstrip": True}),
        ("both", {"lstrip": True, "rstrip": True}),
        ("single word", {"single_word": True}),
        ("normalized", {"normalized": True}),
    ):
        kinds[f"byte_level {name}"] = _changed(byte_level, added_tokens=_flags(1, 2, **flags))
        kinds[f"byte_fallback {name}"] = _changed(fallback, added_tokens=_flags(1, 2, **flags))
    kinds["one strips"] = _changed(byte_level, added_tokens=_flags(1, lstrip=True, rstrip=True))
    lower = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}
    kinds["lower case"] = _changed(byte_level, normalizer=lower)
    kinds["strip"] = _changed(
        byte_level, normalizer={"type": "Strip", "strip_left": True, "strip_right": True}
    )
    raw = {"normalized": False}
    kinds["overlapping"] = _with_tokens(
        byte_level,
        AddedToken("<|im_start|>user", **raw),
        AddedToken("|><|", **raw),
        AddedToken("end|>\n", **raw),
    )
    spaces = [AddedToken(text, **raw) for text in (" ", "  ", "\n\n")]
    words = [AddedToken("tool", normalized=True), AddedToken("fn", single_word=True, **raw)]
    kinds["white space is a token"] = _with_tokens(byte_level, *spaces, *words)
    kinds["white space that others take"] = _with_tokens(kinds["one strips"], *spaces, *words)
    kinds["added after normalisation"] = _with_tokens(
        kinds["lower case"], AddedToken("HELLO", normalized=True), AddedToken("Hello", **raw)
    )
    kinds["repeats itself"] = _with_tokens(
        byte_level, AddedToken("aa", **raw), AddedToken("0", **raw), AddedToken("▁▁", **raw)
    )
    for tokenizer in kinds.values():
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return kinds
