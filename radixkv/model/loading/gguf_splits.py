# SPDX-License-Identifier: Apache-2.0
"""How byte-level tokenizers of GGUF files split text before they merge, where transformers doesn't know it.

A file has a name for it (`tokenizer.ggml.pre`), which llama.cpp gave; patterns are those of the
tokenizer.json of the models that the name was made for.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from radixkv.model.loading.gguf_metadata import known_metadata

logger = logging.getLogger("radixkv")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _words(digits: str) -> str:
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_THREE, _ONE = (_words(r"\p{N}{1,3}"),), (_words(r"\p{N}"),)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
_SEED = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
#: Split at every digit, and then as GPT-2 does.
_DIGITS = (r"\p{N}",)
#: Names of splits -> patterns of consecutive splits; none: as GPT-2 does.
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "olmo", "mpt", "jais", "exaone4", "trillion", "dots1"), ()),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS
    ),
    **dict.fromkeys(("chatglm-bpe", "glm4"), _THREE),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), _ONE),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK),
    "deepseek-coder": _CODER,
    "seed-coder": _SEED,
}


def split_text(path: Path, tokenizer: Any) -> None:
    """Let a tokenizer split text as its file says; warn if nothing is known about that.

    Args:
        tokenizer: as transformers reads it from the file.
    """
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    values = known_metadata(path).values
    name = str(values.get("tokenizer.ggml.pre"))
    if values.get("tokenizer.ggml.model") != "gpt2" or name in GGUF_PRE_TOKENIZER_SPLITS:
        return
    patterns = _SPLITS.get(name)
    if patterns is None:
        logger.warning(
            "%s splits text in a way unknown here (%s): some text may become other tokens", path, name
        )
        return
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=patterns in ((), _DIGITS))
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
