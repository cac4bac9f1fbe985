"""SpeculationCounts: drafts and their accepted tokens, as vLLM counts them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpeculationCounts:
    """Since the start, as vLLM counts them.

    Attributes:
        num_drafts: how often a request had a draft in a step.
        num_draft_tokens: computed guesses.
        num_accepted_tokens: right guesses.
        accepted_per_pos: right guesses by their position in the draft, from its first on.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)

    def observe(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Count a checked draft."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        missing = num_draft_tokens - len(self.accepted_per_pos)
        if missing > 0:
            self.accepted_per_pos += [0] * missing
        for position in range(num_accepted):
            self.accepted_per_pos[position] += 1

    def snapshot(self) -> SpeculationCounts:
        """A copy that stays as it is."""
        return SpeculationCounts(
            self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens, list(self.accepted_per_pos)
        )
