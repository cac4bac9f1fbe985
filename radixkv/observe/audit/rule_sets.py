# SPDX-License-Identifier: Apache-2.0
"""RuleSet: caching rules of a provider or an engine: stored prefixes, their lifetime, and lookup."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from radixkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RuleSet:
    """Rules of a cache.

    Attributes:
        matching: `prefix`: find any computed prefix, in whole blocks; `breakpoints`: find only prefixes that
            end at a breakpoint.
        block_tokens: tokens per block, the unit of hits; 1: hits of any length.
        minimum_tokens: shortest cached prompt by pattern of the model's name; the first match counts.
        ttl_s: lifetime of an entry after its last use, in seconds; None: until evicted.
        looks_back: number of blocks before a breakpoint that are searched for an earlier entry.
        automatic: True: the newest message ends in a breakpoint by default.
        max_breakpoints: most explicit breakpoints that count.
        keeps_answers: True: generated tokens can be found, too.
        tools_first: True: prompts are cached in the order tools, system, messages; chat templates of engines
            mostly show the tools after the system's text.
        holds_clients: True: text of known clients about themselves at the head of prompts is held constant.
        orders_results: True: results of parallel calls are in the order of the calls, however they arrive.
        by_key: True: callers with different keys share nothing.
    """

    name: str
    matching: Literal["prefix", "breakpoints"] = "prefix"
    block_tokens: int = 1
    minimum_tokens: Mapping[str, int] = field(default_factory=lambda: {"*": 0})
    ttl_s: float | None = None
    looks_back: int = 0
    automatic: bool = False
    max_breakpoints: int = 0
    keeps_answers: bool = True
    tools_first: bool = False
    holds_clients: bool = False
    orders_results: bool = False
    by_key: bool = False

    def minimum(self, model: str) -> int:
        """Tokens that a cached prefix of a model needs."""
        return next(
            (n for pattern, n in self.minimum_tokens.items() if fnmatch.fnmatch(model.lower(), pattern)), 0
        )


RULE_SETS = {
    rules.name: rules
    for rules in (
        RuleSet("radixkv", holds_clients=True, orders_results=True, by_key=True),
        RuleSet("vllm", block_tokens=16),
        RuleSet("sglang"),
        RuleSet(
            "anthropic",
            matching="breakpoints",
            minimum_tokens={
                "*haiku-4-5*": 4096,
                "*opus-4-5*": 4096,
                "*opus-4-6*": 4096,
                "*haiku*": 2048,
                "*": 1024,
            },
            ttl_s=300.0,
            looks_back=20,
            max_breakpoints=4,
            keeps_answers=False,
            tools_first=True,
            by_key=True,
        ),
        RuleSet(
            "openai",
            matching="breakpoints",
            minimum_tokens={"*": 1024},
            ttl_s=1800.0,
            looks_back=80,
            automatic=True,
            max_breakpoints=4,
            keeps_answers=False,
            tools_first=True,
            by_key=True,
        ),
    )
}


def rule_set(name: str) -> RuleSet:
    """The rules of that name.

    Raises:
        ConfigError: there are none.
    """
    if name not in RULE_SETS:
        raise ConfigError(f"unknown rules {name!r}: there are {', '.join(RULE_SETS)}")
    return RULE_SETS[name]
