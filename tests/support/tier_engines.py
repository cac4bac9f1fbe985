# SPDX-License-Identifier: Apache-2.0
"""Engines with a scripted tier and a clock under the test's control, for the tests of `tests/tiers`."""

from __future__ import annotations

from typing import Any

import numpy as np
from paged_language_model import PagedHashModel, make_engine, next_logits, run_all
from scripted_tier import ScriptedTier
from waiting import Clock

from radixkv.engine.engine import Engine
from radixkv.sampling.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPT = [(7 * i) % 90 + 1 for i in range(45)]  # five whole blocks of 8, and 5 tokens


def engine_with(tier: ScriptedTier, **options: Any) -> tuple[Engine, Any, Clock]:
    """Engine, model and clock; options as of `make_engine`."""
    clock = Clock()
    engine, model = make_engine(tier=tier, clock=clock, **options)
    return engine, model, clock


def filled(*prompts: list[int], namespace: Any = "") -> ScriptedTier:
    """A tier that has the whole blocks of some prompts, and takes no more."""
    tier = ScriptedTier()
    engine, _, _ = engine_with(tier, num_blocks=400, max_model_len=400)
    for prompt in prompts:
        engine.add_request(prompt, GREEDY, namespace=namespace)
        run_all(engine)
    assert tier.kept
    tier.num_lookups = 0
    tier.is_open = False
    return tier


def steps(engine: Engine, count: int = 5) -> list[Any]:
    """Some steps, each with a check; what has ended."""
    finished = []
    for _ in range(count):
        finished += engine.step().finished
        engine.check()
    return finished


def assert_right(output: Any, num_cached_tokens: int | None = None) -> None:
    """The output is what the model says without any cache."""
    sample = output.outputs[0]
    assert sample.finish_reason == "length", output
    tokens = list(output.prompt_token_ids)
    for token in sample.token_ids:
        assert token == int(next_logits(np.asarray(tokens)).argmax())
        tokens.append(token)
    if num_cached_tokens is not None:
        assert output.num_cached_tokens == num_cached_tokens


def assert_idle(engine: Engine) -> None:
    """Nothing is held, nothing is lost."""
    stats = engine.cache.stats
    assert (stats.held_blocks, stats.num_leases) == (0, 0)
    engine.check()


def slots_of(model: PagedHashModel) -> list[int]:
    """The tokens in all slots, to see whether anything was written."""
    return model.tokens.tolist()
