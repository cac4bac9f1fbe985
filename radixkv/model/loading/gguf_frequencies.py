# SPDX-License-Identifier: Apache-2.0
"""Divisors of rotary frequencies, which files of Llama 3.1 and later have as a tensor."""

from __future__ import annotations

from typing import Any

import torch

from radixkv.errors import ModelLoadError
from radixkv.model.loading.gguf_file import GGUFFile

FACTORS = "rope_freqs.weight"


def divide_frequencies(file: GGUFFile, model: Any) -> None:
    """Divide a model's rotary frequencies by the factors of its file, where that has some.

    Raises:
        ModelLoadError: factors of another number than the model's frequencies, or no positive numbers.
    """
    if FACTORS not in file.tensors:
        return
    factors = torch.from_numpy(file.dequantised(FACTORS).reshape(-1))
    # Where layers differ in kind, files have the factors of those without a window.
    names = ("inv_freq", "full_attention_inv_freq")
    rotary = [
        (module, name) for module in model.modules() for name in names
        if isinstance(getattr(module, name, None), torch.Tensor)
    ]  # fmt: skip
    sizes = {len(getattr(*each)) for each in rotary}
    if sizes != {len(factors)} or not bool((factors > 0).all() & factors.isfinite().all()):
        raise ModelLoadError(
            f"The tensor {FACTORS} of {file.path} has {len(factors)} values, and the model has "
            f"{sorted(sizes)} rotary frequencies, which must be divided by positive numbers. The file is "
            "damaged, or of another model."
        )
    for module, name in rotary:
        for own in (name, name.replace("inv_freq", "original_inv_freq")):
            frequencies = getattr(module, own, None)
            if isinstance(frequencies, torch.Tensor):
                setattr(module, own, frequencies / factors.to(frequencies.device))
