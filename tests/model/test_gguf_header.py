# SPDX-License-Identifier: Apache-2.0
"""Damaged GGUF files: a sentence or a model, quickly, never a crash."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import write_llama_gguf
from tiny_models import finish_gguf, llama_gguf_writer

from radixkv.engine.config import EngineConfig
from radixkv.errors import ModelLoadError
from radixkv.model.loading.gguf_header import check_header
from radixkv.model.loading.loader import load_model
from radixkv.model.loading.model_source import resolve_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    return write_llama_gguf(path, {"rest": "Q8_0"}, hidden=64, layers=1).read_bytes()


def refusal(data: bytes, path: Path) -> str:
    path.write_bytes(data)
    with pytest.raises(ModelLoadError) as caught:
        check_header(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def damaged(data: bytes, after: bytes, offset: int, form: str, value: int) -> bytes:
    """The file with a number replaced, `offset` bytes after the end of a name."""
    place = data.index(after) + len(after) + offset
    return data[:place] + struct.pack(form, value) + data[place + struct.calcsize(form) :]


def test_what_the_gguf_package_writes_is_accepted(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "whole.gguf"
    path.write_bytes(whole)
    check_header(path)


@pytest.mark.parametrize(
    ("after", "offset", "form", "value", "expected"),
    [
        (b"GGUF", 0, "<I", 7, "of version 7"),
        (b"GGUF", 0, ">I", 3, "big-endian"),
        (b"GGUF", 4, "<Q", 2**60, "claims to have"),
        (b"GGUF", 12, "<Q", 2**60, "claims to have"),
        (b"tokenizer.ggml.tokens", 0, "<I", 99, "unknown type 99"),
        (b"tokenizer.ggml.tokens", 8, "<Q", 2**40, "elements"),
        (b"tokenizer.ggml.tokens", 8, "<Q", 2**20, "more than the rest of the file"),
        (b"llama.embedding_length", 4, "<I", 2**31, "its llama.embedding_length is"),
        (b"llama.block_count", 4, "<I", 4000, "tensors of 1 layers"),
        (b"llama.attention.head_count", 4, "<I", 2**14, "its llama.attention.head_count is"),
        (b"blk.0.attn_q.weight", 0, "<I", 9, "has 9 dimensions"),
        (b"blk.0.attn_q.weight", 4, "<Q", 2**62, "after the file"),
        (b"blk.0.attn_q.weight", 4, "<Q", 0, "has the shape"),
        (b"blk.0.attn_q.weight", 20, "<I", 4, "unknown format 4"),
        (b"blk.0.attn_q.weight", 24, "<Q", 2**61, "after the file"),
        (b"blk.0.attn_q.weight", 24, "<Q", 1, "not a multiple of 32"),
    ],
)
def test_each_damage_is_named(
    whole: bytes, tmp_path: Path, after: bytes, offset: int, form: str, value: int, expected: str
) -> None:
    assert expected in refusal(damaged(whole, after, offset, form, value), tmp_path / "damaged.gguf")


def test_a_tensor_twice(whole: bytes, tmp_path: Path) -> None:
    twice = whole.replace(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight")
    assert "is in it twice" in refusal(twice, tmp_path / "twice.gguf")


@pytest.mark.parametrize("keep", [5, 23, 24, 300, 5000, -1])
def test_cut_off(whole: bytes, tmp_path: Path, keep: int) -> None:
    refusal(whole[:keep], tmp_path / "cut.gguf")


def test_a_layer_of_a_high_number_makes_no_layers(whole: bytes, tmp_path: Path) -> None:
    data = damaged(whole, b"llama.block_count", 4, "<I", 9)
    renamed = data.replace(b"blk.0.attn_q.weight", b"blk.8.attn_q.weight")
    assert "its llama.block_count is 9" in refusal(renamed, tmp_path / "layers.gguf")


def test_random_damages_are_refused_or_read(whole: bytes, tmp_path: Path) -> None:
    """Whatever passes the check, the gguf package reads, with each tensor within the file."""
    chance, path = random.Random(0), tmp_path / "damaged.gguf"
    end = whole.index(b"blk.0.ffn_up.weight") + 64
    refused, began = 0, time.process_time()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 1, 2, 8))):
            data[chance.randrange(4, end)] = chance.choice((0, 1, 255, chance.randrange(256)))
        path.write_bytes(data)
        try:
            check_header(path)
        except ModelLoadError:
            refused += 1
            continue
        reader: np.ndarray | None = None
        try:
            reader = gguf.GGUFReader(str(path)).data
        except (ValueError, KeyError, UnicodeDecodeError):
            continue
        assert reader is not None
    assert refused > 50
    assert time.process_time() - began < 60


@pytest.mark.parametrize(
    ("architecture", "kind", "expected"),
    [
        ("llama", "adapter", "holds an adapter .* PEFT folder for --lora"),
        ("clip", "mmproj", "holds the encoder of images"),
        ("clip", None, "holds the encoder of images"),
        ("llama", "imatrix", "holds an importance matrix"),
    ],
)
def test_files_without_a_model_are_named(
    architecture: str, kind: str | None, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(str(path), architecture)
    if kind is not None:
        writer.add_type(kind)
    writer.add_block_count(4)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((4, 32), np.float32))
    finish_gguf(writer)
    with pytest.raises(ModelLoadError, match=expected):
        resolve_model(str(path))


def test_a_vocabulary_alone_and_a_folder_of_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    writer, _ = llama_gguf_writer(path, hidden=64, inner=64, layers=1, context=64)
    finish_gguf(writer)
    for name, expected in {
        str(path): "has a vocabulary and no weights",
        str(tmp_path): r"It has GGUF files: name one of them, such as .*vocabulary\.gguf",
    }.items():
        with pytest.raises(ModelLoadError, match=expected):
            load_model(EngineConfig(model=name, device="cpu"), show_progress=False)
