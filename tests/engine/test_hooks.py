# SPDX-License-Identifier: Apache-2.0
"""An engine without hooks is whole; a hook hears of each step, each end and each new cache."""

from __future__ import annotations

import pytest
from paged_language_model import PagedHashModel, greedy_reference, run_all

from radixkv import PrefixCache
from radixkv.engine.config import EngineConfig
from radixkv.engine.counts import EngineStats
from radixkv.engine.engine import Engine
from radixkv.engine.hooks import StepHook
from radixkv.engine.served_model import ServedModel
from radixkv.errors import InvalidRequestError
from radixkv.sampling.sampling_params import SamplingParams

PROMPT = list(range(1, 20))
PARAMS = SamplingParams(max_tokens=3, temperature=0.0)


class Recorder(StepHook):
    """Notes its calls; `broken` is raised in the next step."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.caches: list[PrefixCache] = []
        self.broken: BaseException | None = None

    def attach(self, cache):
        self.caches.append(cache)

    def before_step(self):
        self.calls.append("before")
        if self.broken is not None:
            error, self.broken = self.broken, None
            raise error

    def computed(self, batch, seconds):
        self.calls.append(f"computed {batch.num_tokens}")

    def after_step(self, cache):
        assert cache is self.caches[-1]
        self.calls.append("after")

    def ended(self, sequence, *, discarded):
        self.calls.append(f"ended {sequence.request_id}" + " discarded" * discarded)

    def add_counts(self, stats: EngineStats):
        stats.gap_time_s = -1.0

    def close(self, *, save):
        self.calls.append(f"close {save}")


def engine_with(*hooks: StepHook, **model) -> Engine:
    return Engine(
        EngineConfig(max_num_batched_tokens=64, seed=0),
        PagedHashModel(40, 8, **model),
        PrefixCache(40, 8),
        ServedModel(tokenizer=None, max_model_len=200),
        hooks=hooks,
    )


def test_an_engine_without_hooks_answers_and_refuses_grammars():
    engine = engine_with()
    engine.add_request(PROMPT, PARAMS, request_id="r")
    assert run_all(engine)["r"].outputs[0].token_ids == greedy_reference(PROMPT, 3)
    assert engine.idle_s is None
    engine.wait()
    with pytest.raises(InvalidRequestError, match="compiles no grammars"):
        engine.add_request(PROMPT, SamplingParams(structured={"regex": "a"}))
    engine.close()


def test_hooks_are_called_before_in_and_after_each_step_and_at_ends():
    hook = Recorder()
    engine = engine_with(hook)
    engine.add_request(PROMPT, PARAMS, request_id="r")
    run_all(engine)
    step = ["before", "computed 1", "after"]
    assert hook.calls == ["before", "computed 19", "after", *step, *step[:2], "ended r", "after"]
    assert engine.stats().gap_time_s == -1.0
    engine.close(save=False)
    assert hook.calls[-1] == "close False"


def test_a_hook_that_fails_costs_no_answer_and_gets_the_new_cache():
    hook = Recorder()
    engine = engine_with(hook)
    engine.add_request(PROMPT, PARAMS, request_id="r")
    engine.step()
    hook.broken = RuntimeError("the hook is broken")
    assert run_all(engine)["r"].outputs[0].token_ids == greedy_reference(PROMPT, 3)
    assert [cache is engine.cache for cache in hook.caches] == [False, True]
    assert engine.stats().num_rebuilds == 1


def test_a_hook_hears_of_ends_without_trust():
    hook = Recorder()
    engine = engine_with(hook, nan_for={"r"})
    engine.add_request(PROMPT, PARAMS, request_id="r")
    assert run_all(engine)["r"].error_code == "nan_logits"
    assert "ended r discarded" in hook.calls


def test_hooks_and_runner_are_closed_though_one_hook_fails_to():
    class Failing(Recorder):
        def close(self, *, save):
            raise RuntimeError("it can't be closed")

    last = Recorder()
    with pytest.raises(RuntimeError, match="can't be closed"):
        engine_with(Failing(), last).close()
    assert last.calls == ["close True"]
