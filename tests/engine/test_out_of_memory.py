# SPDX-License-Identifier: Apache-2.0
"""Steps that find no memory on the device: smaller ones follow, and nobody's answer changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paged_language_model import VOCAB, PagedHashModel, greedy_reference, make_engine, run_all
from tiny_models import save_tiny_model

from radixkv import LLM, SamplingParams
from radixkv.errors import OutOfDeviceMemoryError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)

pytestmark = pytest.mark.injects_faults


class SmallDevice(PagedHashModel):
    """Model that has memory for some tokens a step."""

    def __init__(self, num_blocks: int, block_size: int, most: int) -> None:
        super().__init__(num_blocks, block_size)
        self.most = most
        self.sizes: list[int] = []

    def execute(self, batch: Any) -> torch.Tensor:
        if batch.num_tokens > self.most:
            raise OutOfDeviceMemoryError("tried to allocate 20.00 GiB")
        self.sizes.append(batch.num_tokens)
        return super().execute(batch)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_smaller_steps_follow(looks_ahead: bool) -> None:
    model = SmallDevice(120, 8, 40)
    engine, _ = make_engine(num_blocks=120, budget=300, model=model, async_scheduling=looks_ahead)
    prompts = [prompt(i % 3, 60 + 7 * i) for i in range(8)]
    ids = [engine.add_request(each, GREEDY) for each in prompts]
    outputs = run_all(engine)
    assert [outputs[i].outputs[0].token_ids for i in ids] == [greedy_reference(p, 12) for p in prompts]
    assert engine.scheduler.max_num_batched_tokens == 37  # 300, 150, 75, 37
    assert max(model.sizes) == 37
    assert engine.stats().num_rebuilds == 0
    engine.check()
    assert engine.cache.stats.held_blocks == 0


def test_a_rebuilt_cache_keeps_the_smaller_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SmallDevice(120, 8, 40)
    engine, _ = make_engine(num_blocks=120, budget=300, model=model)
    ids = [engine.add_request(prompt(i, 90), GREEDY) for i in range(3)]
    engine.step()
    while engine.scheduler.max_num_batched_tokens > 40:
        engine.step()
    lowered = engine.scheduler.max_num_batched_tokens

    def broken(*_: Any, **__: Any) -> None:
        monkeypatch.undo()
        raise AssertionError("broken")

    monkeypatch.setattr(engine.scheduler, "complete", broken)
    outputs = run_all(engine)
    assert engine.stats().num_rebuilds == 1
    assert engine.scheduler.max_num_batched_tokens == lowered
    assert [outputs[i].outputs[0].token_ids for i in ids] == [
        greedy_reference(prompt(i, 90), 12) for i in range(3)
    ]
    engine.check()
    assert engine.cache.stats.held_blocks == 0


def test_a_device_without_any_fails_the_requests_and_serves_again() -> None:
    model = SmallDevice(64, 8, 0)
    engine, _ = make_engine(num_blocks=64, budget=64, model=model)
    bad = engine.add_request(prompt(1, 40), GREEDY)
    outputs = run_all(engine)
    assert outputs[bad].error_code == "step_failed"
    assert "20.00 GiB" in outputs[bad].error
    model.most = 64
    good = engine.add_request(prompt(1, 40), GREEDY)
    assert run_all(engine)[good].outputs[0].token_ids == greedy_reference(prompt(1, 40), 12)
    engine.check()
    assert engine.cache.stats.held_blocks == 0


def test_what_torch_raises_is_known(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tiny", "llama")
    prompts = [[(7 * i + j) % 90 + 1 for j in range(50)] for i in range(3)]
    options: dict[str, Any] = {"num_blocks": 64, "max_num_batched_tokens": 128, "warm_up": "off"}
    llm = LLM(str(folder), **options)
    expected = [each.outputs[0].token_ids for each in llm.generate(prompts, GREEDY)]
    llm.close()

    def refuse(module: Any, inputs: Any, options: Any) -> None:
        if any(part.numel() > 40 for part in (*inputs, *options.values()) if isinstance(part, torch.Tensor)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")

    llm = LLM(str(folder), **options)
    llm.engine.runner.model.register_forward_pre_hook(refuse, with_kwargs=True)
    found = [each.outputs[0].token_ids for each in llm.generate(prompts, GREEDY)]
    assert found == expected
    assert llm.engine.scheduler.max_num_batched_tokens <= 40
    llm.close()
