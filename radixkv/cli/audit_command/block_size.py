# SPDX-License-Identifier: Apache-2.0
"""Infer the size of an engine's blocks from the first reported hits of a log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from radixkv.observe.audit.prompt_units import PromptCoding
from radixkv.observe.audit.record import Record
from radixkv.observe.audit.request_bodies import NoRequest
from radixkv.observe.audit.rule_sets import RuleSet
from radixkv.observe.audit.rules import Rules

_ASKED_RECORDS, _MIN_REPORTED = 200, 3
_MEMORY_BYTES = 64 << 20


def reported_block_size(records: Iterable[Record], rules: RuleSet, coding: PromptCoding | None) -> int:
    """Tokens of a block: the common divisor of all reported hits, if enough of them differ to tell; else,
    with the model's tokenizer, the size that explains most of them; else the default of these rules.
    """
    usual = rules.block_tokens
    first = list(islice(records, _ASKED_RECORDS))
    reported = [record.usage.cached for record in first if record.usage.cached]
    common = math.gcd(*reported)
    power = common & -common
    if power <= usual or len(set(reported)) >= _MIN_REPORTED:
        return max(power, usual)
    if coding is None or not coding.is_exact:
        return usual
    shared = list(_shared(first, replace(rules, block_tokens=1), coding))
    sizes = [usual << step for step in range(power.bit_length() - usual.bit_length() + 1)]
    explained = {size: sum(one - one % size == cached for one, cached in shared) for size in sizes}
    most = max(explained.values())
    return usual if explained[usual] == most else max(size for size in sizes if explained[size] == most)


def _shared(records: Iterable[Record], rules: RuleSet, coding: PromptCoding) -> Iterator[tuple[int, int]]:
    """Cached and reported tokens of each request."""
    observer = Rules(rules, coding, memory_bytes=_MEMORY_BYTES)
    for record in records:
        try:
            seen = observer.observe(record)
        except NoRequest:
            continue
        if seen.reported_tokens is not None and seen.reported_prompt == seen.prompt_tokens:
            yield seen.cached_tokens, seen.reported_tokens
