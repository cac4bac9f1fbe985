# SPDX-License-Identifier: Apache-2.0
"""Weights that the packages of quantised formats stored, read to the numbers that these make of them.

`tests/support/record_stored_weights.py` recorded them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv.model.loading.checkpoint_formats import check_format
from radixkv.model.loading.stored_forms.mapped_tensors import MappedTensors
from radixkv.model.loading.stored_forms.readers import READERS
from radixkv.model.loading.weight_files import stored_tensors

FOLDER = Path(__file__).parents[1] / "data" / "stored_weights"
RECORDINGS: dict[str, Any] = json.loads((FOLDER / "recordings.json").read_text())
#: bitsandbytes divides each number by 127, not the scale: float32's last bit may differ.
ROUNDED = ("bitsandbytes-8",)


@pytest.mark.parametrize("name", RECORDINGS)
def test_numbers_are_those_of_the_package(tmp_path: Path, name: str) -> None:
    path, settings = tmp_path / "model.safetensors", RECORDINGS[name]["settings"]
    shutil.copy(FOLDER / f"{name}.safetensors", path)
    key = "quantization_config" if "quant_method" in settings else "quantization"
    (tmp_path / "config.json").write_text(json.dumps({key: settings}))
    form = check_format(name, tmp_path, stored_tensors(tmp_path))
    assert form is not None
    tensors = MappedTensors([path])
    found = READERS[form.method](tensors, form.settings)
    assert set(tensors) - found.read == {"reference"}
    (weight,) = found.weights.values()
    reference = tensors["reference"]
    numbers = weight.dequantized(reference.dtype)
    if name in ROUNDED:
        assert torch.allclose(numbers, reference, rtol=2e-7, atol=0)
    else:
        assert torch.equal(numbers, reference)
