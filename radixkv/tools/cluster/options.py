"""What the commands of this package take: lists of numbers, of routers, costs."""

from __future__ import annotations

from radixkv.errors import ConfigError
from radixkv.tools.cluster.step_cost import StepCost, read_cost


def parse_replicas(text: str) -> list[int]:
    """Numbers of replicas, separated by commas.

    Raises:
        ConfigError: not numbers of at least 1, or none.
    """
    try:
        counts = list(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or max(counts) > 4096:
        raise ConfigError(f"--replicas takes numbers from 1 to 4096, separated by commas; not {text!r}")
    return counts


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
