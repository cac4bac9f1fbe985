# SPDX-License-Identifier: Apache-2.0
"""A fingerprint covers every byte that answers depend on, and nothing else."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import save_tiny_model, write_tiny_gguf

from radixkv.model.loading.fingerprint import fingerprint
from radixkv.model.loading.model_source import ModelSource


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama", num_hidden_layers=2)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "another-name"))


def of(folder: Path, *facts: str) -> str:
    return fingerprint(ModelSource("any", folder), *facts)


def flip(path: Path, at: int, bits: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ bits]))


def test_place_and_volatile_settings_do_not_enter(original: Path, folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "transformers_version": "0", "dtype": "x"}))
    assert of(folder) == of(original)


def test_every_tensor_enters_to_its_ends(original: Path) -> None:
    path, expected = original / "model.safetensors", of(original)
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    tensors = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    assert len(tensors) == 20
    for start, end in tensors:
        for at in (start, (start + end) // 2, end - 1):
            flip(path, 8 + size + at)
            assert of(original) != expected
            flip(path, 8 + size + at)
    assert of(original) == expected


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_every_byte_of_the_weights_enters(original: Path, data: st.DataObject) -> None:
    path, expected = original / "model.safetensors", of(original)
    at = data.draw(st.integers(0, path.stat().st_size - 1))
    bits = data.draw(st.integers(1, 255))
    # The header must stay one: its length and its keys are not what this is about.
    if at >= 8:
        flip(path, at, bits)
        assert of(original) != expected
        flip(path, at, bits)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizer_enters(original: Path, folder: Path, name: str) -> None:
    (folder / name).write_text((folder / name).read_text() + "\n")
    assert of(folder) != of(original)


def test_configuration_and_facts_enter(original: Path, folder: Path) -> None:
    assert of(original, "float32") != of(original, "bfloat16")
    assert of(original, "a", "b") != of(original, "ab")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 1e-3}))
    assert of(folder) != of(original)


def test_parts_count_in_their_order(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = set()
    for cut in (1_000, 1_001):
        (folder / "a.safetensors").write_bytes(data[:cut])
        (folder / "b.safetensors").write_bytes(data[cut:])
        found.add(of(folder))
    assert len(found) == 2


def test_every_byte_of_a_gguf_file_enters(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    source = ModelSource("tiny", tmp_path, path.name)
    expected = fingerprint(source)
    for at in range(0, path.stat().st_size, 4_999):
        flip(path, at)
        assert fingerprint(source) != expected
        flip(path, at)
    assert fingerprint(source) == expected
