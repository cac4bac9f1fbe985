# SPDX-License-Identifier: Apache-2.0
"""K/V on a GPU get what the largest step leaves; a GPU's memory is counted by a stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_configs import VOCAB_SIZE
from tiny_models import save_tiny_model
from tiny_vision_models import save_tiny_vision_model

from radixkv.engine.config import EngineConfig
from radixkv.model.attention.attention_shape import AttentionShape
from radixkv.model.loading.loader import load_model
from radixkv.model.memory import step_memory
from radixkv.model.memory.kv_memory import ModelShape, is_sized_by_gpu, size_kv_cache
from radixkv.model.memory.step_memory import measure_encoding_memory, measure_step_memory
from radixkv.model.vision.encoder_cache import Encoding
from radixkv_kernels import KVGroup

GIB = 2**30


def test_a_step_of_the_full_budget_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    loaded = load_model(EngineConfig(model=str(save_tiny_model(tmp_path / "llama", "llama")), device="cpu"))
    reserved = 0
    empty = torch.empty

    def counting(*args, **kwargs):  # type: ignore[no-untyped-def]
        nonlocal reserved
        made = empty(*args, **kwargs)
        reserved += made.nbytes
        return made

    shapes: list[tuple[int, ...]] = []
    forward = loaded.model.forward

    def watched(**inputs):  # type: ignore[no-untyped-def]
        output = forward(**inputs)
        shapes.extend([tuple(inputs["input_ids"].shape), tuple(output.logits.shape)])
        return output

    def rewrite(model, quantization, backend):  # type: ignore[no-untyped-def]
        assert model is loaded.model
        assert backend == "triton"
        assert not shapes, "what is measured must be what will run"
        rewritten.append(model)

    rewritten: list[torch.nn.Module] = []
    monkeypatch.setattr(step_memory, "rewrite_layers", rewrite)
    monkeypatch.setattr(loaded.model, "forward", watched)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: reserved)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: reserved + 5_000_000)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
    monkeypatch.setattr(torch, "empty", counting)
    taken = measure_step_memory(
        loaded, None, max_num_tokens=96, max_num_seqs=4, max_padded_rows=12, max_model_len=64
    )
    assert shapes == [(1, 96), (1, 12, VOCAB_SIZE), (1, 12), (1, 12, VOCAB_SIZE)]
    assert rewritten
    assert reserved > 0
    # Activations, those of recorded steps, 14 graphs, twenty bytes and a copy of each logit, and the
    # partials that the backend has allocated.
    launches, rest = divmod(
        taken - (2 * 5_000_000 + 12 * VOCAB_SIZE * (20 + 4) + reserved), 2 * 7 * (2**18 // 12)
    )
    assert rest == 0
    # transformers' layers have some 25 operators; kernels of our own come on top.
    assert 20 <= launches / loaded.attention.num_layers <= 60


def test_views_and_empty_memory_are_no_launches() -> None:
    triton = pytest.importorskip("triton")
    with step_memory.LaunchCount() as launches:
        a = torch.empty(4, 4)
        b = a.view(2, 8).transpose(0, 1)[1:]
        assert launches.count == 0
        b.add_(1)
        torch.mm(a, a)
        assert launches.count == 2
        triton.knobs.runtime.launch_enter_hook(None)  # as each launch of a kernel on a GPU does
    triton.knobs.runtime.launch_enter_hook(None)
    assert launches.count == 3


def test_kv_memory_is_what_a_step_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (60 * GIB, 80 * GIB))
    alike = AttentionShape((KVGroup(tuple(range(32)), 32, 8, 128, 128),), {})
    shape = ModelShape(alike, torch.bfloat16, torch.device("cuda"), 8192)
    config = EngineConfig(model="m", gpu_memory_utilization=0.9)
    assert is_sized_by_gpu(config, shape.device)
    spec, _, _ = size_kv_cache(config, shape, 7 * GIB)
    # 72 GiB may be used, 20 are, 7 are for a step.
    assert spec.num_blocks == int(45 * GIB) // spec.bytes_per_block
    assert not is_sized_by_gpu(EngineConfig(model="m", num_blocks=5), shape.device)
    assert not is_sized_by_gpu(EngineConfig(model="m", kv_cache_memory=GIB), shape.device)
    assert not is_sized_by_gpu(config, torch.device("cpu"))


def test_a_tower_is_measured_on_the_largest_image_that_a_prompt_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    folder = save_tiny_vision_model(tmp_path, "qwen2_5_vl")
    vision = load_model(EngineConfig(model=str(folder), device="cpu")).vision
    assert vision is not None
    encode, encoded = vision.encode, list[int]()

    def watched(inputs: dict[str, torch.Tensor]) -> Encoding:
        encoding = encode(inputs)
        encoded.append(encoding.num_bytes)
        return encoding

    monkeypatch.setattr(vision, "encode", watched)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: 501_000)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
    row = 64 * 4  # of float32
    taken = measure_encoding_memory(vision, 2048)
    # 80 tokens are the most that these settings allow, of which a square gets 8 by 8; then 4 by 4 fit.
    assert encoded == [64 * row]
    assert taken == 500_000 - 64 * row
    measure_encoding_memory(vision, 60)
    assert encoded[1:] == [16 * row]
