# SPDX-License-Identifier: Apache-2.0
"""Weights on their way to a device: host memory holds no second copy of the model.

The device is torch's `meta`, which takes tensors and keeps none of their bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints as written
import torch
from gguf_files import write_llama_gguf
from host_bytes import HostBytes
from quantised_formats import FORMATS
from tiny_models import save_tiny_model

from radixkv.model.loading.loader import check_stored_form
from radixkv.model.loading.model_source import ModelSource
from radixkv.model.loading.pretrained import Pretrained

DEVICE = torch.device("meta")
LAYERS = 6
#: Bytes of the model in 4 bits, at least.
SMALLEST = 400_000

Read = Callable[[Pretrained, Any], Any]


def llama(folder: Path) -> Path:
    """A model of several layers, so that one is a small part of it."""
    return save_tiny_model(
        folder / "tiny-llama",
        "llama",
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        head_dim=64,
    )


def plain(folder: Path) -> tuple[ModelSource, Read]:
    """Safetensors in bfloat16."""
    source = ModelSource("llama", llama(folder))
    return source, lambda files, config: files.model(config, torch.bfloat16, DEVICE, False)


def quantised(name: str, keeps: Any) -> Callable[[Path], tuple[ModelSource, Read]]:
    """A quantised checkpoint, expanded or in the tiles that a GPU's kernels read."""

    def make(folder: Path) -> tuple[ModelSource, Read]:
        own = llama(folder)
        write, settings = FORMATS[name]
        written.quantise(own, write, settings, plain=Path(shutil.copytree(own, folder / "plain")))
        source = ModelSource("llama", own)
        form = check_stored_form(source)
        assert form is not None
        return source, lambda files, config: files.model(
            config, torch.bfloat16, DEVICE, False, form=form, keeps=keeps
        )

    return make


def blocks(*, kept: bool) -> Callable[[Path], tuple[ModelSource, Read]]:
    """A GGUF file, expanded or in tiles."""

    def make(folder: Path) -> tuple[ModelSource, Read]:
        path = write_llama_gguf(folder / "tiny.gguf", {"rest": "Q8_0"}, layers=LAYERS, tied=False)
        source = ModelSource(path.stem, path.parent, path.name)
        if kept:
            return source, lambda files, config: files.block_model(
                config, False, dtype=torch.bfloat16, device=DEVICE
            )
        return source, lambda files, config: files.model(config, torch.bfloat16, DEVICE, False)

    return make


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(plain, id="bfloat16"),
        pytest.param(quantised("fp8-blocks", None), id="fp8 expanded"),
        pytest.param(quantised("fp8-blocks", "tiles"), id="fp8 tiles"),
        pytest.param(quantised("mlx-4", "tiles"), id="mlx tiles"),
        pytest.param(quantised("awq", "tiles"), id="awq tiles"),
        pytest.param(quantised("gptq", "tiles"), id="gptq tiles"),
        pytest.param(quantised("gptq-act-order", "tiles"), id="gptq in activation order, tiles"),
        pytest.param(quantised("nf4", "tiles"), id="nf4 tiles"),
        pytest.param(blocks(kept=False), id="gguf expanded"),
        pytest.param(blocks(kept=True), id="gguf tiles"),
    ],
)
def test_host_memory_holds_a_layer_at_most(
    make: Callable[[Path], tuple[ModelSource, Read]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # bytes are counted on one thread
    source, read = make(tmp_path)
    files = Pretrained(source)
    config = files.config()
    with HostBytes() as host:
        model = read(files, config)
    tensors = [*model.parameters(), *model.buffers()]
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert host.moved >= SMALLEST
    assert host.peak <= host.moved / 3


def test_a_model_that_is_read_and_then_moved_is_found(tmp_path: Path) -> None:
    """What the count is for: the whole model stands in host memory."""
    source, _ = blocks(kept=False)(tmp_path)
    files = Pretrained(source)
    config = files.config()
    with HostBytes() as host:
        files.model(config, torch.bfloat16, torch.device("cpu"), False).to(DEVICE)
    assert host.peak >= 0.9 * host.moved / 2
