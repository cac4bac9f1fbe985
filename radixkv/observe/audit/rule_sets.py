# SPDX-License-Identifier: Apache-2.0
"""RuleSet: what a provider or an engine keeps of prompts, for how long, and what it finds again."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from radixkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RuleSet:
    """The rules of one cache.

    Attributes:
        matching: `prefix`: any prefix that was computed is found, as far as whole blocks go; `breakpoints`:
            only what was written at a breakpoint is.
        block_tokens: hits are whole blocks of so many tokens; 1: any number.
        minimum_tokens: shorter prompts are not cached; by patterns of the model's name, the first counts.
        ttl_s: seconds that an entry stays after its last use; None: until its room is needed.
        looks_back: how many blocks before a breakpoint an earlier entry is looked for.
        automatic: there is a breakpoint at the end of the newest message without asking.
        max_breakpoints: explicit ones that count.
        keeps_answers: what was generated can be found, too.
        tools_first: prompts are cached in the order tools, system, messages; engines' chat templates mostly
            show the tools after the system's text.
        holds_clients: what known clients write about themselves at the head of prompts is held constant.
        by_key: callers with different keys share nothing.
        read_cost, write_cost: of a token, relative to one that is computed; a write by its time to live.
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
    by_key: bool = False
    read_cost: float = 0.0
    write_cost: Mapping[float, float] = field(default_factory=dict)

    def minimum(self, model: str) -> int:
        """Tokens that a cached prefix of a model needs."""
        return next(
            (n for pattern, n in self.minimum_tokens.items() if fnmatch.fnmatch(model.lower(), pattern)), 0
        )


RULE_SETS = {
    rules.name: rules
    for rules in (
        RuleSet("radixkv", holds_clients=True, by_key=True),
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
            read_cost=0.1,
            write_cost={300.0: 1.25, 3600.0: 2.0},
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
            read_cost=0.1,
            write_cost={1800.0: 1.25, 43200.0: 1.25},
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
