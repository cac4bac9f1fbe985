# SPDX-License-Identifier: Apache-2.0
"""What a start says of itself."""

import re

import pytest
from tiny_models import save_tiny_model

from radixkv.engine.config import EngineConfig
from radixkv.engine.startup import EngineSummary, StartupPhases, resident_memory
from radixkv.entrypoints.builder import build_engine
from radixkv.errors import ConfigError
from radixkv.model.runner import ModelRunner
from radixkv.sampling.sampling_params import SamplingParams


def test_phases_add_up_and_are_printed_in_order():
    phases = StartupPhases.since_process_start("imports")
    with phases.phase("model"):
        pass
    phases.ends_now("server")
    assert list(phases.seconds) == ["imports", "model", "server"]
    assert phases.seconds["imports"] > 0
    assert phases.total == sum(phases.seconds.values())
    assert re.fullmatch(r"[\d.]+ s: imports [\d.]+, model [\d.]+, server [\d.]+", str(phases))


def test_an_unknown_policy_is_refused_before_the_model_is_looked_for():
    with pytest.raises(ConfigError, match=r"unknown eviction policy 'nope'; there are adaptive, .*lru"):
        build_engine(EngineConfig(model="/no/such/model", eviction_policy="nope"))


def test_an_engine_says_what_its_start_took_and_the_warm_up_leaves_nothing(tmp_path):
    config = EngineConfig(model=str(save_tiny_model(tmp_path, "llama")), num_blocks=40, threads=1)
    engine = build_engine(config)
    assert isinstance(engine.summary, EngineSummary)
    assert list(engine.summary.phases.seconds) == ["imports", "model", "weights and K/V", "warm-up"]
    assert engine.cache.stats.free_blocks == 40
    assert engine.stats().steps == 0
    answers = []
    for _ in range(2):
        engine.add_request([1, 2, 3, 4, 5], SamplingParams(max_tokens=4, temperature=0.0))
        while engine.has_work:
            finished = engine.step().finished
        answers.append(finished[0].outputs[0].token_ids)
        engine.check()
    assert answers[0] == answers[1]


def test_memory_at_rest_is_more_than_nothing():
    before = resident_memory()
    held = bytearray(64 * 1024 * 1024)
    held[::4096] = b"x" * len(held[::4096])
    assert before > 1024**2
    assert resident_memory() - before > 32 * 1024**2


@pytest.mark.parametrize("warm_up", ["full", "quick", "off"])
def test_a_start_warms_up_as_much_as_it_is_told(warm_up, tmp_path, monkeypatch):
    called = []
    warm = ModelRunner.warm_up
    monkeypatch.setattr(
        ModelRunner,
        "warm_up",
        lambda runner, *, thorough: called.append(thorough) or warm(runner, thorough=thorough),
    )
    folder = str(save_tiny_model(tmp_path, "llama"))
    build_engine(EngineConfig(model=folder, num_blocks=40, threads=1, warm_up=warm_up))
    assert called == {"full": [True], "quick": [False], "off": []}[warm_up]
    with pytest.raises(ConfigError, match="warm_up must be one of full, quick, off"):
        EngineConfig(warm_up="never")
