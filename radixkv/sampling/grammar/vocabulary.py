"""The tokens of a model as llguidance knows them, and what compiles grammars over them."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import llguidance
import numpy as np
import numpy.typing as npt

from radixkv.structured import StructuredOutputs

#: Half of llguidance's: what it refuses at this takes a third of a second, not a whole one.
_COMPILE_FUEL = 300_000
#: A mask that needs more than this, three milliseconds or so, ends its request. Common grammars need a tenth.
_MASK_FUEL = 30_000
_MAX_MASK_THREADS = 8


def _slices() -> list[str]:
    """Texts whose tokens a mask takes as a whole where the grammar allows all such texts.

    Strings of bounded length are what masks spend their time on: near the bound, llguidance's own slices (up
    to 10 and 30 characters) no longer fit, and each token is tried. Shorter ones halve that, and those of
    letters do the same for patterns. Order matters: a token belongs to the first slice that it fits.
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
    """What a tokenizer must give so that grammars can be compiled for it."""

    def grammar_source(self) -> Any:
        """The JSON text of a tokenizer of the `tokenizers` library; or an object with `tokens` (the bytes of
        each id), `special_token_ids`, `eos_token_id`, `bos_token_id` and a call from text to ids.
        """


class Vocabulary:
    """One tokenizer's tokens. Making it takes some tenths of a second.

    Args:
        end_token_ids: tokens that end an output; none: the tokenizer's own.

    Attributes:
        end_token_ids: allowed where a grammar is complete.
        size: ids that masks tell of; a model's logits may be wider.
        scratch: float32 [bytes of a mask, 8], for the one thread that applies masks: memory that is new at
            every step costs more than what is done with it.

    Raises:
        ValueError: llguidance does not know this kind of tokenizer.
    """

    def __init__(self, tokenizer: GrammarTokenizer, end_token_ids: Collection[int]) -> None:
        source = tokenizer.grammar_source()
        self._tokens = llguidance.LLTokenizer(
            source, eos_token=sorted(end_token_ids) or None, slices=_slices()
        )
        self.end_token_ids = frozenset(self._tokens.eos_tokens)
        self.size: int = self._tokens.vocab_size
        self.scratch = np.empty((-(-self.size // 32) * 4, 8), dtype=np.float32)
        # One core stays for whoever waits for the masks.
        threads = max(1, min((os.cpu_count() or 1) - 1, _MAX_MASK_THREADS))
        self._executor = llguidance.LLExecutor(threads) if threads > 1 else None
        self._limits = llguidance.LLParserLimits(
            initial_lexer_fuel=_COMPILE_FUEL, step_lexer_fuel=_MASK_FUEL, verbose_errors=False
        )

    def matcher(self, spec: StructuredOutputs) -> llguidance.LLMatcher:
        """A matcher at the beginning of a grammar; it may be in error. Takes a millisecond to a second."""
        return llguidance.LLMatcher(self._tokens, grammar_text(spec), log_level=0, limits=self._limits)

    def masks(self, matchers: Sequence[llguidance.LLMatcher]) -> Bitmasks:
        """The tokens that each matcher allows next, a bit each: int32 [len(matchers), ceil(size / 32)].

        A matcher that fails at that is in error afterwards.
        """
        masks = np.zeros((len(matchers), -(-self.size // 32)), dtype=np.int32)
        width, start = masks.strides[0], masks.ctypes.data
        if self._executor is None or len(matchers) == 1:
            for i, matcher in enumerate(matchers):
                matcher.unsafe_compute_mask_ptr(start + i * width, width)
        else:
            rows = list(zip(matchers, range(len(matchers)), strict=True))
            self._executor.unsafe_compute_mask_ptr(rows, start, width, len(matchers))
        return masks


def grammar_text(spec: StructuredOutputs) -> str:
    """What llguidance compiles.

    Raises:
        ValueError: a JSON Schema that is none.
    """
    if spec.regex is not None:
        return str(llguidance.LLMatcher.grammar_from_regex(spec.regex))
    if spec.grammar is not None:
        return str(llguidance.LLMatcher.grammar_from_lark(spec.grammar))
    if spec.choice is not None:
        return str(
            llguidance.LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, spec.choice))}")
        )
    schema = '{"type":"object"}' if spec.json_object else str(spec.json)
    if schema.strip() == "true":
        schema = "{}"
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        schema,
        overrides={
            "whitespace_flexible": not spec.disable_any_whitespace,
            "whitespace_pattern": spec.whitespace_pattern,
        },
    )
    return str(grammar)
