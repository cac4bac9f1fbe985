"""Usage: what one HTTP request used, in no dialect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixkv.cache.insight.explain import MissReport


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request, summed over its prompts and samples."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reports_by_prompt: dict[int, MissReport] = field(default_factory=dict)

    @property
    def cache_reports(self) -> Sequence[MissReport]:
        """Why tokens were not found in the cache, by prompt; empty where the engine does not say."""
        return [report for _, report in sorted(self.reports_by_prompt.items())]
