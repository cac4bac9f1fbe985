# SPDX-License-Identifier: Apache-2.0
"""Client side of OpenAI's API for the commands: addresses, keys, answers, whole or streamed, usage."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from radixkv.errors import ConfigError, RequestFailedError


def api_root(url: str) -> str:
    """A server's address without the `/v1` that it may be given with."""
    return url.rstrip("/").removesuffix("/v1")


def authorization(api_key: str | None) -> dict[str, str]:
    """The headers that present a key; None: there is none."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def body_of(response: httpx.Response) -> dict[str, Any]:
    """The body of a good answer.

    Raises:
        RequestFailedError: it is none; in the server's own words.
    """
    try:
        body = response.json()
    except ValueError:
        body = None
    if response.status_code < 400 and isinstance(body, dict):
        return body
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else response.text[:200]
    raise RequestFailedError(f"HTTP {response.status_code}: {message}")


def read_event(line: str) -> dict[str, Any] | None:
    """The event in a line of a stream; None: there is none in it. Raises ValueError where it is no JSON."""
    data = line[5:].strip() if line.startswith("data:") else "[DONE]"
    if data == "[DONE]":
        return None
    event: dict[str, Any] = json.loads(data)
    return event


def token_counts(usage: dict[str, Any]) -> tuple[int, int, int]:
    """Tokens of the prompt, its cached tokens, and tokens of the answer; 0 where not reported."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return usage.get("prompt_tokens") or 0, cached or 0, usage.get("completion_tokens") or 0


KEY_VARIABLE = "RADIXKV_API_KEY"


def read_key(path: Path | None) -> str | None:
    """The API key in a file, or in the environment; None: there is none.

    Raises:
        ConfigError: the file can't be read, or holds no key.
    """
    if path is None:
        return os.environ.get(KEY_VARIABLE, "").strip() or None
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: {getattr(error, 'strerror', None) or error}") from None
    if not key or len(key.split()) > 1:
        raise ConfigError(f"--api-key-file {path} must hold one key and nothing else")
    return key


@dataclass(slots=True, kw_only=True)
class StreamedAnswer:
    """A chat or a completion as it came; clock readings in seconds, None: it did not happen."""

    first_token: float | None = None
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    accepted_tokens: int = 0
    error: str | None = None
    text: str = ""

    async def read(self, response: httpx.Response, clock: Callable[[], float]) -> None:
        """Take the events of a stream, to its end or to an error.

        Raises:
            ValueError: one of them is no JSON.
        """
        latest, num_chunks = 0.0, 0
        async for line in response.aiter_lines():
            event = read_event(line)
            if event is None:
                continue
            if "error" in event:
                self.error = "error event"
                return
            if usage := event.get("usage"):
                self.prompt_tokens, self.cached_tokens, self.output_tokens = token_counts(usage)
                details = usage.get("completion_tokens_details") or {}
                self.accepted_tokens = details.get("accepted_prediction_tokens") or 0
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                said = delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls")
                if not said and "text" not in choice:
                    continue
                self.text += choice.get("text") or delta.get("content") or ""
                num_chunks += 1
                now = clock()
                if self.first_token is None:
                    self.first_token = now
                else:
                    self.gaps.append(now - latest)
                latest = now
        self.output_tokens = self.output_tokens or num_chunks  # a server that tells no usage
