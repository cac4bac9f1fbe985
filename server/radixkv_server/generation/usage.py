# SPDX-License-Identifier: Apache-2.0
"""Usage: what one HTTP request used, in no dialect."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixkv_server.generation.progress import PromptProgress

if TYPE_CHECKING:
    from radixkv.cache.reporting.explain import MissReport

#: What else to say of a prompt's miss report; None: nothing.
Hint = Callable[["MissReport"], str | None]
#: Whose text a place of a prompt lies in, by the token ids before and after it; None: not known.
PlaceName = Callable[[Sequence[int], Sequence[int]], str | None]


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request, summed over its prompts and samples, as they are by now.

    Attributes:
        prompts: what they are read from.
        hints: what finds a hint for each prompt's report.
        written_ends: how many leading tokens of each prompt can count as written; None: all.
    """

    prompts: Sequence[PromptProgress] = ()
    hints: Sequence[Hint | None] = ()
    written_ends: Sequence[int | None] = ()

    @property
    def prompt_tokens(self) -> int:
        return sum(prompt.num_tokens for prompt in self.prompts)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose K/V came from the cache."""
        return sum(prompt.num_cached_tokens for prompt in self.prompts)

    @property
    def by_tier(self) -> dict[str, tuple[int, float]] | None:
        """Of the cached tokens, by memory: how many, and the seconds that they were waited for.

        `memory` is the cache itself. None: the engine has no tiers.
        """
        hits = [prompt.outcome.tier_hits for prompt in self.prompts if prompt.outcome]
        if all(found is None for found in hits):
            return None
        sums: dict[str, tuple[int, float]] = {"memory": (self.cached_tokens, 0.0)}
        for hit in (hit for found in hits for hit in found or ()):
            tokens, seconds = sums.get(hit.tier, (0, 0.0))
            sums[hit.tier] = tokens + hit.num_tokens, seconds + hit.seconds
            sums["memory"] = sums["memory"][0] - hit.num_tokens, 0.0
        return sums

    @property
    def cache_write_tokens(self) -> int:
        """Prompt tokens that the cache holds because of this request, and did not before.

        0 where prefix caching is off; on Messages, those up to the last breakpoint. Elsewhere, with
        `cached_tokens`, it adds up to `prompt_tokens`, but for tokens that had to be computed again although
        they are cached.
        """
        return sum(itertools.starmap(_written, zip(self.prompts, self.written_ends, strict=True)))

    @property
    def completion_tokens(self) -> int:
        return sum(prompt.num_generated_tokens for prompt in self.prompts)

    @property
    def accepted_prediction_tokens(self) -> int:
        """Completion tokens that had been guessed rightly; see `EngineConfig.speculation`."""
        return sum(prompt.accepted_draft_tokens for prompt in self.prompts)

    @property
    def rejected_prediction_tokens(self) -> int:
        """Guesses that were wrong, which are no part of the completion."""
        return sum(prompt.rejected_draft_tokens for prompt in self.prompts)

    @property
    def pinned_tokens(self) -> int | None:
        """Prompt tokens that are pinned, as far as the budget went; None: none were to be."""
        pinned = [prompt.outcome.num_pinned_tokens for prompt in self.prompts if prompt.outcome]
        asked = [count for count in pinned if count is not None]
        return sum(asked) if asked else None

    @property
    def finish_reasons(self) -> list[str]:
        """How the samples that have ended did."""
        samples = (sample for prompt in self.prompts for sample in prompt.samples.values())
        return [sample.finish_reason for sample in samples if sample.finish_reason is not None]

    @property
    def misses(self) -> list[tuple[MissReport, str | None]]:
        """Why tokens were not found in the cache, by prompt, and what else is to be said of it.

        Empty where the engine does not say.
        """
        return [
            (prompt.report, None if hint is None else hint(prompt.report))
            for prompt, hint in zip(self.prompts, self.hints, strict=True)
            if prompt.report is not None
        ]


def _written(prompt: PromptProgress, end: int | None) -> int:
    written = 0 if prompt.outcome is None else prompt.outcome.num_cache_write_tokens
    return written if end is None else max(0, min(written, end - prompt.num_cached_tokens))
