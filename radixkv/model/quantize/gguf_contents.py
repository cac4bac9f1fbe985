# SPDX-License-Identifier: Apache-2.0
"""What a GGUF file says of a model beside its weights: sizes and tokenizer.

Sizes are named by transformers' own table, read backwards. `lost_settings` reads them again as a server
will, so that a model with a setting that GGUF has no name for is refused and not changed silently.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

from radixkv.errors import ModelLoadError
from radixkv.model.loading.gguf_configs import LEFT_OUT, complete_config

#: transformers' model_type -> the architecture's name in GGUF.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "starcoder2": "starcoder2",
}
#: Settings that change no logits, or that come from the tensors and the tokenizer.
_IRRELEVANT = {
    "_model_name_or_path", "_name_or_path", "architectures", "attention_dropout", "attn_implementation",
    "bos_token_id", "chunk_size_feed_forward", "classifier_dropout", "dtype", "embd_pdrop",
    "embedding_dropout", "eos_token_id", "id2label", "initializer_range", "label2id", "max_window_layers",
    "model_type", "pad_token_id", "pretraining_tp", "problem_type", "resid_pdrop", "residual_dropout",
    "tie_word_embeddings", "torch_dtype", "transformers_version", "unk_token_id", "use_cache",
}  # fmt: skip
#: Of gguf's token types.
_NORMAL, _CONTROL, _USER, _UNUSED, _BYTE = 1, 3, 4, 5, 6
TOKENIZER_KEY = "tokenizer.huggingface.json"


def add_sizes(writer: Any, config: Any) -> None:
    """Write a configuration's sizes to a GGUFWriter of its architecture."""
    from transformers import modeling_gguf_pytorch_utils as reading

    architecture = ARCHITECTURES[config.model_type]
    rope = getattr(config, "rope_parameters", None) or {}
    known: dict[str, Any] = reading.GGUF_TO_TRANSFORMERS_MAPPING
    names = known["config"][architecture] | LEFT_OUT
    writer.add_name(str(getattr(config, "_name_or_path", "") or "model").rstrip("/").rpartition("/")[2])
    for suffix, name in names.items():
        value = None if name is None else getattr(config, name, rope.get(name))
        key = f"{architecture}.{suffix}"
        if isinstance(value, int) and suffix.endswith(("freq_base", "epsilon")):
            value = float(value)
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)


def lost_settings(config: Any) -> list[str]:
    """Settings of a configuration that a reader of the GGUF file would not get back, as `name (value)`."""
    import gguf
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sizes.gguf"
        writer = gguf.GGUFWriter(str(path), ARCHITECTURES[config.model_type])
        add_sizes(writer, config)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        read = AutoConfig.from_pretrained(folder, gguf_file=path.name)
        complete_config(path, read)
        found = read.to_dict()
    return [
        f"{name} ({value!r:.80})"
        for name, value in sorted(config.to_dict().items())
        if name not in _IRRELEVANT and value is not None and not _same(value, found.get(name))
    ]


def _same(one: Any, other: Any) -> bool:
    """Equal, with numbers as float32 has them."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_same(one.get(key), other.get(key)) for key in one.keys() | other.keys())
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return math.isclose(one, other, rel_tol=1e-6) if numbers else bool(one == other)


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
