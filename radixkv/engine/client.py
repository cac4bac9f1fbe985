# SPDX-License-Identifier: Apache-2.0
"""EngineClient: the table of calls on an engine, for callers on event loops, wherever the engine runs.

Each method without a body is a row, as in `CacheClient` and `Adapters`, the other two tables of an engine. A
new call is a row here and what it does in `AsyncEngine`; the others follow:

    AsyncEngine        an engine in this process; overrides each row with what it does
    RemoteEngine       sends name and arguments to another process
    ReplicatedEngine   chooses an engine for each request; asks all for what has a rule (`merge`)

The server uses nothing else, so that its tests run on an engine without a model. One conformance test runs on
every implementation.

Callers name the owner by `tenant` and `salt`; the engine makes the namespace of them (see `CacheClient`).
"""
# mypy: disable-error-code="empty-body"
# ruff: noqa: B027
# The bodies of declared calls are `perform`.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radixkv.engine.calls import Call, call, no_answer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from radixkv.engine.adapters import Adapters
    from radixkv.engine.cache_client import CacheClient
    from radixkv.engine.config import EngineConfig
    from radixkv.engine.counts import EngineStats
    from radixkv.engine.input_processor import PromptLimits
    from radixkv.engine.outputs import OutputDelta, RequestOutput
    from radixkv.engine.weights import PauseMode, Tag
    from radixkv.images.image_processor import ImageProcessor
    from radixkv.scheduling.request import Request
    from radixkv.text.text_tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Constants of an engine.

    Attributes:
        model_fingerprint: identifies configuration, weights and dtype; empty: unknown.
        limits: of prompts.
        default_sampling: arguments of SamplingParams for requests that don't give them.
        tokenizer: None: prompts are token ids, and answers have no text.
        image_processor: how the model takes images; None: it does not see.
    """

    config: EngineConfig
    model_name: str
    model_fingerprint: str
    limits: PromptLimits
    default_sampling: Mapping[str, Any]
    tokenizer: TextTokenizer | None
    image_processor: ImageProcessor | None = None


class EngineClient(ABC):
    """An engine as its callers on an event loop see it. Several event loops may use one client.

    Attributes:
        cache: calls on its prefix cache.
    """

    cache: CacheClient

    @property
    @abstractmethod
    def facts(self) -> EngineFacts:
        """Constants of the engine."""

    @property
    def config(self) -> EngineConfig:
        return self.facts.config

    @property
    def model_name(self) -> str:
        return self.facts.model_name

    @property
    def model_fingerprint(self) -> str:
        return self.facts.model_fingerprint

    @property
    def limits(self) -> PromptLimits:
        return self.facts.limits

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        return self.facts.default_sampling

    @property
    def tokenizer(self) -> TextTokenizer:
        tokenizer = self.facts.tokenizer
        assert tokenizer is not None, "this engine has no tokenizer"
        return tokenizer

    @property
    def image_processor(self) -> ImageProcessor | None:
        return self.facts.image_processor

    @property
    @abstractmethod
    def adapters(self) -> Adapters:
        """The engine's LoRA adapters by name; `load` and reading files block, so call them in a thread."""

    @property
    @abstractmethod
    def is_healthy(self) -> bool:
        """True if requests are taken."""

    @property
    @abstractmethod
    def is_full(self) -> bool:
        """True if the queue was full after the last step, so that a request would be refused. O(1)."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return the counters as of the last step, or of the last call while the engine was idle."""

    def perform(self, call: Call, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Make a call that this client does not override: return its awaitable, or its items."""
        raise NotImplementedError(f"{type(self).__name__} has no {call.name}")

    @call()
    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        """Return the token ids of a text of any length, without holding up the event loop.

        Args:
            add_special_tokens: let the tokenizer add its tokens around a text.
            allow_special: spellings of control tokens in the text mean these tokens; False: they are text.

        Raises:
            InvalidRequestError: the text can't be tokenised.
        """

    @call()
    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> Sequence[int] | npt.NDArray[np.int32]:
        """Return the token ids of a conversation through the chat template; holds up no event loop.

        Raises:
            InvalidRequestError: the template refuses the messages, or there is none.
        """

    @call()
    async def check_quota(self, requests: Sequence[Request]) -> None:
        """Raise what `stream` would raise for a prompt that its tenant's ceiling never lets run.

        For several requests of a tenant and salt that must all be admitted, or none.

        Raises:
            ContextLengthExceededError: one of them leaves no room for a single token.
        """

    @call()
    def stream(self, request: Request) -> AsyncGenerator[OutputDelta]:
        """Yield what each step adds, all samples interleaved. Closing the iterator aborts the request.

        A request that has ended, or whose iterator was closed, leaves its id free for another.

        Raises:
            InvalidRequestError, ContextLengthExceededError, EngineOverloadedError: before the first delta.
            RequestFailedError: the request failed; others go on.
            EngineStoppedError: the engine has been closed or has failed.
        """

    @call()
    async def generate(self, request: Request) -> RequestOutput:
        """Wait for the whole output. Cancelling the task aborts the request. Raises what `stream` raises."""

    @call(merge=no_answer)
    async def pause(self, *, mode: PauseMode = "abort") -> None:
        """Take no requests until `resume`; see `Engine.pause`. With `wait`, return when the last has ended.

        Raises:
            InvalidRequestError: there is no such mode.
        """

    @call(merge=no_answer)
    async def resume(self) -> None:
        """Go on after a pause."""

    @call(merge=any)
    async def is_paused(self) -> bool:
        """Return True if it was paused or sleeps."""

    @call()
    async def update_weights(self, path: str, *, mode: PauseMode = "keep") -> str:
        """Serve other weights of the same model; prefixes computed with the earlier ones are gone at once.

        They are read beside the earlier ones, which serve meanwhile.

        Args:
            path: a folder with config.json and safetensors that the engine can read; or a GGUF file, where
                the model is one.
            mode: what becomes of running requests; see `pause`. It is paused for no longer than this call,
                unless it was before.

        Returns:
            The fingerprint of the model with these weights.

        Raises:
            WeightUpdateError: they can't be read, don't fit the model, or another update has not ended; the
                earlier ones serve.
            InvalidRequestError: there is no such mode.
        """

    @call(merge=no_answer)
    async def sleep(self, level: int = 1, *, mode: PauseMode = "abort") -> None:
        """Give memory back until `wake_up`; see `Engine.sleep`, and `pause` for the mode.

        Raises:
            InvalidRequestError: there is no such level or mode.
        """

    @call(merge=no_answer)
    async def wake_up(self, tags: Sequence[Tag] | None = None) -> None:
        """Take memory again that `sleep` gave back, and resume with the last part of it; None: all.

        Raises:
            InvalidRequestError: there is no such tag.
            WeightUpdateError: weights that were given up can't be read again.
        """

    @call(merge=any)
    async def is_sleeping(self) -> bool:
        """Return True from `sleep`, at whichever level, until all is awake."""

    @call()
    async def abort(self, request_id: str) -> None:
        """End a request with finish reason `abort`; unknown ids are ignored."""

    @call()
    async def close(self) -> None:
        """Stop; unfinished requests get EngineStoppedError. May be called again."""
