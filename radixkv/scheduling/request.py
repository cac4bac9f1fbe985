# SPDX-License-Identifier: Apache-2.0
"""Request: a user's request to an engine, made once at the edge, and its output.

The same object is checked, queued and scheduled, and has the samples and their outcome. Another process
gets a copy of it. An option of a request is a field here, read where it has its effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NotRequired, TypedDict, cast

from radixkv.cache.keys import NamespaceName, TokenIds, frame_namespace
from radixkv.errors import InvalidRequestError
from radixkv.sampling.sampling_params import SamplingParams, is_int, is_number, require


class TextPrompt(TypedDict):
    """A prompt as text, in a dictionary, as vLLM's programs write it."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids, in a dictionary, as vLLM's programs write it; a text beside them is not read."""

    prompt_token_ids: TokenIds
    prompt: NotRequired[str]


#: Text, or token ids: a sequence, an array, or encoded ones.
Prompt = str | TokenIds
#: A prompt as users give it.
PromptLike = Prompt | TextPrompt | TokensPrompt


def plain_prompt(prompt: PromptLike) -> Prompt:
    """Return the text or the token ids of a prompt.

    >>> plain_prompt({"prompt": "Once"}), plain_prompt({"prompt_token_ids": [5, 6]}), plain_prompt("Once")
    ('Once', [5, 6], 'Once')

    Raises:
        InvalidRequestError: a dictionary with neither of the two, or with anything else.
    """
    if not isinstance(prompt, Mapping):
        return prompt
    given: dict[str, Any] = {name: value for name, value in prompt.items() if value is not None}
    text, token_ids = given.pop("prompt", None), given.pop("prompt_token_ids", None)
    if given or text is token_ids is None or not isinstance(text, str | None):
        hints = {"role": "; messages go to chat", "cache_salt": "; give namespace=(name, salt) instead"}
        hint = next((hints[name] for name in given if name in hints), "")
        raise InvalidRequestError(
            'a prompt is text, token ids, {"prompt": text} or {"prompt_token_ids": token ids}, '
            f"not {dict(prompt)!r:.200}{hint}",
            param="prompt",
        )
    return cast(Prompt, text if token_ids is None else token_ids)


FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class PrefixPin:
    """The first tokens of a prompt, to be pinned once they are computed; each hit renews the time.

    As far as the pin budget goes. A pin that is there already is made no shorter, in tokens or in time.

    Args:
        num_tokens: how many of the prompt's; at most all of them.
        ttl: seconds; None: until it is unpinned.

    Raises:
        InvalidRequestError: less than one token, or a time that is no positive number.
    """

    num_tokens: int
    ttl: float | None = None

    def __post_init__(self) -> None:
        count, ttl = self.num_tokens, self.ttl
        require(is_int(count) and count >= 1, "pins", "need an integer of at least 1 as num_tokens", count)
        good = ttl is None or (is_number(ttl) and ttl > 0)
        require(good, "pins", "need a positive number of seconds as ttl, or None", ttl)


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why a request ends before its time: a sentence for its user, and a code for programs."""

    message: str
    code: str


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds from a request's arrival at its engine until something happened; None: it has not.

    Attributes:
        first_scheduled: its first step was computed.
        first_token: its first token came.
        finished: it ended.
    """

    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """A prompt to be answered; an engine takes it once.

    Args:
        prompt: text or token ids, which are encoded when the request is checked.
        request_id: unique among unfinished requests; empty: the engine makes one.
        tenant, salt: owner of the shared prefixes; engine clients make the namespace of them.
        namespace: requests share cached prefixes only inside one namespace: a tenant, or (tenant, salt,
            adapter); the model is added.
        lora: name of the adapter that computes it, which goes into the namespace; empty: the base alone.
        priority: smaller is more urgent, under the `priority` policy.
        background: under every policy, it gets what no other request wants: slots, blocks and tokens of
            steps.
        cache_key_hint: shared by requests that come back together; tells `adaptive` eviction how soon.
        pins: prefixes of the prompt to pin once they are computed.
        checkpoints: leading tokens that others will probably share, such as those up to the last message of
            the user: a model with states keeps a state there, if it can.
        keep_tokens: leading tokens of prompt and answer that may stay cached because of this request when it
            has ended; tokens that others have used meanwhile stay. None: all.
        session_done: no later prompt goes on from this one: when it has ended, what only it needed is evicted
            first.
        text: the prompt as text, where it was tokenised on the way; None: it came as token ids.
        images: the images whose tokens the prompt has, in their order, as `image_processor` gives them.
        stream: each step gives deltas, not only the end the whole output.

    Attributes:
        is_checked: the engine's limits allow it.
        adapter: the adapter in memory, held until the request is gone; None: it has none.
        adapter_from: leading tokens that the base alone computes, before an activated adapter begins: others
            can share these, and no more; 0: the adapter computes all, in a namespace of its own.
        grammar: the compiled grammar of the output; None: any output.
        samples: in the order of their indices; empty: no engine has it.
        failure: why it failed; None: it did not.
        num_pinned_tokens: prompt tokens that are pinned for it; None: none were to be.
        prompt_was_sent: a delta had the outcome of its prompt.
    """

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    _: KW_ONLY
    request_id: str = ""
    tenant: str = ""
    salt: str = ""
    namespace: NamespaceName = ""
    lora: str = ""
    priority: int = 0
    background: bool = False
    cache_key_hint: str = ""
    pins: Sequence[PrefixPin] = ()
    checkpoints: Sequence[int] = ()
    keep_tokens: int | None = None
    session_done: bool = False
    text: str | None = None
    images: Sequence[Any] = ()
    stream: bool = False
    is_checked: bool = field(init=False, default=False)
    adapter: Any = field(init=False, default=None)
    adapter_from: int = field(init=False, default=0)
    grammar: Any = field(init=False, default=None)
    samples: list[Any] = field(init=False, default_factory=list)
    failure: Failure | None = field(init=False, default=None)
    num_pinned_tokens: int | None = field(init=False, default=None)
    prompt_was_sent: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.prompt = plain_prompt(self.prompt)
        require(isinstance(self.params, SamplingParams), "params", "must be SamplingParams", self.params)

    @property
    def is_ranked(self) -> bool:
        """With best_of > n nothing can be delivered before all samples are complete."""
        return self.params.num_samples > self.params.n

    @property
    def session(self) -> tuple[str, ...] | None:
        """Name of the requests that come back together, unique among all namespaces; None: not known."""
        hint = self.cache_key_hint
        return (*frame_namespace(self.namespace), hint) if hint else None

    @property
    def is_finished(self) -> bool:
        return all(sample.is_finished for sample in self.samples)

    def num_kept(self, num_tokens: int) -> int:
        """Number of its first tokens that may stay cached because of it."""
        return num_tokens if self.keep_tokens is None else min(self.keep_tokens, num_tokens)

    def unfinished(self) -> list[Any]:
        """Return the samples that still run or wait."""
        return [sample for sample in self.samples if not sample.is_finished]

    def forget_unborn_samples(self) -> None:
        """Drop samples that were about to be forked and have no token yet: they will be made again."""
        if self.samples and self.samples[0].num_forks:
            del self.samples[1:]

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {len(self.prompt)} in, {len(self.samples)} samples)"
