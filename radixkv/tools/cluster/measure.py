"""Measuring the real engine: what its steps take, and when first tokens come as a trace arrives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from radixkv.engine.engine import Engine
from radixkv.request import SamplingParams
from radixkv.scheduling.step_plan import StepPlan
from radixkv.tools.cluster.step_cost import FloatArray, work_of
from radixkv.tools.replay.token_prompts import token_prompts
from radixkv.tools.replay.trace import Trace

_ROUNDS = 3
_FIRST_TOKEN = 5  # ids below may mean something to the model


class _StepRecorder:
    """Runs steps of an engine, and notes their work and seconds."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._schedule = engine.scheduler.schedule
        self._work: FloatArray | None = None
        engine.scheduler.schedule = self._scheduled  # type: ignore[method-assign]
        self.work: list[FloatArray] = []
        self.seconds: list[float] = []

    def _scheduled(self, *arguments: object, **keywords: object) -> StepPlan:
        plan = self._schedule(*arguments, **keywords)  # type: ignore[arg-type]
        self._work = None if plan.batch is None else work_of(plan.batch)
        return plan

    def run(self) -> None:
        """Steps until nothing is left to do."""
        while self._engine.has_work:
            began = time.perf_counter()
            self._engine.step()
            took = time.perf_counter() - began
            if self._work is not None:
                self.work.append(self._work)
                self.seconds.append(took)

    def close(self) -> None:
        """Leave the engine as it was."""
        del self._engine.scheduler.schedule


def measure_steps(
    engine: Engine, on_part: Callable[[], None] = lambda: None
) -> tuple[list[FloatArray], list[float]]:
    """The work of steps, and their median seconds over the rounds.

    Every round gives the engine the same: prompts alone, decodes at several depths and widths, and prompts
    that come while others decode; nothing is cached before.

    Args:
        on_part: is called after each of `num_parts` parts, to show progress.
    """
    works: list[FloatArray] = []
    times: list[list[float]] = []
    for _ in range(_ROUNDS):
        recorder = _StepRecorder(engine)
        try:
            for part in _parts(engine):
                engine.cache.reset()
                for prompt, answer in part:
                    _add(engine, prompt, answer)
                recorder.run()
                on_part()
        finally:
            recorder.close()
        works = recorder.work
        times.append(recorder.seconds)
    return works, np.median(np.array(times), axis=0).tolist()


def num_parts(engine: Engine) -> int:
    """How often `measure_steps` says that a part is done."""
    return _ROUNDS * len(list(_parts(engine)))


def _parts(engine: Engine) -> Iterator[list[tuple[npt.NDArray[np.int32], int]]]:
    """Prompts and lengths of answers, which are given to the engine together; always the same ones."""
    limits, vocabulary = engine.limits, _vocabulary(engine)
    room = min(limits.max_model_len, engine.cache.num_blocks * engine.cache.block_size) - 64
    rng = np.random.default_rng(0)

    def prompts(count: int, length: int, answer: int) -> list[tuple[npt.NDArray[np.int32], int]]:
        length = max(1, min(length, room // count))
        return [
            (rng.integers(vocabulary.start, vocabulary.stop, length, dtype=np.int32), answer)
            for _ in range(count)
        ]

    for length in (16, 60, 200, 500, 2500):
        yield prompts(1, length, 1)
    for count, length in ((1, 40), (2, 60), (4, 80), (8, 100), (16, 40), (1, 1000), (3, 600)):
        yield prompts(count, length, 12)
    for count in (2, 6):
        yield [*prompts(count, 60, 16), *prompts(2, 600, 4)]


def _add(engine: Engine, prompt: Sequence[int] | npt.NDArray[np.int32], answer: int) -> str:
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    return engine.add_request(prompt, params)


def replay_on_engine(
    engine: Engine, trace: Trace, speed: float, on_end: Callable[[], None] = lambda: None
) -> tuple[list[float], float]:
    """Let a trace arrive at an engine as recorded, in real time.

    Returns:
        The seconds to first token of all requests, and the share of their prompts found cached.
    """
    arrivals = np.maximum.accumulate(trace.arrivals - trace.arrivals.min()) / speed
    prompts = token_prompts(trace, _vocabulary(engine))
    first: dict[str, float] = {}
    came: dict[str, float] = {}
    cached = 0
    began, number = time.perf_counter(), 0
    while number < len(prompts) or engine.has_work:
        now = time.perf_counter() - began
        while number < len(prompts) and arrivals[number] <= now:
            params = SamplingParams(
                max_tokens=int(trace.output_lengths[number]), temperature=0.0, ignore_eos=True
            )
            came[engine.add_request(prompts[number], params, stream=True)] = float(arrivals[number])
            number += 1
        if not engine.has_work:
            time.sleep(max(0.0, float(arrivals[number]) - now))
            continue
        result = engine.step()
        now = time.perf_counter() - began
        for delta in result.deltas:
            if delta.request_id not in first:
                first[delta.request_id] = now
                cached += 0 if delta.prompt is None else delta.prompt.num_cached_tokens
            if delta.is_last:
                on_end()
    return [first[name] - came[name] for name in came], cached / int(trace.input_lengths.sum())


def _vocabulary(engine: Engine) -> range:
    """Token ids that mean nothing to the model."""
    size = engine.limits.vocab_size
    assert size is not None
    return range(min(_FIRST_TOKEN, size - 1), size)
