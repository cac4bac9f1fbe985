# SPDX-License-Identifier: Apache-2.0
"""StepCost: how long a step takes, from what is in it; fitted to measured steps.

The time is a sum of what a step's work is proportional to (as in Vidur, MLSys 2024, in its simplest form):

    step       + tokens          + sequences    + context tokens + attention          + requests    + wakes
    launches     dense products,   sampling,      K and V read     products of queries  new ones are  the step
    and host     rows that move    block tables   once a sequence  and keys             checked and   after a
                                                                                        looked up     pause

Every factor is at least 0: more work never takes less time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.errors import ConfigError
from radixkv.scheduling.batch import Batch

FloatArray = npt.NDArray[np.float64]

_NUM_WEIGHTINGS = 8
_DISTURBED = 3.0  # times as long as predicted: the machine did something else, too


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step.

    Attributes:
        step_s: of every step.
        token_s: for each token computed.
        sequence_s: for each sequence in it.
        context_s: for each token that a sequence attends to, once a sequence.
        attention_s: for each pair of a query and a key.
        request_s: for each request that has come since the step before.
        wake_s: of a step before which nothing was to be done: threads sleep then, and caches get cold.
    """

    step_s: float
    token_s: float
    sequence_s: float = 0.0
    context_s: float = 0.0
    attention_s: float = 0.0
    request_s: float = 0.0
    wake_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
                raise ConfigError(
                    f"a step cost's {name} must be a number of seconds, at least 0; not {value!r}"
                )
        if self.step_s + self.token_s + self.sequence_s <= 0:
            raise ConfigError("a step must take time: its step_s, token_s and sequence_s are all 0")

    def seconds(self, work: FloatArray) -> float:
        """Of one step with this work, see `work_of`; what it leaves out at its end is 0."""
        return sum(factor * float(amount) for factor, amount in zip(astuple(self), work, strict=False))

    def times(self, factor: float) -> StepCost:
        """On a machine that takes so many times as long."""
        return StepCost(*(value * factor for value in astuple(self)))

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second in a long chunk without context."""
        chunk = 2048.0
        return chunk / self.seconds(np.array([1.0, chunk, 1.0, chunk, chunk * chunk / 2, 0.0, 0.0]))


#: Rough figures of an 8B model in bfloat16 on one H100, from its memory and matmul rates: not measured.
ESTIMATES = {"h100-8b": StepCost(8e-3, 3.2e-5, 2e-5, 4.4e-8, 1.1e-10)}


def work_of(batch: Batch, num_requests: int = 0, *, wakes: bool = False) -> FloatArray:
    """A step's work, float64 [7]: 1, tokens, sequences, context tokens, query-key pairs, requests, wakes.

    Args:
        num_requests: that have come since the step before.
        wakes: before it nothing was to be done.
    """
    counts = np.diff(batch.query_starts).astype(np.float64)
    contexts = batch.context_lengths.astype(np.float64)
    pairs = float((counts * (contexts - (counts - 1) / 2)).sum())
    rows = float(len(counts))
    return np.array([1.0, float(counts.sum()), rows, float(contexts.sum()), pairs, num_requests, wakes])


@dataclass(frozen=True, slots=True)
class Fit:
    """A `StepCost` and how well it tells the steps it was fitted to.

    Attributes:
        median_error: of |predicted / measured - 1|.
        p90_error: the same, exceeded by one step in ten.
        total_error: predicted over measured seconds of all steps, less 1.
    """

    cost: StepCost
    num_steps: int
    median_error: float
    p90_error: float
    total_error: float


def fit(work: Sequence[FloatArray], seconds: Sequence[float]) -> Fit:
    """The factors with the least squared relative error, none of them negative.

    Errors are relative to what is predicted, so that measured over predicted is 1 on average: relative to
    what was measured, the quick ones of steps that vary would count most, and predictions would be too quick.
    Steps during which the machine did something else, by their time, are left out.

    The active set method of Lawson and Hanson for non-negative least squares (Solving Least Squares
    Problems, 1974, chapter 23), with new weights until they stay.

    Raises:
        ConfigError: too few steps to tell the factors from.
    """
    if len(work) < 10:
        raise ConfigError(f"{len(work)} steps are too few to fit a cost to; measure at least 10")
    features, times = np.array(work), np.array(seconds)
    factors = _fit_relative_to(times, features, times)
    for _ in range(_NUM_WEIGHTINGS):
        predicted = features @ factors
        counts = times < _DISTURBED * predicted
        factors = _fit_relative_to(predicted[counts], features[counts], times[counts])
    if not factors[:3].any():  # what a step itself takes is lost in the noise of what attention takes
        factors[0] = times.min() / 100
    predicted = features @ factors
    errors = np.abs(predicted / times - 1)
    return Fit(
        cost=StepCost(*(float(factor) for factor in factors)),
        num_steps=len(times),
        median_error=float(np.median(errors)),
        p90_error=float(np.quantile(errors, 0.9)),
        total_error=float(predicted.sum() / times.sum() - 1),
    )


def _fit_relative_to(unit: FloatArray, features: FloatArray, times: FloatArray) -> FloatArray:
    """Factors >= 0 with the least |features factors - times|, each row measured in its unit."""
    from scipy.optimize import nnls  # a slow import, for fits alone

    weighted = features / unit[:, None]
    scale = np.maximum(np.linalg.norm(weighted, axis=0), 1e-30)
    factors: FloatArray = nnls(weighted / scale, times / unit)[0] / scale
    return factors


def read_cost(name: str) -> StepCost:
    """Read a cost by the name of an estimate, or from a file written by `fit --json`.

    Raises:
        ConfigError: neither; or the file is none.
    """
    if name in ESTIMATES:
        return ESTIMATES[name]
    path = Path(name)
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        cost = data["cost"]
        known = {field.name for field in fields(StepCost)}
        if set(cost) - known:
            raise ConfigError(f"{path}: unknown {', '.join(sorted(set(cost) - known))} in its cost")
        return StepCost(**cost)
    except FileNotFoundError:
        raise ConfigError(
            f"--cost: {name!r} is neither a file nor one of {', '.join(ESTIMATES)}; "
            "`python -m benchmarks.cluster_simulator fit --json FILE` measures this machine"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--cost: {path} is no file that `python -m benchmarks.cluster_simulator fit` wrote ({error!r})"
        ) from None


def make_cost(cost: str, prefill_rate: float | None, decode_step: float | None) -> StepCost:
    """What steps cost: as named or measured, or simply a rate for prompts and a time for decode steps.

    Raises:
        ConfigError: the cost is unknown.
    """
    if prefill_rate is None and decode_step is None:
        return read_cost(cost)
    base = read_cost(cost)
    token_s = base.token_s if prefill_rate is None else 1 / prefill_rate
    return StepCost(base.step_s if decode_step is None else decode_step, token_s)
