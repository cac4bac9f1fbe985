# SPDX-License-Identifier: Apache-2.0
"""The rewritten CPU layers are an extra: without their folder, models run as transformers wrote them."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch
from test_fused_layers import tiny
from torch import nn

import radixkv
from radixkv.errors import ConfigError
from radixkv.model import device_paths
from radixkv.model.cpu_layers import rewrite
from radixkv.model.cpu_layers.rewrite import has_vector_kernels

ROOT = Path(radixkv.__file__).parent
FOLDER = "radixkv.model.cpu_layers"


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_few_files_know_the_folder() -> None:
    """One rewrites models; the others build them of blocks, which nothing else could compute."""
    users = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if any(name == FOLDER or name.startswith(FOLDER + ".") for name in imports(path))
    }
    outside = {path for path in users if not path.startswith("model/cpu_layers/")}
    loaders = {"model/loading/gguf_blocks.py", "model/loading/gguf_experts.py", "model/loading/pretrained.py"}
    assert outside == {"model/device_paths.py", *loaders}


@pytest.fixture
def without_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == FOLDER or name.startswith(FOLDER + ".")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, FOLDER, None)


@pytest.mark.usefixtures("without_the_folder")
def test_models_run_without_it() -> None:
    model = tiny("llama")
    layers = [type(module) for module in model.modules()]
    device_paths.rewrite_layers(model, None, "cpu")
    assert [type(module) for module in model.modules()] == layers
    assert device_paths.make_thread_control() is None
    with pytest.raises(ConfigError, match="--quantization int8"):
        device_paths.rewrite_layers(model, "int8", "cpu")


def test_with_it_layers_are_rewritten_where_they_can_be() -> None:
    half = tiny("llama").to(torch.bfloat16)
    device_paths.rewrite_layers(half, None, "cpu")
    assert any(isinstance(module, nn.Linear) for module in half.modules()) != has_vector_kernels()
    narrow = tiny("llama", hidden_size=96)
    device_paths.rewrite_layers(narrow, "int8", "cpu")
    assert not any(isinstance(module, nn.Linear) for module in narrow.modules())
    assert device_paths.make_thread_control() is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_dtype_that_is_slower_here_is_said_at_start(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rewrite, "has_vector_kernels", lambda: False)
    monkeypatch.setattr(rewrite, "torch_is_fast", lambda dtype: False)
    device_paths.rewrite_layers(tiny("llama").to(dtype), None, "cpu")
    assert str(dtype).removeprefix("torch.") in caplog.text
    assert "slower than float32" in caplog.text
    caplog.clear()
    monkeypatch.setattr(rewrite, "torch_is_fast", lambda dtype: True)
    device_paths.rewrite_layers(tiny("llama").to(dtype), None, "cpu")
    assert caplog.text == ""


def test_int8_without_instructions_for_it_is_said_at_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rewrite, "has_int8_products", lambda: False)
    device_paths.rewrite_layers(tiny("llama", hidden_size=96), "int8", "cpu")
    assert "--quantization int8 will be slower than float32" in caplog.text


def test_what_is_fast_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    if not rewrite.has_vector_kernels() or not rewrite.has_int8_products():
        pytest.skip("products are left to torch here")
    device_paths.rewrite_layers(tiny("llama").to(torch.bfloat16), None, "cpu")
    device_paths.rewrite_layers(tiny("llama", hidden_size=96), "int8", "cpu")
    device_paths.rewrite_layers(tiny("llama"), None, "cpu")
    assert caplog.text == ""
