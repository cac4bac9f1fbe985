# SPDX-License-Identifier: Apache-2.0
"""Checks of a `Request`, its prompt's length and token ids included, and its first sample.

Everything that can be refused is refused here. Nothing in here holds blocks or a place in a queue. The checks
read only settings, so that they may run on any thread (the server's event loop calls `prepare` before it
queues anything).
"""

from __future__ import annotations

import itertools
import secrets
from collections import abc
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from radixkv.cache.keys import (
    EncodedTokens,
    NamespaceName,
    TokenIds,
    encode_tokens,
)
from radixkv.engine.adapters import AdapterRegistry, adapter_part, begin_adapter
from radixkv.engine.hooks import Grammars
from radixkv.engine.image_checks import check_images
from radixkv.errors import ENDS_PROCESS, ContextLengthExceededError, InvalidRequestError
from radixkv.images.placed_image import FIRST_IMAGE_ID
from radixkv.sampling.logits_processors import GrammarState
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.sampling.sampling_state import SamplingState
from radixkv.sampling.structured import StructuredOutputs
from radixkv.scheduling.request import PrefixPin, PromptLike, Request, plain_prompt
from radixkv.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from radixkv.scheduling.length_classes import LengthClasses
    from radixkv.text.tokenizer import Tokenizer


# Ids that are encoded at once. Other threads wait meanwhile: a million take 50 ms.
_PIECE = 65536


def encode_prompt(tokenizer: Any, text: str, *, add_special_tokens: bool, allow_special: bool) -> list[int]:
    """Return the ids of a user's text, whatever the tokenizer does with it; any thread.

    Args:
        tokenizer: a `radixkv.text.tokenizer.Tokenizer`, or what stands for one.

    Raises:
        InvalidRequestError: it fails on the text.
    """
    try:
        ids: list[int] = tokenizer.encode(
            text, add_special_tokens=add_special_tokens, allow_special=allow_special
        )
    except (InvalidRequestError, *ENDS_PROCESS):
        raise
    except BaseException as error:  # a panic of the tokenizers library is no Exception
        raise InvalidRequestError(f"the prompt can't be tokenised: {error}", param="prompt") from error
    return ids


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """Limits of one engine's prompts; plain data, for any thread and any process.

    Attributes:
        max_model_len: longest prompt plus output, in tokens.
        context_length: limit of the model, or of the settings; more than `max_model_len` where the cache's
            pool is smaller.
        block_size: tokens in a block of that pool.
        vocab_size: token ids must be below it; None: unchecked.
        lengths: classes of lengths with rotary frequencies of their own; None: there is one.
        takes_images: prompts may have tokens of images, beyond the vocabulary.
    """

    max_model_len: int
    context_length: int
    block_size: int
    vocab_size: int | None
    lengths: LengthClasses | None = None
    takes_images: bool = False

    def encode(self, token_ids: TokenIds, param: str = "prompt") -> EncodedTokens:
        """Check token ids and encode them. O(n).

        Args:
            param: name of the prompts, for errors.

        Raises:
            InvalidRequestError: no flat sequence of token ids of this model.
        """
        try:
            encoded = _encode_in_pieces(token_ids)
        except InvalidRequestError as error:
            raise InvalidRequestError(str(error), param=param, code=error.code) from None
        except TypeError:
            message = f"{param} is text or a sequence of token ids, not {token_ids!r:.80}"
            raise InvalidRequestError(message, param=param) from None
        if len(encoded):
            largest = int(encoded.token_ids.max())
            if self.takes_images and largest >= FIRST_IMAGE_ID:
                token_ids = encoded.token_ids
                largest = int(token_ids.max(initial=0, where=token_ids < FIRST_IMAGE_ID))
            self.check_ids([largest], param)
        return encoded

    def namespace(self, namespace: NamespaceName, num_tokens: int) -> NamespaceName:
        """Return the part of a namespace that shares a sequence of this length."""
        return namespace if self.lengths is None else self.lengths.namespace(namespace, num_tokens)

    def check_ids(self, token_ids: Iterable[int], param: str) -> None:
        """Raise InvalidRequestError where one lies outside the vocabulary. O(n)."""
        limit = 2**31 if self.vocab_size is None else self.vocab_size
        largest = max(token_ids, default=0)
        if largest >= limit:
            message = (
                f"{param}: token id {largest} is out of range: this model's vocabulary is 0 to {limit - 1}"
            )
            raise InvalidRequestError(message, param=param)

    def check_length(self, num_tokens: int, param: str = "prompt") -> None:
        """Raise unless a prompt of this many tokens has one, and leaves room for a token of output. O(1).

        Raises:
            InvalidRequestError: it has none.
            ContextLengthExceededError: it leaves no room.
        """
        if num_tokens == 0:
            message = f"{param} must not be empty: it has no tokens; give at least one"
            raise InvalidRequestError(message, param=param)
        if num_tokens >= self.max_model_len:
            raise self.too_long(f"{num_tokens} tokens", param)

    def too_long(self, size: str, param: str = "prompt") -> ContextLengthExceededError:
        """Return the error for a prompt of such a size."""
        most = self.max_model_len
        limit, advice = f"This model's maximum context length is {most} tokens", "Please reduce the length"
        if most < self.context_length:
            limit = (
                f"This server's KV cache is a pool of {most // self.block_size} blocks, which hold {most} of "
                f"the {self.context_length} tokens that the model can take"
            )
            advice += ", or have the server started with a larger --kv-cache-memory or --num-blocks"
        return ContextLengthExceededError(
            f"{limit}, of which at least one is for the output. However, your {param} resulted in {size}. "
            f"{advice}.",
            param=param,
        )


