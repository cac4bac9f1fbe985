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
from radixkv.model import cpu_paths

ROOT = Path(radixkv.__file__).parent
FOLDER = "radixkv.model.cpu"


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_one_file_knows_the_folder() -> None:
    users = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if any(name == FOLDER or name.startswith(FOLDER + ".") for name in imports(path))
    }
    assert {path for path in users if not path.startswith("model/cpu/")} == {"model/cpu_paths.py"}


@pytest.fixture
def without_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == FOLDER or name.startswith(FOLDER + ".")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, FOLDER, None)


@pytest.mark.usefixtures("without_the_folder")
def test_models_run_without_it() -> None:
    model = tiny("llama")
    layers = [type(module) for module in model.modules()]
    cpu_paths.rewrite_layers(model, None)
    assert [type(module) for module in model.modules()] == layers
    assert cpu_paths.make_thread_control() is None
    with pytest.raises(ConfigError, match="--quantization int8"):
        cpu_paths.rewrite_layers(model, "int8")


def test_with_it_layers_are_rewritten_where_they_can_be() -> None:
    half = tiny("llama").to(torch.bfloat16)
    cpu_paths.rewrite_layers(half, None)
    assert any(isinstance(module, nn.Linear) for module in half.modules())
    narrow = tiny("llama", hidden_size=96)
    cpu_paths.rewrite_layers(narrow, "int8")
    assert not any(isinstance(module, nn.Linear) for module in narrow.modules())
    assert cpu_paths.make_thread_control() is not None
