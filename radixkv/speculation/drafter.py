# SPDX-License-Identifier: Apache-2.0
"""Drafter: guesses for every request, from where they are best, and no more than pay.

Sources, in order:

 1. the cached text after all the request's tokens, in its own namespace: a repeated request is known
    whole (or the prediction that came with it, while the answer follows it);
 2. the longest match of the request's last tokens in its own text and in its prediction;
 3. the same in recent outputs of its namespace, if that match is longer.

Tokens that a grammar forces come before all of these; they are no guesses, and the engine adds them.

How many: never more than the match is long, while the chance that all of them are right is above the
break-even of the step being built (`StepCosts`).
"""

from __future__ import annotations

from radixkv.scheduling.sequence import Sequence
from radixkv.speculation.namespace_texts import NamespaceTexts
from radixkv.speculation.request_text import Continuation, RequestText
from radixkv.speculation.step_costs import StepCosts
from radixkv.speculation.text_index import LONGEST_MATCH


class Drafter:
    """Guesses for the requests of one engine; not thread-safe.

    Args:
        costs: what rows cost.
        max_tokens: most guesses for a request in a step.
        continuation: the cached tokens after all that a request has.
    """

    def __init__(self, costs: StepCosts, max_tokens: int, continuation: Continuation) -> None:
        self._costs = costs
        self._max_tokens = max_tokens
        self._continuation = continuation
        self._outputs = NamespaceTexts()
        self._texts: dict[Sequence, RequestText] = {}
        self._num_rows = self._num_samples = 0

    def begin(self, num_rows: int, num_samples: int) -> None:
        """Prepare for the drafts of a step of `num_rows` rows so far, `num_samples` of them sampled."""
        self._num_rows, self._num_samples = num_rows, num_samples

    def draft(self, request: Sequence, most: int) -> list[int]:
        """At most `most` guesses of the request's next tokens; none where they don't pay."""
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = RequestText(request)
        else:
            text.catch_up(request)
        text.match = 0
        most = min(most, self._max_tokens)
        found, match = text.follow(request, most, self._continuation), LONGEST_MATCH
        if not found:
            found, match = text.find(most)
            if match < LONGEST_MATCH:
                others, length = self._outputs.find(request.namespace, text.context, most)
                if length > match:
                    found, match = others, length
        if not found:
            return found
        break_even = self._costs.break_even(self._num_rows, self._num_samples)
        del found[text.acceptance.worthwhile(match, break_even, most) :]
        text.match = match
        return found

    def granted(self, num_tokens: int) -> None:
        """Count tokens of a draft that are rows of the step now."""
        self._num_rows += num_tokens

    def observe(self, request: Sequence, num_guesses: int, num_right: int) -> None:
        """Record that the first `num_right` tokens of the request's latest draft were right."""
        text = self._texts.get(request)
        if text is not None and text.match:
            text.acceptance.observe(text.match, num_guesses, num_right)
            text.match = 0

    def ended(self, request: Sequence) -> None:
        """The request has ended: its output may be repeated by others of its namespace. O(output)."""
        if self._texts.pop(request, None) is not None and request.finish_reason in ("stop", "length"):
            self._outputs.add(request.namespace, request.output_token_ids())

    def forget_outputs(self) -> None:
        """Forget all texts, in every namespace."""
        self._outputs.forget()