def _encode_in_pieces(token_ids: TokenIds) -> EncodedTokens:
    if isinstance(token_ids, EncodedTokens):
        return token_ids
    if isinstance(token_ids, list) and len(token_ids) > _PIECE:
        pieces = (token_ids[at : at + _PIECE] for at in range(0, len(token_ids), _PIECE))
        return EncodedTokens(b"".join(map(encode_tokens, pieces)))
    return EncodedTokens(encode_tokens(token_ids))


#: Of all `bad_words` together: a step looks through as many for each sample, at the worst.
MAX_BAD_WORD_TOKENS = 8192


def _check_num_bad(num_tokens: int) -> None:
    if num_tokens > MAX_BAD_WORD_TOKENS:
        raise InvalidRequestError(
            f"bad_words have more than {MAX_BAD_WORD_TOKENS} tokens together, those of texts counted with "
            "and without a space before them; give fewer",
            param="bad_words",
        )


def _token_words(params: SamplingParams) -> Iterator[abc.Sequence[int]]:
    """Iterate over the `bad_words` that are token ids."""
    for word in params.bad_words:
        if not isinstance(word, str):
            yield word


def _check_pins(pins: abc.Sequence[PrefixPin], num_tokens: int) -> None:
    """Refuse pins that are none, or are longer than the prompt."""
    if not isinstance(pins, abc.Sequence) or not all(isinstance(pin, PrefixPin) for pin in pins):
        raise InvalidRequestError(
            f"pins must be a sequence of PrefixPin, as (PrefixPin(num_tokens=32),), not {pins!r:.80}",
            param="pins",
        )
    longest = max((pin.num_tokens for pin in pins), default=0)
    if longest > num_tokens:
        raise InvalidRequestError(
            f"{longest} tokens are to be pinned, but the prompt has {num_tokens}", param="pins"
        )


