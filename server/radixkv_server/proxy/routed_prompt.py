"""RoutedPrompt: what a request asks a cache for, as units that equal prompts share: token ids where possible.

Servers that publish events render and tokenise the prompt themselves, so that the units are theirs:

    radixkv         POST /tokenize/v1/... takes the body of that route as it came, and tells the tokens and
                    the namespace in which the cache looks them up: whose the request's key is, and the salt
    vLLM, SGLang    POST /tokenize takes chats, and completions of one text

Otherwise units are pieces of the text: as good for knowing where a conversation went before.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from radixkv.audit.exchange import Exchange, conversation_in
from radixkv.audit.record import Record
from radixkv.cache.keys import NamespaceName

_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d+)')
_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d+)')
_TAIL = 64 * 1024  # of an answer, where its usage is
_TOKENIZE_S = 2.0
_LONG_BODY = 64 * 1024  # is read on another thread
#: Routes whose prompts a server of ours tells.
_TOLD_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
# What a server refuses with 404 because another one keeps what the body goes on from.
_STORED = frozenset({"previous_response_id", "thread", "input"})
_PASSED_ON = ("authorization", "x-api-key", "content-type", "content-encoding")
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


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """One request to a model.

    Attributes:
        units: token ids, or pieces of the text.
        is_exact: they are token ids.
        streams: whether its answer comes token by token.
        session: what it has in common with those before it; None: nothing is known.
        namespace: in which a cache looks it up.
        impossible: addresses of servers that do not keep what it goes on from.
    """

    units: Sequence[int]
    is_exact: bool
    streams: bool
    session: str | None
    namespace: NamespaceName = ""
    impossible: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Told:
    tokens: list[int]
    namespace: NamespaceName


class _Refused(Exception):
    """The request is refused wherever it goes."""


class _NotHere(Exception):
    """The server does not keep what the request goes on from."""


class PromptReader:
    """Reads requests, with the help of servers that tokenise them.

    Args:
        client: asks these.
    """

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._others: set[str] = set()  # addresses of servers that are not ours

    def forget(self, address: str) -> None:
        """Another server may be there now."""
        self._others.discard(address)

    async def read(
        self, path: str, headers: Mapping[str, str], body: bytes, tokenizers: Sequence[str]
    ) -> RoutedPrompt | None:
        """What a request asks for; None: it is no request to a model.

        Args:
            headers: by names in lower case.
            tokenizers: base addresses of servers whose tokens count; the first one that answers is believed.
        """
        try:
            read = partial(_read, path, headers, body)
            record = await asyncio.to_thread(read) if len(body) > _LONG_BODY else read()
        except (ValueError, RecursionError):
            return None
        data = record.body
        told: _Told | None = None
        impossible = set[str]()
        asks_all = _goes_on(data)
        for address in tokenizers:
            if told is not None and not asks_all:
                break
            try:
                told = await self._ask(address, path, headers, body, record) or told
            except _NotHere:
                impossible.add(address)
            except _Refused:
                break
        streams = data.get("stream") is True
        session = conversation_in(headers) or record.conversation or None
        if told is None:
            namespace: NamespaceName = ("", record.salt) if record.salt else ""
            return RoutedPrompt(_pieces(record), False, streams, session, namespace)
        return RoutedPrompt(told.tokens, True, streams, session, told.namespace, frozenset(impossible))

    async def _ask(
        self, address: str, path: str, headers: Mapping[str, str], body: bytes, record: Record
    ) -> _Told | None:
        """What a server says that the prompt is; None: it does not say.

        Raises:
            _NotHere, _Refused: see there.
        """
        passed = {name: headers[name] for name in _PASSED_ON if name in headers}
        if path in _TOLD_PATHS and address not in self._others:
            answer = await self._post(f"{address}/tokenize{path}", passed, body)
            if answer is None:
                return None
            data = _json(answer)
            if answer.status_code == 200:
                return _told(data, data.get("namespace"))
            error = data.get("error")
            param = error.get("param") if isinstance(error, dict) else None
            if answer.status_code == 404 and param in _STORED:
                raise _NotHere
            if answer.status_code in (400, 401, 403, 413, 422) or param is not None:
                raise _Refused
            if answer.status_code not in (404, 405):
                return None
            self._others.add(address)
        asked = _tokenize_body(path, record.body)
        if asked is None:
            return None
        passed["content-type"] = "application/json"
        passed.pop("content-encoding", None)
        answer = await self._post(f"{address}/tokenize", passed, json.dumps(asked).encode())
        if answer is None or answer.status_code != 200:
            return None
        return _told(_json(answer), ["", record.salt] if record.salt else [""])

    async def _post(self, url: str, headers: Mapping[str, str], body: bytes) -> httpx.Response | None:
        try:
            return await self._client.post(url, content=body, headers=headers, timeout=_TOKENIZE_S)
        except httpx.HTTPError:
            return None


def _read(path: str, headers: Mapping[str, str], body: bytes) -> Record:
    return Exchange(path=path, request=body, request_headers=headers).record()


def _goes_on(data: Mapping[str, Any]) -> bool:
    """Whether a body goes on from what only some servers may keep."""
    thread = data.get("thread")
    is_continued = isinstance(thread, dict) and thread.get("type") != "create"
    return is_continued or isinstance(data.get("previous_response_id"), str)


def _pieces(record: Record) -> list[int]:
    text = "\0".join(f"{block.role}\1{block.kind}\1{block.text}" for block in record.blocks)
    piece = f"{record.model}\2{text}".encode("utf-8", "surrogatepass")
    return [
        int.from_bytes(piece[at : at + _UNIT_BYTES], "little") & 0x7FFF_FFFF
        for at in range(0, len(piece), _UNIT_BYTES)
    ]


def _tokenize_body(path: str, data: Mapping[str, Any]) -> dict[str, Any] | None:
    """What /tokenize is asked for; None: it can't be."""
    if path.endswith("/chat/completions"):
        return {name: data[name] for name in _TEMPLATE_FIELDS if data.get(name) is not None}
    if path.endswith("/completions") and isinstance(data.get("prompt"), str):
        return {name: data[name] for name in ("model", "prompt") if name in data}
    return None


def _json(answer: httpx.Response) -> Mapping[str, Any]:
    try:
        data = answer.json()
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _told(data: Mapping[str, Any], namespace: object) -> _Told | None:
    tokens = data.get("tokens")
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
        return None
    if not isinstance(namespace, list) or not namespace:
        return None
    return _Told(tokens, tuple(map(str, namespace)))


def reported_share(answer_tail: bytes) -> float | None:
    """How much of its prompt an answer says was cached; None: it does not say."""
    cached, prompt = _CACHED.findall(answer_tail[-_TAIL:]), _PROMPT.findall(answer_tail[-_TAIL:])
    if not cached or not prompt or not int(prompt[-1]):
        return None
    return min(1.0, int(cached[-1]) / int(prompt[-1]))
