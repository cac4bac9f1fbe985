# SPDX-License-Identifier: Apache-2.0
"""RoutedPrompt: a request's prompt in units that equal prompts share, token ids where possible.

Servers that publish events render and tokenise the prompt themselves, so that the units are theirs:

    radixkv         POST /tokenize/v1/... takes the unchanged body of that route, and returns the tokens and
                    the namespace in which the cache looks them up: tenant of the request's key, and salt
    vLLM, SGLang    POST /tokenize takes chats, and completions of a single text

Otherwise units are pieces of the text, which suffice to find a conversation's earlier upstream.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import httpx
from pydantic_core import from_json

from radixkv.cache.keys import TOKEN_BYTES, EncodedTokens, NamespaceName, TokenIds, encode_tokens
from radixkv.cluster.routing.prompt_blocks import PromptBlocks
from radixkv.errors import InvalidRequestError
from radixkv.observe.audit.body_limits import BodyLimits
from radixkv.observe.audit.exchange import Exchange, conversation_in
from radixkv.observe.audit.record import Record

Result = TypeVar("Result")

_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d+)')
_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d+)')
_TAIL = 64 * 1024  # of an answer, where its usage is
_TOKENIZE_S = 2.0
#: Beyond these, the same in all encodings, a request is routed unread: by its session and by load.
READ_LIMITS = BodyLimits(max_bytes=8 << 20, max_pieces=1 << 17)
_READ_S = 0.5  # for reading a body, waiting for a thread included
_READERS = 2
_SHORT_BYTES = 16 * 1024  # longer bodies, and packed ones, are read on a thread
#: Routes whose prompts a radixkv server renders.
_RENDERED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
# Fields that name stored objects: a 404 about one means that another server may have it.
_STORED = frozenset({"previous_response_id", "thread", "input"})
_PASSED_ON = ("authorization", "x-api-key", "content-type", "content-encoding")
# Fields of a chat that change the prompt.
_TEMPLATE_FIELDS = (
    "model",
    "messages",
    "tools",
    "chat_template_kwargs",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
)
_NUMBERED = re.compile(r"\d")
_SEVEN_BITS = bytes(byte & 0x7F for byte in range(256))


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """Prompt of a request, for the choice of an upstream.

    Attributes:
        blocks: blocks of token ids, or of pieces of the text.
        is_exact: True if the units are token ids.
        num_units: number of units; 0: not a request to a model.
        streams: True if the answer is streamed.
        session: key of the request's conversation; None: not known.
        goes_on_from: names of stored objects that it continues: responses, conversations.
        impossible: addresses of servers that do not store them.
    """

    blocks: PromptBlocks
    is_exact: bool = False
    num_units: int = 0
    streams: bool = False
    session: str | None = None
    goes_on_from: tuple[str, ...] = ()
    impossible: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _ServerTokens:
    tokens: EncodedTokens
    namespace: NamespaceName


class _Refused(Exception):
    """Every upstream would refuse the request."""


class _NotHere(Exception):
    """The server does not store the conversation that the request continues."""


class PromptReader:
    """Reader of requests' prompts, with the help of servers that tokenise them.

    Args:
        client: sends requests to these servers.
        make_blocks: makes blocks of token ids in a namespace.
        learned_block: units of a block, where pieces of texts are learned; 0: no pieces are.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        make_blocks: Callable[[TokenIds, NamespaceName], PromptBlocks],
        learned_block: int,
    ) -> None:
        self._client = client
        self._make_blocks = make_blocks
        self._learned_block = learned_block
        self._nothing = make_blocks([0], "")
        self._others: set[str] = set()  # addresses of servers that are not ours
        self._threads = ThreadPoolExecutor(_READERS, thread_name_prefix="radixkv-proxy-reader")

    async def _work(self, size: int, work: Callable[[], Result]) -> Result:
        """Return the result of `work`, run on the event loop if its input of `size` bytes is short.

        Raises:
            TimeoutError: it took too long; a thread may still be busy with it.
        """
        if size <= _SHORT_BYTES:
            return work()
        working = asyncio.get_running_loop().run_in_executor(self._threads, work)
        return await asyncio.wait_for(working, _READ_S)

    def close(self) -> None:
        """Stop taking work."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def forget(self, address: str) -> None:
        """Forget the capabilities of a server, which may have been replaced."""
        self._others.discard(address)

    async def read(
        self, path: str, headers: Mapping[str, str], body: bytes | bytearray, tokenizers: Sequence[str]
    ) -> RoutedPrompt:
        """Return the prompt of a request.

        Args:
            headers: names in lower case -> values.
            tokenizers: base addresses of servers that tokenise prompts; the first answer is used.
        """
        named, session = _named_in(path), conversation_in(headers) or None
        size = READ_LIMITS.max_bytes if headers.get("content-encoding") else len(body)
        tokens: _ServerTokens | None = None
        impossible = set[str]()
        try:
            if not 0 < len(body) <= READ_LIMITS.max_bytes:
                raise ValueError("nothing to read, or too much")
            record = await self._work(size, partial(_read, path, headers, bytes(body)))
            named += _goes_on_from(record.body)
            for address in tokenizers:
                if tokens is not None and not named:
                    break
                try:
                    tokens = await self._ask(address, path, headers, bytes(body), record, size) or tokens
                except _NotHere:
                    impossible.add(address)
                except _Refused:
                    break
            blocks = await self._work(size, partial(self._blocks, record, tokens))
        except (ValueError, RecursionError, TimeoutError):
            return RoutedPrompt(self._nothing, session=session, goes_on_from=named)
        return RoutedPrompt(
            blocks,
            tokens is not None,
            blocks.num_tokens,
            record.body.get("stream") is True,
            session or record.conversation or None,
            named,
            frozenset(impossible if tokens is not None else ()),  # stored nowhere: any server may say so
        )

    def _blocks(self, record: Record, tokens: _ServerTokens | None) -> PromptBlocks:
        if tokens is not None:
            return self._make_blocks(tokens.tokens, tokens.namespace)
        namespace: NamespaceName = ("", record.salt) if record.salt else ""
        blocks = self._make_blocks(_pieces(record), namespace)
        if self._learned_block:
            blocks.own_keys(self._learned_block)  # on this thread, not on the event loop
        return blocks

    async def _ask(
        self, address: str, path: str, headers: Mapping[str, str], body: bytes, record: Record, size: int
    ) -> _ServerTokens | None:
        """Return the prompt in a server's tokens; None if it does not tell them.

        Raises:
            _NotHere, _Refused: see there.
        """
        passed = {name: headers[name] for name in _PASSED_ON if name in headers}
        if path in _RENDERED_PATHS and address not in self._others:
            answer = await self._post(f"{address}/tokenize{path}", passed, body)
            if answer is None:
                return None
            data = await self._work(len(answer.content), partial(_json, answer))
            if answer.status_code == 200:
                make = partial(_server_tokens, data, data.get("namespace"))
                return await self._work(len(answer.content), make)
            error = data.get("error")
            param = error.get("param") if isinstance(error, dict) else None
            if answer.status_code == 404 and param in _STORED:
                raise _NotHere
            if answer.status_code in (400, 401, 403, 413, 422) or param is not None:
                raise _Refused
            if answer.status_code not in (404, 405):
                return None
            self._others.add(address)
        asked = await self._work(size, partial(_tokenize_body, path, record.body))
        if asked is None:
            return None
        passed["content-type"] = "application/json"
        passed.pop("content-encoding", None)
        answer = await self._post(f"{address}/tokenize", passed, asked)
        if answer is None or answer.status_code != 200:
            return None
        namespace = ["", record.salt] if record.salt else [""]
        make = partial(_answered_tokens, answer, namespace)
        return await self._work(len(answer.content), make)

    async def _post(self, url: str, headers: Mapping[str, str], body: bytes) -> httpx.Response | None:
        try:
            return await self._client.post(url, content=body, headers=headers, timeout=_TOKENIZE_S)
        except (httpx.HTTPError, RuntimeError):  # the latter: the client is being closed
            return None


def _read(path: str, headers: Mapping[str, str], body: bytes) -> Record:
    return Exchange(path=path, request=body, request_headers=headers).record(limits=READ_LIMITS)


def _named_in(path: str) -> tuple[str, ...]:
    """Return names of stored objects in a path: `/v1/responses/NAME/...`."""
    return tuple(part for part in path.split("/")[3:] if _NUMBERED.search(part))


def _goes_on_from(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Return names of stored objects that a body continues."""
    found = [data.get("previous_response_id")]
    for name in ("thread", "conversation"):
        value = data.get(name)
        if isinstance(value, dict):
            value = value.get("id", "") if value.get("type") != "create" else None
        found.append(value)
    items = data.get("input")
    objects = [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    found += [item.get("id") for item in objects if item.get("type") == "item_reference"]
    return tuple(name for name in found if isinstance(name, str))


def _pieces(record: Record) -> EncodedTokens:
    text = "\0".join(f"{block.role}\1{block.kind}\1{block.text}" for block in record.blocks)
    data = f"{record.model}\2{text}".encode("utf-8", "surrogatepass")
    # Of each byte seven bits, so that all are token ids: as good for telling texts apart.
    return EncodedTokens(data.translate(_SEVEN_BITS) + bytes(-len(data) % TOKEN_BYTES))


def _tokenize_body(path: str, data: Mapping[str, Any]) -> bytes | None:
    """Return the body that asks /tokenize for a prompt; None if it can't be asked."""
    if path.endswith("/chat/completions"):
        asked = {name: data[name] for name in _TEMPLATE_FIELDS if data.get(name) is not None}
    elif path.endswith("/completions") and isinstance(data.get("prompt"), str):
        asked = {name: data[name] for name in ("model", "prompt") if name in data}
    else:
        return None
    return json.dumps(asked).encode()


def _json(answer: httpx.Response) -> Mapping[str, Any]:
    try:
        data = from_json(answer.content)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _answered_tokens(answer: httpx.Response, namespace: object) -> _ServerTokens | None:
    return _server_tokens(_json(answer), namespace)


def _server_tokens(data: Mapping[str, Any], namespace: object) -> _ServerTokens | None:
    tokens = data.get("tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(namespace, list) or not namespace:
        return None
    try:
        return _ServerTokens(EncodedTokens(encode_tokens(tokens)), tuple(map(str, namespace)))
    except InvalidRequestError:
        return None


def reported_share(answer_tail: bytes) -> float | None:
    """Return the cached share of the prompt that an answer reports, or None."""
    cached, prompt = _CACHED.findall(answer_tail[-_TAIL:]), _PROMPT.findall(answer_tail[-_TAIL:])
    if not cached or not prompt or not int(prompt[-1]):
        return None
    return min(1.0, int(cached[-1]) / int(prompt[-1]))
