"""What the client commands know of OpenAI's API: addresses, keys, answers, events of streams, usage."""

from __future__ import annotations

import json
from typing import Any

import httpx

from radixkv.errors import RequestFailedError


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
    """Tokens of the prompt, those of them that were cached, and tokens of the answer; 0 where not told."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return usage.get("prompt_tokens") or 0, cached or 0, usage.get("completion_tokens") or 0
