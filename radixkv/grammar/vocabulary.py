# SPDX-License-Identifier: Apache-2.0
"""Vocabulary: the tokens of a model as llguidance knows them, over which it compiles grammars."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

import llguidance
import numpy as np
import numpy.typing as npt

from radixkv.grammar.grammar_text import grammar_text
from radixkv.grammar.special_tokens import hidden_names, hide_special_tokens
from radixkv.sampling.structured import StructuredOutputs

#: Limits of a matcher; beyond them, it is in error. Common grammars need a tenth.
#: - compile fuel: half of llguidance's; a refusal at this limit takes a third of a second, not a whole one.
#: - mask fuel: of one mask's regular expressions, eight milliseconds or so; all but \p{L} takes half of it.
#: - row and step items: of the parser. A row is searched whole for each item that is added to it, so that the
#:   work grows with the square; an object of 480 optional properties has 2,000.
#: - states: about half a kilobyte of memory each; a mask within a text of bounded length makes twenty.
#: - grammar: symbols of all its rules; 1,000 optional properties have 8,000.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 80_000,
    "max_items_in_row": 2_000,
    "step_max_items": 6_000,
    "max_lexer_states": 100_000,
    "max_grammar_size": 10_000,
}
_MAX_MASK_THREADS = 8


def _slices() -> list[str]:
    """Return patterns of texts whose tokens a mask takes as a whole if the grammar allows all such texts.

    Masks spend their time on strings of bounded length: near the bound, llguidance's own slices (up
    to 10 and 30 characters) no longer fit, and each token is tried. Shorter slices halve that time, and
    slices of letters do so for patterns. Order matters: a token belongs to the first slice that it fits.
    """
    kinds = (
        ("[a-z ]", (2, 4, 6, 8, 12, 20)),
        ("[a-zA-Z ]", (4, 8, 20)),
        (r'[^"\\\x00-\x1F\x7F]', (2, 4, 6, 9, 15, 30)),
    )
    own = [f"{kind}{{1,{most}}}" for kind, lengths in kinds for most in lengths]
    return [r"[\x20\x0A\x0D\x09]+", *own, r'[^"\\\x00-\x1F\x7F]+']


Bitmasks = npt.NDArray[np.int32]


class GrammarTokenizer(Protocol):
    """Tokenizer that grammars can be compiled for."""

    def grammar_source(self) -> Any:
        """Return the JSON text of a tokenizer of the `tokenizers` library, or its tokens as an object.

        The object has `tokens` (the bytes of each id), `special_token_ids`, `eos_token_id`, `bos_token_id`
        and a call from text to ids.
        """


@dataclass(frozen=True)
class PlainTokens:
    """Tokenizer as data for another process; it splits text into the longest tokens."""

    is_tokenizer_wrapper: ClassVar = True
    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: int | None

    def __call__(self, text: str | bytes) -> list[int]:
        rest = text.encode() if isinstance(text, str) else text
        found = []
        while rest:
            size = next((n for n in range(min(len(rest), 32), 0, -1) if rest[:n] in self._ids), 1)
            if rest[:size] in self._ids:
                found.append(self._ids[rest[:size]])
            rest = rest[size:]
        return found

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)  # they stand for no text
        return {token: i for i, token in enumerate(self.tokens) if i not in special}

    def grammar_source(self) -> PlainTokens:
        return self


@dataclass(frozen=True)
class VocabularyRecipe:
    """Ingredients of a vocabulary, as data for another process.

    Args:
        source: the JSON text of a tokenizer, or its tokens.
    """

    source: str | PlainTokens
    end_token_ids: tuple[int, ...]

    def grammar_source(self) -> Any:
        return self.source

    def make(self) -> Vocabulary:
        return Vocabulary(self, self.end_token_ids)


class Vocabulary:
    """Tokens of a tokenizer. To make it takes some tenths of a second.

    Args:
        end_token_ids: tokens that end an output; none: the tokenizer's own.

    Attributes:
        end_token_ids: allowed where a grammar is complete.
        size: number of ids in a mask; a model's logits may be wider.
        scratch: float32 [bytes of a mask, 8], for the one thread that applies masks: fresh memory at
            every step costs more than the work done with it.

    Raises:
        ValueError: llguidance does not know this kind of tokenizer.
    """

    def __init__(self, tokenizer: GrammarTokenizer, end_token_ids: Collection[int]) -> None:
        source = tokenizer.grammar_source()
        self._names_are_hidden = isinstance(source, str)
        source = self._source = hide_special_tokens(source) if isinstance(source, str) else source
        self._tokens = llguidance.LLTokenizer(
            source, eos_token=sorted(end_token_ids) or None, slices=_slices()
        )
        self.end_token_ids = frozenset(self._tokens.eos_tokens)
        self.size: int = self._tokens.vocab_size
        self.scratch = np.empty((-(-self.size // 32) * 4, 8), dtype=np.float32)
        # One core stays free for the thread that waits for the masks.
        self._threads = max(1, min((os.cpu_count() or 1) - 1, _MAX_MASK_THREADS))
        self._limits = llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)

    @cached_property
    def _executor(self) -> llguidance.LLExecutor:
        return llguidance.LLExecutor(self._threads)

    def recipe(self) -> VocabularyRecipe:
        """Return the ingredients of the same vocabulary in another process."""
        source = self._source
        if not isinstance(source, str):
            source = PlainTokens(
                list(source.tokens),
                list(getattr(source, "special_token_ids", ())),
                source.eos_token_id,
                source.bos_token_id,
            )
        return VocabularyRecipe(source, tuple(self.end_token_ids))

    def matcher(self, spec: StructuredOutputs) -> llguidance.LLMatcher:
        """Return a matcher at the beginning of a grammar; it may be in error. Takes 1 ms to 1 s."""
        if spec.grammar is not None and self._names_are_hidden:
            spec = replace(spec, grammar=hidden_names(spec.grammar))
        return llguidance.LLMatcher(self._tokens, grammar_text(spec), log_level=0, limits=self._limits)

    def encode(self, text: str) -> list[int]:
        """Return the ids of tokens that spell a text, without special ones. O(text)."""
        return [int(token) for token in self._tokens.tokenize_str(text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without an incomplete character at its end. O(tokens)."""
        return bytes(self._tokens.decode_bytes(list(token_ids))).decode(errors="ignore")

    def masks(self, matchers: Sequence[llguidance.LLMatcher]) -> Bitmasks:
        """Return the allowed next tokens of each matcher, as bits: int32 [len(matchers), ceil(size / 32)].

        Several are computed at once where there are cores. A matcher that fails is in error afterwards.
        """
        masks = self._no_masks(len(matchers))
        width, start = masks.strides[0], masks.ctypes.data
        if self._threads == 1 or len(matchers) == 1:
            for i, matcher in enumerate(matchers):
                matcher.unsafe_compute_mask_ptr(start + i * width, width)
        else:
            rows = list(zip(matchers, range(len(matchers)), strict=True))
            self._executor.unsafe_compute_mask_ptr(rows, start, width, len(matchers))
        return masks

    def timed_masks(self, matchers: Sequence[llguidance.LLMatcher]) -> tuple[Bitmasks, list[float]]:
        """Return `masks`, computed one after the other, and the CPU seconds of each."""
        masks = self._no_masks(len(matchers))
        width, start = masks.strides[0], masks.ctypes.data
        times = [time.thread_time()]
        for i, matcher in enumerate(matchers):
            matcher.unsafe_compute_mask_ptr(start + i * width, width)
            times.append(time.thread_time())
        return masks, [after - before for before, after in itertools.pairwise(times)]

    @property
    def masks_at_once(self) -> int:
        """Number of masks found at the same time."""
        return self._threads

    def _no_masks(self, count: int) -> Bitmasks:
        return np.zeros((count, -(-self.size // 32)), dtype=np.int32)
