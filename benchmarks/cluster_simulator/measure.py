# SPDX-License-Identifier: Apache-2.0
"""Measuring what steps of the real engine take, in its own loop, with all that the host does between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.cluster_simulator.reference_step import Clock, ReferenceStep
from benchmarks.cluster_simulator.step_cost import FloatArray, work_of
from radixkv.engine.engine import Engine
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.batch import Batch
from radixkv.scheduling.step_plan import StepPlan

_ROUNDS = 3
_FIRST_TOKEN = 5  # ids below may mean something to the model
_STEPS_BETWEEN = 3  # between requests that come together and the next ones
_REFERENCES = 2  # after each part
_PAUSE_S = 0.2  # that the engine has nothing to do

_Prompt = npt.NDArray[np.int32]
#: Prompts and lengths of answers: what comes together, and then what comes while, or after, it is computed.
_Part = Sequence[Sequence[tuple[_Prompt, int]]]


class _StepRecorder:
    """Runs steps of an engine, and notes their work and seconds, from the end of each to that of the next."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._schedule = engine.scheduler.schedule
        self._batch: Batch | None = None
        engine.scheduler.schedule = self._scheduled  # type: ignore[method-assign]
        self._num_idle = 0
        self.work: list[FloatArray] = []
        self.seconds: list[float] = []

    def _scheduled(self, *arguments: object, **keywords: object) -> StepPlan:
        plan = self._schedule(*arguments, **keywords)  # type: ignore[arg-type]
        self._batch = plan.batch
        return plan

    def run(self, part: _Part) -> None:
        """Steps until nothing is left to do; every second time that nothing was, after a pause."""
        engine, clock = self._engine, self._clock
        coming = list(part)
        num_steps, last = 0, clock.now()
        while coming or engine.has_work:
            num_new, wakes = 0, False
            if coming and (not engine.has_work or num_steps >= _STEPS_BETWEEN):
                if not engine.has_work:
                    self._num_idle += 1
                    wakes = self._num_idle % 2 == 0
                if wakes:
                    clock.sleep(_PAUSE_S)
                    last = clock.now()
                requests = coming.pop(0)
                num_new, num_steps = len(requests), 0
                for prompt, answer in requests:
                    engine.add_request(prompt, params_of(answer), stream=True)
            engine.step()
            now = clock.now()
            if self._batch is not None:
                self.work.append(work_of(self._batch, num_new, wakes=wakes))
                self.seconds.append(now - last)
            num_steps, last = num_steps + 1, now

    def close(self) -> None:
        """Leave the engine as it was."""
        del self._engine.scheduler.schedule


def measure_steps(
    engine: Engine, clock: Clock, reference: ReferenceStep, on_part: Callable[[], None] = lambda: None
) -> tuple[list[FloatArray], list[float]]:
    """The work of steps, and their seconds.

    Every round gives the engine the same: prompts alone, decodes at several depths and widths, prompts that
    come while others decode, and prompts whose beginning is cached.

    Args:
        reference: is run after each part.
        on_part: is called after each of `num_parts` parts, to show progress.
    """
    recorder = _StepRecorder(engine, clock)
    try:
        for _ in range(_ROUNDS):
            for part in _parts(engine):
                engine.cache.reset()
                recorder.run(part)
                for _ in range(_REFERENCES):
                    reference.run()
                on_part()
    finally:
        recorder.close()
    return recorder.work, recorder.seconds


def num_parts(engine: Engine) -> int:
    """How often `measure_steps` says that a part is done."""
    return _ROUNDS * len(list(_parts(engine)))


def _parts(engine: Engine) -> Iterator[_Part]:
    """Return the steps that the engine is given; always the same."""
    ids = vocabulary(engine)
    room = min(engine.limits.max_model_len, engine.cache.available_blocks() * engine.cache.block_size) - 64
    rng = np.random.default_rng(0)

    def text(length: int) -> _Prompt:
        return rng.integers(ids.start, ids.stop, max(1, length), dtype=np.int32)

    def prompts(count: int, length: int, answer: int) -> list[tuple[_Prompt, int]]:
        return [(text(min(length, room // count)), answer) for _ in range(count)]

    def go_on(start: _Prompt, lengths: Sequence[int], answer: int) -> list[tuple[_Prompt, int]]:
        return [(np.concatenate([start, text(length)]), answer) for length in lengths]

    for length in (16, 60, 200, 500, 2000):
        yield [prompts(1, length, 1)]
    for count, length in ((1, 40), (2, 60), (4, 80), (8, 100), (16, 40), (1, 1000), (3, 600)):
        yield [prompts(count, length, 10)]
    for count in (2, 6):
        yield [prompts(count, 60, 16), prompts(1, 300, 4), prompts(2, 100, 4)]
    start = text(min(900, room // 3))
    yield [
        [(start, 1)],
        *(go_on(start, lengths, 5) for lengths in ((12,), (30,), (64,), (110,), (20, 40, 90))),
    ]


def params_of(answer: int) -> SamplingParams:
    """Of a request that gets so many tokens."""
    return SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)


def vocabulary(engine: Engine) -> range:
    """Token ids that mean nothing to the model."""
    size = engine.limits.vocab_size
    assert size is not None
    return range(min(_FIRST_TOKEN, size - 1), size)
