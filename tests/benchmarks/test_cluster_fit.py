# SPDX-License-Identifier: Apache-2.0
"""Fitted step costs, on an engine with scripted step times and a scripted clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch
from nightly import by_day
from paged_language_model import VOCAB, PagedHashModel, make_engine
from rich.console import Console
from trace_tools import random_paths

from benchmarks.cluster_simulator.fit_command import fit_and_check
from benchmarks.cluster_simulator.measure import num_parts
from benchmarks.cluster_simulator.reference_step import ReferenceStep
from benchmarks.cluster_simulator.step_cost import StepCost, work_of
from radixkv.cli.replay.trace import Trace, TraceBuilder
from radixkv.engine.engine import Engine
from radixkv.scheduling.batch import Batch

BLOCK, NUM_BLOCKS = 8, 240
COST = StepCost(0.02, 0.001, 0.002, 2e-6, 4e-7, request_s=0.003, wake_s=0.004)


class TurnedClock:
    """Time that passes when it is slept or spent."""

    def __init__(self) -> None:
        self.time = 100.0
        self.has_slept = False

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += max(seconds, 1e-6)  # what is too little to add is waited for, too
        self.has_slept = True


class TimedModel(PagedHashModel):
    """Each step takes what `COST` says, times what a machine is slower at that moment."""

    def __init__(self, clock: TurnedClock, slowness: Callable[[float], float]) -> None:
        super().__init__(NUM_BLOCKS, BLOCK)
        self.clock, self.slowness = clock, slowness
        self.num_references = 0

    def spend(self, seconds: float) -> None:
        self.clock.time += seconds * self.slowness(self.clock.time)

    def execute(self, batch: Batch) -> torch.Tensor:
        self.spend(COST.seconds(work_of(batch)))
        if not batch.entries:
            self.num_references += 1
            assert (self.tokens[batch.write_slots] < 0).all(), "its slots are nobody else's"
            return torch.zeros((1, VOCAB))
        if self.clock.has_slept:
            self.spend(COST.wake_s)
            self.clock.has_slept = False
        return super().execute(batch)


def timed_engine(slowness: Callable[[float], float]) -> tuple[Engine, TimedModel]:
    model = TimedModel(TurnedClock(), slowness)
    engine, _ = make_engine(
        model=model, num_blocks=NUM_BLOCKS, block_size=BLOCK, budget=512, speculation="off"
    )
    add_request = engine.add_request

    def add(*arguments: Any, **options: Any) -> str:
        model.spend(COST.request_s)
        return add_request(*arguments, **options)

    engine.add_request = add  # type: ignore[method-assign]
    return engine, model


def trace_at(requests_per_s: float, seed: int = 0, count: int = 50) -> Trace:
    rng = random.Random(seed)
    builder, at = TraceBuilder("made up"), 0.0
    for path in random_paths(rng, requests=count, blocks=5, depth=12):
        builder.add(path, input_length=len(path) * BLOCK, output_length=rng.randrange(1, 9), arrival=at)
        at += rng.expovariate(requests_per_s)
    return builder.build(BLOCK)


def ratios(figures: dict[str, Any]) -> dict[str, float]:
    return {name: row["predicted"] / row["measured"] for name, row in figures["check"].items()}


QUIET = Console(quiet=True)


@pytest.mark.parametrize("load", by_day([2.0, 80.0], 2.0), ids=["light", "overloaded"])
def test_costs_are_found_and_first_tokens_predicted(load: float) -> None:
    engine, model = timed_engine(lambda time: 1.0)
    figures = fit_and_check(engine, model.clock, trace_at(load), 1.0, QUIET)
    assert list(figures["cost"].values()) == pytest.approx(astuple(COST), rel=1e-3, abs=1e-9)
    assert figures["slowdown"] == pytest.approx(1.0)
    assert list(ratios(figures).values()) == pytest.approx([1.0] * 4, rel=0.06)
    assert model.num_references > 50
    engine.check()
    assert engine.cache.available_blocks() == engine.cache.num_blocks, "the reference's blocks are given back"


@pytest.mark.nightly
def test_a_machine_that_gets_slower_after_the_fit() -> None:
    """Reference steps between the trace's tell by how much; no request of the trace does."""
    num_resets = 0
    engine, model = timed_engine(lambda time: 1.6 if num_resets > num_parts(engine) else 1.0)
    reset = engine.cache.reset

    def counted_reset() -> None:  # the last one is just before the trace
        nonlocal num_resets
        num_resets += 1
        reset()

    engine.cache.reset = counted_reset  # type: ignore[method-assign]
    figures = fit_and_check(engine, model.clock, trace_at(8.0), 1.0, QUIET)
    assert list(figures["cost"].values()) == pytest.approx(astuple(COST), rel=1e-3, abs=1e-9)
    assert figures["slowdown"] == pytest.approx(1.6, rel=0.01)
    assert list(ratios(figures).values()) == pytest.approx([1.0] * 4, rel=0.03)


@pytest.mark.nightly
def test_a_machine_that_is_disturbed_all_the_time() -> None:
    """Steps that vary by a sixth, and one in a hundred that takes ten times as long."""
    rng = np.random.default_rng(5)
    engine, model = timed_engine(
        lambda time: 10.0 if rng.random() < 0.01 else max(0.3, float(rng.normal(1, 0.16)))
    )
    figures = fit_and_check(engine, model.clock, trace_at(2.0), 1.0, QUIET)
    cost = figures["cost"]
    assert (cost["step_s"], cost["token_s"]) == pytest.approx((COST.step_s, COST.token_s), rel=0.1)
    assert ratios(figures)["TTFT p50 (s)"] == pytest.approx(1.0, rel=0.15)


def test_a_reference_leaves_requests_alone() -> None:
    """Run between all steps, it changes no answer and nothing that is cached."""
    prompts = [[5, 6, 7] * count for count in (3, 11, 3, 20)]
    answers = []
    for is_run in (False, True):
        engine, model = timed_engine(lambda time: 1.0)
        reference = ReferenceStep(engine, model.clock)
        outputs, cached = {}, []
        for prompt in prompts:
            engine.add_request(prompt)
            while engine.has_work:
                for output in engine.step().finished:
                    outputs[len(outputs)] = output.outputs[0].token_ids
                if is_run:
                    reference.run()
            cached.append(engine.cache.match(prompt).num_tokens)
        reference.close()
        answers.append((outputs, cached))
    assert answers[0] == answers[1]