class InputProcessor:
    """Checks requests against the engine's limits, and makes their sequences.

    Args:
        limits: what prompts must keep to.
        seed: of the first sample whose request gives none, counted on from there; None: a random one.
        end_token_ids: the model's end-of-sequence tokens.
        max_blocks: how many blocks of the pool a request of these tokens may have, in this namespace; see
            `PrefixCache.max_blocks`.
        clock: seconds, monotonic.
        grammars: compiles the grammars of structured outputs; None: they are refused.
        adapters: the engine's, by name; None: it has none.
    """

    def __init__(
        self,
        limits: PromptLimits,
        tokenizer: Tokenizer | None,
        *,
        seed: int | None,
        end_token_ids: frozenset[int],
        max_blocks: Callable[[TokenIds, NamespaceName], int],
        clock: Callable[[], float],
        grammars: Grammars | None = None,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self.end_token_ids = end_token_ids
        self._max_blocks = max_blocks
        self._clock = clock
        self._grammars = grammars
        self.adapters = adapters or AdapterRegistry()
        self._ids = itertools.count()
        self._seeds = itertools.count(seed if seed is not None else secrets.randbits(62))

    # ------------------------------------------------------------------ checks

    def tokenize(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        """Return the token ids of a text; any thread. See `radixkv.text.tokenizer.Tokenizer.encode`.

        Raises:
            InvalidRequestError: there is no tokenizer, or it fails on the text.
        """
        if self.tokenizer is None:
            raise InvalidRequestError("this engine has no tokenizer: give token ids", param="prompt")
        return encode_prompt(
            self.tokenizer, text, add_special_tokens=add_special_tokens, allow_special=allow_special
        )

    def prepare(self, request: Request) -> None:
        """Check a request, and encode its prompt and its `bad_words`; any thread. O(length).

        Once: a request that was prepared stays as it is. The files of an adapter that is not in memory are
        read; ask `Adapters.acquire` before, where that must not hold up the thread.

        Raises:
            InvalidRequestError: no flat sequence of token ids of this model, or text that can't be tokenised;
                an empty prompt, an unknown adapter, a parameter that names a token out of range or leaves
                none to choose, or a pin of more tokens than the prompt has.
            ContextLengthExceededError: the prompt leaves no room for a single token, in the model's context
                or in the KV cache.
        """
        if request.is_checked:
            return
        self._acquire_adapter(request)
        if isinstance(request.prompt, str):
            request.text = request.prompt
        request.prompt = self.encode(request.prompt)
        if request.adapter is not None:
            begin_adapter(request, request.prompt)
        self.limits.check_length(len(request.prompt))
        check_images(request, request.prompt, takes_images=self.limits.takes_images)
        request.params = self.encode_words(request.params)
        _check_pins(request.pins, len(request.prompt))
        self._check_tokens(request.params)
        request.is_checked = True

    def _acquire_adapter(self, request: Request) -> None:
        """Acquire the adapter that a request names."""
        if request.lora:
            request.adapter = self.adapters.acquire(request.lora)
        elif self.adapters.is_enabled and adapter_part(request.namespace):
            raise InvalidRequestError(
                f"the namespace {request.namespace!r} names an adapter: give its name as lora instead",
                param="namespace",
            )

    def encode(self, prompt: PromptLike) -> EncodedTokens:
        """Tokenise a prompt if it is text, check its token ids, and encode them; any thread. O(length).

        Raises:
            InvalidRequestError: no flat sequence of token ids of this model, or text that can't be tokenised.
        """
        plain = plain_prompt(prompt)
        return self.limits.encode(self.tokenize(plain) if isinstance(plain, str) else plain)

    def encode_words(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with their `bad_words` as token ids; any thread. O(length of the words).

        Raises:
            InvalidRequestError: a word can't be tokenised, or they have too many tokens.
        """
        if not any(isinstance(word, str) for word in params.bad_words):
            return params
        words: set[tuple[int, ...]] = set()
        num_tokens = 0
        for word in params.bad_words:
            new = set(self._spellings(word) if isinstance(word, str) else [tuple(word)]) - words
            words |= new
            num_tokens += sum(map(len, new))
            _check_num_bad(num_tokens)  # before the others are tokenised
        return replace(params, bad_words=sorted(words))

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """Return the tokens of a word at the beginning of a text, and after a space."""
        bare = word.lstrip() or word
        try:
            spellings = [tuple(self.tokenize(text, add_special_tokens=False)) for text in (bare, f" {bare}")]
        except InvalidRequestError as error:
            raise InvalidRequestError(f"bad_words: {word!r:.80}: {error}", param="bad_words") from None
        if not all(spellings):
            raise InvalidRequestError(f"bad_words: {word!r:.80} has no tokens", param="bad_words")
        return spellings

    def _check_tokens(self, params: SamplingParams) -> None:
        """Refuse parameters that name tokens out of range, or leave none to choose."""
        bad = list(itertools.chain.from_iterable(_token_words(params)))
        _check_num_bad(len(bad))
        for name, ids in (
            ("logit_bias", params.logit_bias or ()),
            ("stop_token_ids", params.stop_token_ids),
            ("prediction", params.prediction or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logprob_token_ids", params.logprob_token_ids or ()),
            ("bad_words", bad),
        ):
            self.limits.check_ids(ids, name)
        self._check_choice(params)

    def _check_choice(self, params: SamplingParams) -> None:
        """Refuse parameters that leave no token to begin with. (One left without later fails then.)"""
        ends = {*params.stop_token_ids, *self._ends(params)} if params.min_tokens else set[int]()
        bad = {word[0] for word in _token_words(params) if len(word) == 1}
        allowed, avoided = params.allowed_token_ids, ends | bad
        if allowed is not None:
            some_left = not avoided.issuperset(allowed)
        else:
            limit = self.limits.vocab_size or 2**31
            some_left = sum(0 <= token < limit for token in avoided) < limit
        if some_left:
            return
        causes = {
            "allowed_token_ids": allowed is not None,
            "bad_words": bool(bad),
            "stop_token_ids": bool(ends),
        }
        names = [name for name, given in causes.items() if given]
        why = " (min_tokens rules out every token that ends the output)" if ends else ""
        raise InvalidRequestError(
            f"{' and '.join(names)} leave no token to choose{why}; loosen one of them", param=names[0]
        )

    def check_quota(self, request: Request) -> None:
        """Raise if a prompt can never run below its namespace's ceiling, whatever else runs.

        On the engine's thread: it looks at the cache.

        Args:
            request: prepared.

        Raises:
            ContextLengthExceededError: it leaves no room for a single token.
        """
        prompt, block_size = request.prompt, self.limits.block_size
        assert isinstance(prompt, EncodedTokens)
        most = self._max_blocks(prompt, request.namespace)
        if len(prompt) >= most * block_size:
            raise ContextLengthExceededError(
                f"the prompt has {len(prompt)} tokens, with at least one to generate, but your quota of the "
                f"KV cache (ceiling_blocks) is {most} blocks of {block_size} tokens; shorten the prompt "
                f"to {most * block_size - 1} tokens, or ask for a larger quota"
            )

    def compile(self, params: SamplingParams, namespace: NamespaceName = "") -> GrammarState | None:
        """Return the compiled grammar of the output; None: anything. Any thread; waits for the compiler.

        Args:
            namespace: whose grammar it is.

        Raises:
            InvalidRequestError: the grammar is refused; names what of it.
            EngineOverloadedError: the tenant's grammars keep the compiler busy.
        """
        if params.grammar is None:
            return None
        compiled: GrammarState = self.submit_grammar(params.grammar, namespace).result()
        return compiled

    def submit_grammar(self, spec: StructuredOutputs, namespace: NamespaceName = "") -> Future[Any]:
        """Compile a grammar soon; see `radixkv.engine.hooks.Grammars`. Any thread."""
        if self._grammars is None:
            raise InvalidRequestError("this engine compiles no grammars", param="structured")
        return self._grammars.submit(spec, namespace)

    def _ends(self, params: SamplingParams) -> frozenset[int]:
        return frozenset() if params.ignores_eos else self.end_token_ids

    # ------------------------------------------------------------------ requests

    def begin(self, request: Request) -> None:
        """Make the first sequence of a prepared request. On the engine's thread: it looks at the cache.

        Raises: see `check_quota` and `compile`.
        """
        prompt, params = request.prompt, request.params
        assert isinstance(prompt, EncodedTokens)
        request.namespace = self.limits.namespace(request.namespace, len(prompt))
        self.check_quota(request)
        request.grammar = request.grammar or self.compile(params, request.namespace)
        request.request_id = request.request_id or f"req-{next(self._ids)}"
        sample = Sequence(request, arrival_s=self._clock())
        # Ranking the samples of best_of needs their logprobs, whether or not the user asked for them.
        if request.is_ranked and params.logprobs is None:
            sample.params = replace(params, logprobs=0)
        room = self.room_after(prompt, request.namespace)
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        sample.begin_output(self.tokenizer, self._ends(params), most)
        if self.limits.lengths is not None:
            sample.grows_until = min(most, self.limits.lengths.most_output(sample))
        sample.num_forks = params.num_samples - 1
        seed = params.seed if params.seed is not None else next(self._seeds)
        sample.sampling_state = SamplingState(
            params, seed, prompt.token_ids, [*self._ends(params), *params.stop_token_ids], request.grammar
        )
        if params.prompt_logprobs is not None:
            sample.prompt_logprobs = [None]
        request.samples = [sample]

    def forks(self, parent: Sequence) -> list[Sequence]:
        """Make the other samples of a request whose prompt is complete; sample i draws with seed + i."""
        forks = []
        for i in range(1, parent.num_forks + 1):
            fork = Sequence(parent.request, parent.tokens(), arrival_s=parent.times.arrival, index=i)
            fork.params = parent.params
            seed = parent.params.seed + i if parent.params.seed is not None else next(self._seeds)
            fork.sampling_state = parent.sampling_state.fork(seed)
            fork.begin_output(self.tokenizer, parent.end_token_ids, parent.max_output_tokens)
            fork.grows_until = parent.grows_until
            fork.times.first_scheduled = parent.times.first_scheduled
            fork.num_cached_tokens = parent.num_cached_tokens
            fork.num_cache_write_tokens = parent.num_cache_write_tokens
            fork.cache_report = parent.cache_report
            forks.append(fork)
        return forks

    def room_after(self, prompt: TokenIds, namespace: NamespaceName) -> int:
        """Return how many tokens can follow a prompt, in the context, the pool and the namespace's quota.

        On the engine's thread: it looks at the cache.
        """
        granted = self._max_blocks(prompt, namespace) * self.limits.block_size
        return min(self.limits.max_model_len, granted) - len(prompt)
