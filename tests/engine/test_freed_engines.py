# SPDX-License-Identifier: Apache-2.0
"""An engine's memory is free when nobody refers to it any more, without the garbage collector.

On a GPU the next engine needs it at once.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nightly import by_day
from tiny_models import save_tiny_model

from radixkv import LLM, SamplingParams
from radixkv.model.runner import ModelRunner


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("family", "options", "closes"),
    by_day(
        [
            ("llama", {}, False),
            ("llama", {}, True),
            ("llama", {"deterministic": True}, False),
            ("llama", {"speculation": "off"}, False),
            # Without an end, a transfer to the tier may still be reading.
            ("llama", {"kv_tier": "host:1MiB"}, True),
            ("llama", {"quantization": "int8"}, False),
            ("gemma2", {}, False),
            ("gpt-oss", {}, True),
        ],
        ("llama", {}, False),
        ("llama", {"kv_tier": "host:1MiB"}, True),
        ("gpt-oss", {}, True),
    ),
)
def test_model_and_kv_go_with_the_last_reference(
    family: str, options: dict[str, Any], closes: bool, tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path / family, family)
    llm = LLM(str(folder), device="cpu", num_blocks=64, block_size=8, max_model_len=128, **options)
    prompt = list(range(5, 40))
    llm.generate([prompt, prompt], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    with pytest.raises(ValueError, match="id"):
        llm.generate([[10**9]])
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    parts = (llm.engine, runner, runner.model, runner.kv, runner.backend, *runner.kv.tensors())
    held = [weakref.ref(part) for part in (*parts, *runner.model.parameters())]
    del runner, parts
    if closes:
        llm.close()
    del llm
    left = [type(part).__name__ for reference in held if (part := reference()) is not None]
    assert not left
