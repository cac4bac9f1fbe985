# SPDX-License-Identifier: Apache-2.0
"""Partners of `radixkv chat`: a server by its URL, or a model loaded into this process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import httpx

from radixkv.cli.openai_http import api_root, authorization, body_of, read_event, token_counts
from radixkv.errors import ConfigError, RequestFailedError
from radixkv.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from radixkv.entrypoints.llm import LLM

Message = dict[str, str]


@dataclass(slots=True)
class Turn:
    """Facts about the latest answer; times in seconds, None until known."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None
    total_s: float = 0.0
    finish_reason: str | None = None


class Partner(Protocol):
    """Answers conversations."""

    def stream(self, messages: Sequence[Message], turn: Turn) -> Iterator[str]:
        """The answer's text as it comes; fills in `turn`. Closing the iterator stops it.

        Raises:
            RadixKVError: there is no answer.
        """

    def explain(self, messages: Sequence[Message]) -> str:
        """Explain how much of the conversation is cached, and why the rest is not."""

    def close(self) -> None:
        """Nothing more will be asked."""


class LocalPartner:
    """A model in this process."""

    def __init__(self, llm: LLM, *, max_tokens: int, temperature: float) -> None:
        self._llm = llm
        self._params = SamplingParams(max_tokens=max_tokens, temperature=temperature)

    def stream(self, messages: Sequence[Message], turn: Turn) -> Iterator[str]:
        started = time.monotonic()
        for delta in self._llm.stream_chat(messages, self._params):
            if delta.token_ids and turn.ttft_s is None:
                turn.ttft_s = time.monotonic() - started
            if delta.prompt is not None:
                turn.prompt_tokens = delta.prompt.num_tokens
                turn.cached_tokens = delta.prompt.num_cached_tokens
            turn.output_tokens += len(delta.token_ids)
            turn.finish_reason = delta.finish_reason or turn.finish_reason
            turn.total_s = time.monotonic() - started
            if delta.error is not None:
                raise RequestFailedError(delta.error, code=delta.error_code)
            if delta.text:
                yield delta.text

    def explain(self, messages: Sequence[Message]) -> str:
        return self._llm.explain_chat(messages).detail

    def close(self) -> None:
        """Nothing: the model ends with the process."""


class RemotePartner:
    """A server with OpenAI's chat completions; its reports of cached tokens are shown.

    Args:
        url: of the server, with or without `/v1`.
        model: what to ask for; None: the first that is served.
        api_key: None: none is sent.

    Raises:
        ConfigError: nothing answers there, or not as it should.
    """

    def __init__(
        self, url: str, *, model: str | None, api_key: str | None, max_tokens: int, temperature: float
    ) -> None:
        self._url = api_root(url)
        self._http = httpx.Client(
            base_url=self._url, headers=authorization(api_key), timeout=httpx.Timeout(10.0, read=None)
        )
        self._options = {"max_tokens": max_tokens, "temperature": temperature}
        try:
            found = self._http.get("/v1/models")
            self.model = model or str(body_of(found)["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, RequestFailedError, LookupError) as error:
            self._http.close()
            raise ConfigError(f"--url {url}: no server with OpenAI's API answers: {_said(error)}") from None

    def stream(self, messages: Sequence[Message], turn: Turn) -> Iterator[str]:
        body = {
            "model": self.model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        started = time.monotonic()
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    body_of(response)
                for event in filter(None, map(read_event, response.iter_lines())):
                    if "error" in event:
                        raise RequestFailedError(str(event["error"].get("message")))
                    if usage := event.get("usage"):
                        turn.prompt_tokens, turn.cached_tokens, turn.output_tokens = token_counts(usage)
                    for choice in event.get("choices", ()):
                        delta = choice.get("delta") or {}
                        text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
                        turn.finish_reason = choice.get("finish_reason") or turn.finish_reason
                        if text and turn.ttft_s is None:
                            turn.ttft_s = time.monotonic() - started
                        turn.total_s = time.monotonic() - started
                        if text:
                            yield text
        except httpx.HTTPError as error:
            raise RequestFailedError(f"the server at {self._url} went away: {_said(error)}") from None

    def explain(self, messages: Sequence[Message]) -> str:
        try:
            found = self._http.post("/v1/cache/explain", json={"messages": list(messages)})
        except httpx.HTTPError as error:
            raise RequestFailedError(f"the server at {self._url} went away: {_said(error)}") from None
        if found.status_code == 404:
            return "this server does not explain its cache"
        answer = body_of(found)
        lines = [answer["detail"]]
        around = answer.get("around")
        if around:
            lines.append(f"  before:  {around['before']!r}")
            lines.append(f"  prompt:  {around['prompt']!r}")
            if around.get("cached") is not None:
                lines.append(f"  cached:  {around['cached']!r}")
        if answer.get("advice"):
            lines.append(answer["advice"])
        return "\n".join(lines)

    def close(self) -> None:
        self._http.close()


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
