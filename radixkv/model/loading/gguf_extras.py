# SPDX-License-Identifier: Apache-2.0
"""What transformers leaves out of a GGUF file: a tokenizer.json, rotary factors, whether its sizes fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from radixkv.errors import ModelLoadError
from radixkv.model.loading.gguf_metadata import known_metadata

_TOKENIZER_KEY = "tokenizer.huggingface.json"
#: The tensor of divisors of rotary frequencies.
FACTORS = "rope_freqs.weight"


def own_tokenizer(path: Path) -> Any | None:
    """The tokenizer of the whole tokenizer.json that a file may carry; None: it carries none."""
    values = known_metadata(path).values
    text = values.get(_TOKENIZER_KEY)
    if not isinstance(text, str):
        return None
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text))
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = values.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token, int) and token < len(tokenizer):
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token))
    template = values.get("tokenizer.chat_template")
    if isinstance(template, str):
        tokenizer.chat_template = template
    return tokenizer


def check_size(path: Path, hf_config: Any) -> None:
    """Refuse a file whose sizes make a far larger model than it has weights for, before memory is taken.

    Raises:
        ModelLoadError: they do.
    """
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    stored = sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(str(path)).tensors)
    if expected > 2.5 * stored + 2**20:  # tied weights are stored once
        raise ModelLoadError(
            f"{path} has {stored:,} weights, and its sizes make a model of {expected:,}. It is damaged or "
            "was tampered with; fetch it again from a source you trust."
        )


def divide_frequencies(path: Path, model: Any) -> None:
    """Divide rotary frequencies by the factors of a file (Llama 3.1 and later have some).

    Raises:
        ModelLoadError: factors of another number than the model's frequencies, or no positive numbers.
    """
    if FACTORS not in known_metadata(path).tensors:
        return
    import gguf
    import numpy as np
    import torch

    (tensor,) = (one for one in gguf.GGUFReader(str(path)).tensors if one.name == FACTORS)
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(-1)
    factors = torch.from_numpy(np.array(values, dtype=np.float32))
    # Where layers differ in kind, files have the factors of those without a window.
    names = ("inv_freq", "full_attention_inv_freq")
    rotary = [
        (module, name) for module in model.modules() for name in names
        if isinstance(getattr(module, name, None), torch.Tensor)
    ]  # fmt: skip
    sizes = {len(getattr(*each)) for each in rotary}
    if sizes != {len(factors)} or not bool((factors > 0).all() & factors.isfinite().all()):
        raise ModelLoadError(
            f"The tensor {FACTORS} of {path} has {len(factors)} values, and the model has {sorted(sizes)} "
            "rotary frequencies, which must be divided by positive numbers. The file is damaged, or of "
            "another model."
        )
    for module, name in rotary:
        for own in (name, name.replace("inv_freq", "original_inv_freq")):
            frequencies = getattr(module, own, None)
            if isinstance(frequencies, torch.Tensor):
                setattr(module, own, frequencies / factors.to(frequencies.device))
