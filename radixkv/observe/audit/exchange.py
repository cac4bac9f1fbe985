# SPDX-License-Identifier: Apache-2.0
"""Exchange: a request and its answer over HTTP, and their conversion into a record.

What identifies a caller (keys, cookies) is read for one thing alone, a digest that tells callers apart; it is
in no record and no message.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from radixkv.observe.audit.body_limits import DEFAULT_LIMITS, BodyLimits
from radixkv.observe.audit.record import DEFAULT_TTL, Block, Json, Record
from radixkv.observe.audit.request_bodies import NoRequest, blocks_of, dialect_of, ttl_of
from radixkv.observe.audit.response_bodies import (
    answer_of_events,
    answers_blocks,
    events_in,
    has_ended,
    usage_of,
)

#: Headers and query parameters that say whose a request is.
SECRET_HEADERS = ("authorization", "x-api-key", "api-key", "x-goog-api-key", "proxy-authorization", "cookie")
SECRET_PARAMETERS = ("key", "api_key", "api-key", "apikey", "token", "access_token", "subscription-key")
_CONVERSATION_HEADERS = (
    "x-claude-code-session-id",
    "session_id",
    "session-id",
    "x-session-id",
    "conversation_id",
)
_SESSION_OF_USER = re.compile(r"session[_\"': ]+([0-9a-zA-Z-]{8,})")
_MAX_NAME = 200  # characters
_DIGEST = re.compile(r"key-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its answer; names of headers in lower case.

    Attributes:
        path: path of the URL, with or without the parts before and after it.
        request, response: bodies as sent; they may be compressed if their headers say so.
        status: status of the answer; 0: there was none.
        time, seconds, first_seconds, key, place: see `Record`.
    """

    path: str
    request: bytes
    response: bytes = b""
    request_headers: Mapping[str, str] = field(default_factory=dict)
    response_headers: Mapping[str, str] = field(default_factory=dict)
    status: int = 200
    time: float | None = None
    seconds: float | None = None
    first_seconds: float | None = None
    key: str = ""
    place: str = ""

    def record(self, num_bytes: int = 0, limits: BodyLimits = DEFAULT_LIMITS) -> Record:
        """Return its record; `num_bytes` is its size in a log.

        Raises:
            NoRequest: the body is no request to a model, or above the limits; quotes nothing of it.
        """
        packed = self.request_headers.get("content-encoding", "")
        body = limits.parsed(limits.unpacked(self.request, packed))
        try:
            packed = self.response_headers.get("content-encoding", "")
            answer = read_answer(limits.unpacked(self.response, packed), limits)
        except NoRequest:
            answer = None  # the prompt is known all the same
        return make_record(
            body,
            answer,
            path=self.path,
            time=self.time,
            seconds=self.seconds,
            first_seconds=self.first_seconds,
            key=self.key or key_digest(self.request_headers, self.path),
            conversation=conversation_in(self.request_headers),
            place=self.place,
            failed=self.status >= 400,
            num_bytes=num_bytes or len(self.request) + len(self.response),
        )


def read_answer(answer: Any, limits: BodyLimits = DEFAULT_LIMITS) -> Any:
    """Return an answer as JSON data, or the text of its stream; None if there is no readable one."""
    if isinstance(answer, bytes):
        answer = answer.decode("utf-8", "replace")
    if isinstance(answer, str) and answer.lstrip()[:1] in ("{", "["):
        try:
            return limits.parsed(answer.encode("utf-8", "surrogatepass"))
        except NoRequest:
            return None
    return answer or None


@contextlib.contextmanager
def _of_known_kinds() -> Iterator[None]:
    """Turn errors from values of unexpected types into NoRequest."""
    try:
        yield
    except NoRequest:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        raise NoRequest("its fields are not of the kinds that requests and answers have") from None


