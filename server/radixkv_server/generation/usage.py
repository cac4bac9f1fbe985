"""Usage: what one HTTP request used, in no dialect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixkv.cache.insight.explain import MissReport

#: What else to say of a prompt's miss report; None: nothing.
Hint = Callable[["MissReport"], str | None]
#: Whose text a place of a prompt lies in, by the token ids before and after it; None: not known.
PlaceName = Callable[[Sequence[int], Sequence[int]], str | None]


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request, summed over its prompts and samples.

    Attributes:
        cached_tokens: prompt tokens whose K/V came from the cache.
        cache_write_tokens: prompt tokens that the cache holds because of this request, and did not before; 0
            where prefix caching is off. With `cached_tokens` it adds up to `prompt_tokens`, but for tokens
            that had to be computed again although they are cached.
        accepted_prediction_tokens: completion tokens that had been guessed rightly; see
            `EngineConfig.speculation`.
        rejected_prediction_tokens: guesses that were wrong, which are no part of the completion.
        pinned_tokens: prompt tokens that are pinned, as far as the budget went; None: none were to be.
        hints: what finds a hint for each prompt's report.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    completion_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    pinned_tokens: int | None = None
    reports_by_prompt: dict[int, MissReport] = field(default_factory=dict)
    hints: Sequence[Hint | None] = ()

    @property
    def cache_reports(self) -> Sequence[MissReport]:
        """Why tokens were not found in the cache, by prompt; empty where the engine does not say."""
        return [report for _, report in sorted(self.reports_by_prompt.items())]

    @property
    def cache_hints(self) -> Sequence[str | None]:
        """What is to be said of each of `cache_reports` beyond its reason."""
        hints = (
            self.hints[prompt] if prompt < len(self.hints) else None
            for prompt in sorted(self.reports_by_prompt)
        )
        return [
            None if hint is None else hint(report)
            for hint, report in zip(hints, self.cache_reports, strict=True)
        ]
