# SPDX-License-Identifier: Apache-2.0
"""EngineClient: all that a caller on an event loop may ask of an engine, wherever the engine runs.

`AsyncEngine` implements it over an engine in this process, the tests' scripted engine without a model; the
server uses nothing else. One conformance test runs on every implementation.

Callers name the owner by `tenant` and `salt`; the engine makes the namespace of them (see `CacheClient`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from radixkv.engine.adapters import Adapters
    from radixkv.engine.cache_client import CacheClient
    from radixkv.engine.config import EngineConfig
    from radixkv.engine.counts import EngineStats
    from radixkv.engine.input_processor import PromptLimits
    from radixkv.engine.outputs import OutputDelta, RequestOutput
    from radixkv.scheduling.request import Request
    from radixkv.text.text_tokenizer import TextTokenizer


class EngineClient(Protocol):
    """An engine as its callers on an event loop see it. Several event loops may use one client."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def model_name(self) -> str: ...

    @property
    def model_fingerprint(self) -> str:
        """Identifies configuration, weights and dtype; empty: unknown."""

    @property
    def limits(self) -> PromptLimits:
        """Limits of prompts."""

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """Arguments of SamplingParams for requests that don't give them."""

    @property
    def tokenizer(self) -> TextTokenizer: ...

    @property
    def is_healthy(self) -> bool:
        """True if requests are taken."""

    @property
    def is_full(self) -> bool:
        """True if the queue was full after the last step, so that a request would be refused. O(1)."""

    @property
    def cache(self) -> CacheClient: ...

    @property
    def adapters(self) -> Adapters:
        """The engine's LoRA adapters by name; `load` and reading files block, so call them in a thread."""

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        """Token ids of a text of any length, without holding up the event loop.

        Args:
            add_special_tokens: let the tokenizer add its tokens around a text.
            allow_special: spellings of control tokens in the text mean these tokens; False: they are text.

        Raises:
            InvalidRequestError: the text can't be tokenised.
        """

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> Sequence[int] | npt.NDArray[np.int32]:
        """Token ids of a conversation through the chat template, without holding up the event loop.

        Raises:
            InvalidRequestError: the template refuses the messages, or there is none.
        """

    async def check_quota(self, requests: Sequence[Request]) -> None:
        """Raise what `stream` would raise for a prompt that its tenant's ceiling never lets run.

        For several requests of a tenant and salt that must all be admitted, or none.

        Raises:
            ContextLengthExceededError: one of them leaves no room for a single token.
        """

    def stream(self, request: Request) -> AsyncGenerator[OutputDelta]:
        """Yield what each step adds, all samples interleaved. Closing the iterator aborts the request.

        A request that has ended, or whose iterator was closed, leaves its id free for another.

        Raises:
            InvalidRequestError, ContextLengthExceededError, EngineOverloadedError: before the first delta.
            RequestFailedError: the request failed; others go on.
            EngineStoppedError: the engine has been closed or has failed.
        """

    async def generate(self, request: Request) -> RequestOutput:
        """Wait for the whole output. Cancelling the task aborts the request. Raises what `stream` raises."""

    async def abort(self, request_id: str) -> None:
        """End a request with finish reason `abort`; unknown ids are ignored."""

    def stats(self) -> EngineStats:
        """The engine's counters as of its last step, or the last thing asked of it while it was idle."""

    async def close(self) -> None:
        """Stop; unfinished requests get EngineStoppedError. May be called again."""
