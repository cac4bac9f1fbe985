# SPDX-License-Identifier: Apache-2.0
"""Speculation: drafts for the requests of an engine, from the best source, and no longer than they pay.

Sources, in order:

 1. tokens that the request's grammar forces: they can't be wrong;
 2. the cached text after all the request's tokens, in its own namespace: a repeated request is known
    whole (or the prediction that came with it, while the answer follows it);
 3. the longest match of the request's last tokens in its own text and in its prediction;
 4. the same in recent outputs of its namespace, if that match is longer.

A draft of the last three is never longer than the match, and ends where the chance that all of it is right
falls below the break-even of the step being built (`StepCosts`).
"""

from __future__ import annotations

from collections import abc
from itertools import takewhile

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.engine.counts import EngineStats, SpeculationCounts
from radixkv.engine.hooks import StepHook
from radixkv.images.placed_image import FIRST_IMAGE_ID
from radixkv.scheduling.batch import Entry
from radixkv.scheduling.sequence import Sequence
from radixkv.speculation.namespace_texts import NamespaceTexts
from radixkv.speculation.request_text import RequestText
from radixkv.speculation.step_costs import StepCosts
from radixkv.speculation.text_index import LONGEST_MATCH


class Speculation(StepHook):
    """The scheduler's `DraftProposer`. Not thread-safe.

    Args:
        max_tokens: most tokens of a draft.
        costs: costs of a step's rows, which say how many guesses pay.
    """

    def __init__(self, max_tokens: int, costs: StepCosts) -> None:
        self.drafter = self
        self.counts = SpeculationCounts()
        self._max_tokens = max_tokens
        self._costs = costs
        self._cache: PrefixCache
        self._resets_seen = 0  # a reset of the cache forgets earlier outputs, too
        self._outputs = NamespaceTexts()
        self._texts: dict[Sequence, RequestText] = {}
        self._num_rows = self._num_samples = 0

    def attach(self, cache: PrefixCache) -> None:
        self._cache = cache

    def begin(self, num_rows: int, num_samples: int) -> None:
        """Prepare for the drafts of a step of `num_rows` rows so far, `num_samples` of them sampled."""
        resets = self._cache.num_resets
        if resets != self._resets_seen:
            self._resets_seen = resets
            self._outputs.forget()
        self._num_rows, self._num_samples = num_rows, num_samples

    def draft(self, request: Sequence, most: int) -> abc.Sequence[int]:
        """Return tokens that the request's grammar forces, else guesses that the grammar allows.

        A token that ends the output is left out: choosing it without a guess is as fast.
        """
        state = request.sampling_state
        most = min(most, self._max_tokens, request.grows_until - request.num_output_tokens - 1)
        if most <= 0:
            return ()
        tokens: abc.Sequence[int] = state.forced_tokens()[:most]
        if not tokens:
            # Cached texts go on with images, which no answer does.
            tokens = list(takewhile(lambda token: token < FIRST_IMAGE_ID, self._guess(request, most)))
            if tokens:
                tokens = tokens[: state.num_allowed(tokens)]
        if tokens:
            ends, stops = request.end_token_ids, request.params.stop_token_ids
            tokens = list(takewhile(lambda token: token not in ends and token not in stops, tokens))
        return tokens

    def _guess(self, request: Sequence, most: int) -> list[int]:
        """Return at most `most` guesses of the request's next tokens; none where they don't pay."""
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = RequestText(request)
        else:
            text.catch_up(request)
        text.match = 0
        found, match = text.follow(request, most, self._continuation), LONGEST_MATCH
        if not found:
            found, match = text.find(most)
            if match < LONGEST_MATCH:
                repeated, length = self._outputs.find(request.namespace, text.context, most)
                if length > match:
                    found, match = repeated, length
        if not found:
            return found
        break_even = self._costs.break_even(self._num_rows, self._num_samples)
        del found[text.acceptance.worthwhile(match, break_even, most) :]
        text.match = match
        return found

    def _continuation(self, request: Sequence, most: int) -> list[int]:
        """Return at most `most` cached tokens after all that a request has."""
        return self._cache.tree.following(request.tokens(), request.namespace, most)

    def granted(self, num_tokens: int) -> None:
        """Count tokens of a draft that are rows of the step now."""
        self._num_rows += num_tokens

    def guessing(self, entries: abc.Sequence[Entry]) -> set[Sequence]:
        self.begin(len(entries), len(entries))
        return {entry.request for entry in entries if len(self.draft(entry.request, self._max_tokens)) > 1}

    def checked(self, request: Sequence, num_draft_tokens: int, num_accepted: int) -> None:
        self.counts.observe(num_draft_tokens, num_accepted)
        text = self._texts.get(request)
        if text is not None and text.match:
            text.acceptance.observe(text.match, num_draft_tokens, num_accepted)
            text.match = 0

    def ended(self, sequence: Sequence, *, discarded: bool) -> None:
        """Keep a finished output: later requests of its namespace may repeat it. O(output)."""
        if self._texts.pop(sequence, None) is not None and sequence.finish_reason in ("stop", "length"):
            self._outputs.add(sequence.namespace, sequence.output_token_ids())

    def add_counts(self, stats: EngineStats) -> None:
        stats.speculation = self.counts.snapshot()
