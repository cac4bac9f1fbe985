"""Packed weights: chosen by a rule, so that two starts compute the same, with any number of threads."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_fused_layers import tiny
from tiny_models import save_tiny_model
from torch import nn

pytest.importorskip("numba")

from radixkv import LLM, SamplingParams
from radixkv.model.cpu.fused_layers import FusedLayer
from radixkv.model.cpu.packed_linear import PackedLinear
from radixkv.model.cpu.rewrite import has_vector_kernels, pack_layers

needs_vectors = pytest.mark.skipif(not has_vector_kernels(), reason="no fused multiply-adds here")


@needs_vectors
@pytest.mark.parametrize("slow_half", [0, 1])
def test_no_timing_decides(slow_half: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of two ways a busy machine makes look slow, the same layers are packed."""
    calls = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(calls) // 2 % 2 == slow_half))
    model = tiny("qwen3", head_dim=8)
    assert pack_layers(model)
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    llama = tiny("llama")
    assert pack_layers(llama)
    assert sum(isinstance(module, FusedLayer) for module in llama.modules()) == 2


def test_other_dtypes_stay_as_they_are() -> None:
    model = tiny("llama").to(torch.bfloat16)
    assert not pack_layers(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


@pytest.fixture
def thread_count() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_vectors
@pytest.mark.usefixtures("thread_count")
@pytest.mark.parametrize(("family", "quantization"), [("llama", None), ("llama", "int8"), ("gemma2", None)])
def test_threads_change_no_bit(tmp_path: Path, family: str, quantization: str | None) -> None:
    """A busy machine makes the engine compute with fewer threads: slower, and the same."""
    folder = save_tiny_model(tmp_path / family, family, hidden_size=256, intermediate_size=512)
    options = {"quantization": quantization, "enable_prefix_caching": False}
    llm = LLM(str(folder), device="cpu", num_blocks=64, max_model_len=256, **options)
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=6, ignore_eos=True, logprobs=3)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outputs = llm.generate([list(range(3, 180)), [7, 8, 9]], params)
        found.append([(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs])
    assert found[0] == found[1] == found[2]