@_of_known_kinds()
def make_record(
    body: Any,
    answer: Any = None,
    *,
    path: str = "",
    time: float | None = None,
    seconds: float | None = None,
    first_seconds: float | None = None,
    key: str = "",
    conversation: str = "",
    place: str = "",
    failed: bool = False,
    num_bytes: int = 0,
) -> Record:
    """Make the record of a request body with its answer, which may be any JSON data.

    Args:
        answer: JSON data, the text of a stream of server-sent events, a list of its events, or None.
        path: that it was sent to; empty: not known.

    Raises:
        NoRequest: the body is no request to a model.
    """
    if not isinstance(body, dict):
        raise NoRequest(f"expected a JSON object, found {type(body).__name__}")
    whole = answer if isinstance(answer, dict) else None
    dialect = dialect_of(body, path, whole)
    if whole is None and answer:
        events = list(events_in(answer)) if isinstance(answer, str) else answer
        events = [event for event in events if isinstance(event, dict)] if isinstance(events, list) else []
        whole = answer_of_events(events, dialect)
    whole = whole or {}
    blocks, tools = blocks_of(body, dialect)
    after = blocks[-1].message + 1 if blocks else 0
    answers = answers_blocks(whole, dialect, after)
    if dialect == "completions" and body.get("echo") and blocks:
        answers = [_without_echo(answer, blocks[0].text) for answer in answers]
    cache_options = body.get("prompt_cache_options")
    cache_options = cache_options if isinstance(cache_options, dict) else {}
    return Record(
        dialect=dialect,
        model=_name(body.get("model") or whole.get("model")),
        body=body,
        blocks=blocks,
        tools=tools,
        answer=answers[0] if answers else (),
        other_answers=tuple(answers[1:]),
        is_cut=not has_ended(whole, dialect),
        skips_cache=_wants_prompt_logprobs(body),
        response_id=str(whole.get("id") or ""),
        output=tuple(whole.get("output") or ()) if dialect == "responses" else (),
        usage=usage_of(whole),
        time=time,
        seconds=seconds,
        first_seconds=first_seconds,
        key=key,
        conversation=conversation or conversation_of(body),
        salt=_name(body.get("cache_salt")),
        parameters=_parameters(body, dialect, blocks),
        automatic_ttl=ttl_of(body) if dialect == "messages" else _option_ttl(cache_options),
        explicit_only=cache_options.get("mode") == "explicit",
        place=place,
        failed=failed or isinstance(whole.get("error"), dict),
        num_bytes=num_bytes,
    )


def _without_echo(answer: tuple[Block, ...], prompt: str) -> tuple[Block, ...]:
    """Return an answer without the prompt that `echo` puts in front."""
    return tuple(block._replace(text=block.text.removeprefix(prompt)) for block in answer)


def _wants_prompt_logprobs(body: Json) -> bool:
    """Return whether the request asks for logprobs of its prompt: by name, or of an answer that echoes it."""
    if body.get("prompt_logprobs") is not None:
        return True
    told = body.get("top_logprobs" if "messages" in body else "logprobs")
    return bool(body.get("echo")) and told is not None


def _name(value: Any) -> str:
    """Return a name to show with each request: a long one as its beginning and a digest."""
    name = str(value or "")
    if len(name) <= _MAX_NAME:
        return name
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{name[:_MAX_NAME]}... {digest}"


def _option_ttl(options: Mapping[str, Any]) -> float:
    ttl = ttl_of({"prompt_cache_breakpoint": options or True})
    return DEFAULT_TTL if ttl is None else ttl


def _parameters(body: Json, dialect: str, blocks: Sequence[Block]) -> str:
    names = ("tool_choice", "thinking") if dialect == "messages" else ("reasoning_effort", "reasoning")
    given = {name: body[name] for name in names if body.get(name) is not None}
    if dialect == "messages" and any(one.kind == "media" and "image" in one.text[:6] for one in blocks):
        given["images"] = True
    return json.dumps(given, sort_keys=True) if given else ""


def key_digest(headers: Mapping[str, str], path: str = "") -> str:
    """Return a digest that distinguishes callers without revealing their keys; empty: no key."""
    for name in SECRET_HEADERS:
        if name != "cookie" and headers.get(name):
            return secret_digest(headers[name])
    for pair in path.partition("?")[2].split("&"):
        name, _, value = pair.partition("=")
        if value and name.lower() in SECRET_PARAMETERS:
            return secret_digest(value)
    return ""


def secret_digest(secret: str) -> str:
    """Return a digest of 32 bits: enough to distinguish a log's callers, far too few to find a key by."""
    if _DIGEST.fullmatch(secret):
        return secret
    plain = secret.removeprefix("Bearer ").strip()
    return "key-" + hashlib.blake2b(plain.encode(), digest_size=4).hexdigest()


def conversation_in(headers: Mapping[str, str]) -> str:
    """Return the conversation that headers name; empty: none."""
    return next((headers[name][:200] for name in _CONVERSATION_HEADERS if headers.get(name)), "")


def conversation_of(body: Mapping[str, Any]) -> str:
    """Return the conversation that a body names: its session, or its prompts' cache key; empty: none."""
    metadata = body.get("metadata")
    if isinstance(metadata, dict):
        for name in ("session_id", "conversation_id", "thread_id", "trace_id"):
            if isinstance(metadata.get(name), str):
                return metadata[name][:200]
        found = _SESSION_OF_USER.search(str(metadata.get("user_id") or ""))
        if found:
            return found[1][:200]
    conversation = body.get("conversation")
    if isinstance(conversation, dict):
        conversation = conversation.get("id")
    named = conversation or body.get("litellm_session_id")
    return named[:200] if isinstance(named, str) else ""
