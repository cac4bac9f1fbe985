"""A compiled grammar."""

from __future__ import annotations

import llguidance

from radixkv.sampling.grammar.masks import GrammarMask
from radixkv.sampling.grammar.vocabulary import Vocabulary
from radixkv.sampling.grammar.work import Automaton, Effort, WorkAccount
from radixkv.sampling.logits_processors import MinTokens


class Grammar:
    """A prototype at its beginning, with the first masks after it; all copies share its automaton.

    Args:
        account: pays for what answers take beyond what is promised.
        num_bytes: memory that it took to compile.
    """

    def __init__(
        self, prototype: llguidance.LLMatcher, vocabulary: Vocabulary, account: WorkAccount, num_bytes: int
    ) -> None:
        self._prototype = prototype
        self._vocabulary = vocabulary
        self._account = account
        self.automaton = Automaton(num_bytes)

    def start(self, min_tokens: MinTokens | None = None) -> GrammarMask:
        """A processor for one sample. Some microseconds."""
        effort = Effort(self._account, self.automaton)
        return GrammarMask(self._prototype.deep_copy(), self._vocabulary, min_tokens, effort)
