"""RoutedPrompt: what a request asks a cache for, as units that equal prompts share: token ids where possible.

Servers that publish events render and tokenise the prompt themselves (`POST /tokenize`, as vLLM and radixkv
have it), so that the units are theirs. Otherwise units are pieces of the text: as good for knowing where a
conversation went before.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import httpx

from radixkv.audit.exchange import Exchange, conversation_in
from radixkv.audit.record import Record
from radixkv.audit.request_bodies import NoRequest

_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d+)')
_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d+)')
_TAIL = 64 * 1024  # of an answer, where its usage is
_TOKENIZE_S = 2.0
_LONG_BODY = 64 * 1024  # is read on another thread
# Of a chat, what changes the prompt.
_TEMPLATE_FIELDS = (
    "model",
    "messages",
    "tools",
    "chat_template_kwargs",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
)
_UNIT_BYTES = 4  # of text, where tokens are not known: about as many as a token has


class RoutedPrompt:
    """One request to a model.

    Attributes:
        units: token ids, or pieces of the text.
        is_exact: they are token ids.
        streams: whether its answer comes token by token.
        session: what it has in common with those before it; None: nothing is known.
    """

    def __init__(self, units: Sequence[int], *, is_exact: bool, streams: bool, session: str | None) -> None:
        self.units = units
        self.is_exact = is_exact
        self.streams = streams
        self.session = session


async def read_prompt(
    path: str, headers: Mapping[str, str], body: bytes, tokenizers: Sequence[str], client: httpx.AsyncClient
) -> RoutedPrompt | None:
    """What a request asks for; None: it is no request to a model.

    Args:
        headers: by names in lower case.
        tokenizers: base addresses of servers whose tokens count; the first one that answers is believed.
    """
    try:
        read = partial(_read, path, body)
        data, record = await asyncio.to_thread(read) if len(body) > _LONG_BODY else read()
    except (ValueError, NoRequest, RecursionError):
        return None
    streams = data.get("stream") is True
    session = conversation_in(headers) or record.conversation or None
    asked = _tokenize_body(path, data)
    if asked is not None:
        for address in tokenizers:
            tokens = await _tokenize(client, address, headers, asked)
            if tokens:
                return RoutedPrompt(tokens, is_exact=True, streams=streams, session=session)
    text = "\0".join(f"{block.role}\1{block.kind}\1{block.text}" for block in record.blocks)
    piece = f"{record.model}\2{text}".encode("utf-8", "surrogatepass")
    units = [
        int.from_bytes(piece[at : at + _UNIT_BYTES], "little") & 0x7FFF_FFFF
        for at in range(0, len(piece), _UNIT_BYTES)
    ]
    return RoutedPrompt(units, is_exact=False, streams=streams, session=session)


def _read(path: str, body: bytes) -> tuple[Any, Record]:
    return json.loads(body), Exchange(path=path, request=body).record()


def _tokenize_body(path: str, data: Mapping[str, Any]) -> dict[str, Any] | None:
    """What /tokenize is asked for; None: it can't be."""
    if path.endswith("/chat/completions"):
        return {name: data[name] for name in _TEMPLATE_FIELDS if data.get(name) is not None}
    if path.endswith("/completions") and isinstance(data.get("prompt"), str):
        return {name: data[name] for name in ("model", "prompt") if name in data}
    return None


async def _tokenize(
    client: httpx.AsyncClient, address: str, headers: Mapping[str, str], body: dict[str, Any]
) -> list[int] | None:
    keys = {name: headers[name] for name in ("authorization", "x-api-key") if name in headers}
    try:
        answer = await client.post(f"{address}/tokenize", json=body, headers=keys, timeout=_TOKENIZE_S)
        tokens = answer.json()["tokens"] if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return None
    return tokens if isinstance(tokens, list) and all(type(token) is int for token in tokens) else None


def reported_share(answer_tail: bytes) -> float | None:
    """How much of its prompt an answer says was cached; None: it does not say."""
    cached, prompt = _CACHED.findall(answer_tail[-_TAIL:]), _PROMPT.findall(answer_tail[-_TAIL:])
    if not cached or not prompt or not int(prompt[-1]):
        return None
    return min(1.0, int(cached[-1]) / int(prompt[-1]))
