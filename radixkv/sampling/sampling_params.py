# SPDX-License-Identifier: Apache-2.0
"""SamplingParams: how the tokens of an answer are chosen and when it ends, as plain data."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radixkv.errors import InvalidRequestError
from radixkv.option_names import SAMPLING_NAMES, check_names
from radixkv.sampling.structured import StructuredOutputs, given_fields

if TYPE_CHECKING:
    from radixkv.text.chat_formats.answer_marks import AnswerMarks

MAX_N = 128
#: Below this a temperature is 0: the division would overflow float32.
MIN_TEMPERATURE = 1e-5
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_LOGPROBS = 1024
MAX_NAMED_LOGPROBS = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_LENGTH = 1024


def require(good: bool, param: str, wanted: str, value: object) -> None:
    """Refuse an invalid value with an error that names the values wanted for the parameter."""
    if not good:
        raise InvalidRequestError(f"{param} {wanted}, not {value!r:.80}", param=param)


def is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_bad_word(word: object) -> bool:
    """Return True for a text of allowed length, or token ids."""
    if isinstance(word, str):
        return 0 < len(word) <= MAX_BAD_WORD_LENGTH
    if not isinstance(word, Sequence) or isinstance(word, bytes) or not word:
        return False
    return all(is_int(token) and token >= 0 for token in word)


@check_names(SAMPLING_NAMES)
@dataclass(frozen=True, slots=True, repr=False)
class SamplingParams:
    """Parameters of sampling and of the output's end. Immutable; checked on construction.

    Args:
        max_tokens: most tokens to generate; None: up to the model's context limit. 0: only compute the
            prompt, for the cache, and sample nothing.
        min_tokens: no stop token or stop string ends the output before this many tokens.
        temperature: [0, 100]; 0 (and any value below 1e-5) is greedy (argmax).
        top_p: nucleus share in (0, 1].
        top_k: keep the k likeliest tokens; 0 or -1: all.
        min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
        presence_penalty: [-2, 2], subtracted once from each token already generated (OpenAI).
        frequency_penalty: [-2, 2], subtracted per occurrence among the generated tokens (OpenAI).
        repetition_penalty: [0.01, 100], divides (multiplies negative) logits of tokens in prompt and output
            (CTRL, arXiv 1909.05858); 1 is off.
        logit_bias: token id -> number in [-100, 100] added to its logit.
        seed: integer in [-2**63, 2**63) that makes sampling reproducible whatever else runs; None: random.
        n: samples to return.
        best_of: samples to draw, of which the `n` with the highest mean logprob are returned; None: n.
        stop: string or strings that end the output (not included unless `include_stop_str_in_output`).
        stop_token_ids: token ids that end the output, besides the model's own end tokens.
        bad_words: texts that must not be generated, at most 1,024 of 1 to 1,024 characters (or sequences of
            token ids). A text is ruled out in the tokens that it is encoded to, by itself and after a space:
            the last token is forbidden after the tokens before it. The same text in other tokens is not
            recognised. All together have at most 8,192 tokens.
        allowed_token_ids: the only tokens that may be generated; the model's end token must be among them to
            be allowed. None: all.
        ignore_eos: go on past the model's end-of-sequence tokens; without effect on structured outputs,
            which end with these tokens.
        logprobs: None: none; k >= 0: the chosen token's logprob and the k likeliest tokens'.
        prompt_logprobs: the same for the prompt's tokens.
        logprob_token_ids: tokens whose logprobs are wanted at each place of the output, at most 128, whether
            they are likely or not (`TokenLogprobs.named`). None: none.
        include_stop_str_in_output: leave the stop string at the end of the text.
        skip_special_tokens: leave special tokens out of the text.
        kept_special_tokens: spellings of special tokens that stay in the text regardless, such as marks
            around a tool call; the token that ends the output never does.
        structured: constraint on the output, as `StructuredOutputs` or as its arguments: `{"json": schema}`,
            `{"regex": ...}`, `{"choice": [...]}`, `{"grammar": lark}`, `{"json_object": True}`. An output
            truncated by `max_tokens` or a stop string matches as far as it goes. Logprobs are the model's
            own, before tokens are ruled out.
        prediction: token ids that the output may begin with or repeat parts of; matching parts are generated
            faster. It has no other effect.
        answer_marks: marks that tell the model's thoughts from its answer, which alone stop strings and
            stop tokens then end; tokens added to the vocabulary, such as end tokens, end thoughts too. None:
            all of the output is answer.

    Raises:
        InvalidRequestError: an unknown parameter, with the one that was meant; a value out of range, with the
            field, the value and the range.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str | Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    kept_special_tokens: Sequence[str] = ()
    structured: StructuredOutputs | Mapping[str, Any] | None = None
    prediction: Sequence[int] | None = None
    answer_marks: AnswerMarks | None = None

    def __post_init__(self) -> None:
        if self.structured is not None:
            object.__setattr__(self, "structured", StructuredOutputs.of(self.structured))
        self._check_lengths()
        self._check_distribution()
        self._check_counts()
        self._check_stops()
        self._check_ruled_out()

    __repr__ = given_fields

    def _check_lengths(self) -> None:
        least = "must be an integer of at least 0"
        require(is_int(self.min_tokens) and self.min_tokens >= 0, "min_tokens", least, self.min_tokens)
        most = self.max_tokens
        if most is not None:
            require(is_int(most) and most >= 0, "max_tokens", least, most)
            wanted = f"must be at most max_tokens ({most})"
            require(self.min_tokens <= most, "min_tokens", wanted, self.min_tokens)

    def _check_distribution(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, MAX_TEMPERATURE),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        ):
            value, wanted = getattr(self, name), f"must be a number from {low:g} to {high:g}"
            require(is_number(value) and low <= value <= high, name, wanted, value)
        top_p, top_k, biases = self.top_p, self.top_k, self.logit_bias
        require(is_number(top_p) and 0 < top_p <= 1, "top_p", "must be above 0 and at most 1", top_p)
        wanted = "must be -1 or 0 (all tokens) or a positive integer"
        require(is_int(top_k) and top_k >= -1, "top_k", wanted, top_k)
        if biases is not None:
            wanted = "maps token ids (integers >= 0) to numbers from -100 to 100"
            require(isinstance(biases, Mapping), "logit_bias", wanted, biases)
            for token, bias in biases.items():
                good = is_int(token) and token >= 0 and is_number(bias) and -100 <= bias <= 100
                require(good, "logit_bias", wanted, {token: bias})

    def _check_counts(self) -> None:
        n, best_of, seed = self.n, self.best_of, self.seed
        require(is_int(n) and 1 <= n <= MAX_N, "n", f"must be an integer from 1 to {MAX_N}", n)
        if best_of is not None:
            wanted = f"must be an integer from n ({n}) to {MAX_N}"
            require(is_int(best_of) and n <= best_of <= MAX_N, "best_of", wanted, best_of)
        wanted = "and best_of must be 1 where max_tokens is 0, which samples nothing"
        require(self.max_tokens != 0 or self.num_samples == 1, "n", wanted, self.num_samples)
        if seed is not None:
            wanted = "must be a 64-bit signed integer"
            require(is_int(seed) and -(2**63) <= seed < 2**63, "seed", wanted, seed)
        for name in ("logprobs", "prompt_logprobs"):
            value, wanted = getattr(self, name), f"must be an integer from 0 to {MAX_LOGPROBS}"
            require(value is None or (is_int(value) and 0 <= value <= MAX_LOGPROBS), name, wanted, value)
        named = self.logprob_token_ids
        if named is not None:
            wanted = f"must be 1 to {MAX_NAMED_LOGPROBS} token ids (integers >= 0), or None"
            good = isinstance(named, Sequence) and not isinstance(named, str | bytes)
            good = good and 0 < len(named) <= MAX_NAMED_LOGPROBS
            require(
                good and all(is_int(one) and one >= 0 for one in named), "logprob_token_ids", wanted, named
            )

    def _check_stops(self) -> None:
        stop, ids = self.stop, self.stop_token_ids
        is_iterable = stop is None or isinstance(stop, Iterable)
        require(is_iterable, "stop", "must be a string or a sequence of strings", stop)
        require(isinstance(ids, Iterable), "stop_token_ids", "must be a sequence of token ids", ids)
        stops = self.stop_strings
        require(
            len(stops) <= MAX_STOP_STRINGS, "stop", f"must be at most {MAX_STOP_STRINGS} strings", len(stops)
        )
        for text in stops:
            good = isinstance(text, str) and 0 < len(text) <= MAX_STOP_LENGTH
            require(good, "stop", f"must be strings of 1 to {MAX_STOP_LENGTH} characters", text)
        for token in self.prediction or ():
            wanted = f"must be token ids from 0 to {2**31 - 1}"
            require(is_int(token) and 0 <= token < 2**31, "prediction", wanted, token)
        for token in ids:
            wanted = "must be integers of at least 0"
            require(is_int(token) and token >= 0, "stop_token_ids", wanted, token)

    def _check_ruled_out(self) -> None:
        words, allowed = self.bad_words, self.allowed_token_ids
        are_words = isinstance(words, Sequence) and not isinstance(words, str | bytes)
        require(are_words, "bad_words", "must be a sequence of texts", words)
        num_texts = sum(isinstance(word, str) for word in words)
        wanted = f"must be at most {MAX_BAD_WORDS} texts"
        require(num_texts <= MAX_BAD_WORDS, "bad_words", wanted, num_texts)
        for word in words:
            wanted = f"must each have 1 to {MAX_BAD_WORD_LENGTH} characters"
            require(_is_bad_word(word), "bad_words", wanted, word)
        if allowed is not None:
            # There may be as many as tokens in the vocabulary: looked at without a loop of Python's.
            good = isinstance(allowed, Sequence | Set) and not isinstance(allowed, str | bytes)
            good = good and set(map(type, allowed)) == {int} and min(allowed) >= 0
            wanted = "must be token ids (integers >= 0), at least one, or None"
            require(good, "allowed_token_ids", wanted, allowed)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, empty when there are none."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def reports_logprobs(self) -> bool:
        """True if logprobs of the output are wanted."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def num_samples(self) -> int:
        """Samples to draw: `best_of`, or `n` when it is not given."""
        return self.best_of if self.best_of is not None else self.n

    @property
    def grammar(self) -> StructuredOutputs | None:
        """Constraint on the output; None: anything."""
        wanted = self.structured
        assert wanted is None or isinstance(wanted, StructuredOutputs)
        return wanted

    @property
    def ignores_eos(self) -> bool:
        """True if the model's end tokens don't end the output."""
        return self.ignore_eos and self.structured is None

    @property
    def samples_nothing(self) -> bool:
        """True if only the prompt is computed."""
        return self.max_tokens == 0

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is taken, without a draw."""
        return self.temperature < MIN_TEMPERATURE
