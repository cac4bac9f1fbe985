# SPDX-License-Identifier: Apache-2.0
"""Reader of logged objects: bodies, requests with answers, LiteLLM's payloads, HAR entries."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeGuard
from urllib.parse import urlsplit

from radixkv.observe.audit.body_limits import DEFAULT_LIMITS, BodyLimits
from radixkv.observe.audit.exchange import (
    Exchange,
    conversation_in,
    key_digest,
    make_record,
    read_answer,
    secret_digest,
)
from radixkv.observe.audit.record import Json, Record
from radixkv.observe.audit.request_bodies import NoRequest

_TIMES = ("time", "timestamp", "ts", "startTime", "start_time", "startedDateTime", "created_at")
_MILLISECONDS = 1e11  # since 1970 it has been more than that many milliseconds, and never as many seconds
_MAX_NUMBER = 1e18
_CALLS: dict[str, str] = {
    "completion": "/chat/completions",
    "acompletion": "/chat/completions",
    "anthropic_messages": "/v1/messages",
    "responses": "/v1/responses",
    "aresponses": "/v1/responses",
    "text_completion": "/v1/completions",
    "atext_completion": "/v1/completions",
}


class NotAModel(NoRequest):
    """A HAR entry is a request to something other than a model, which is no error."""


def record_in(value: Any, place: str, num_bytes: int, limits: BodyLimits = DEFAULT_LIMITS) -> Record:
    """Return the record in a logged object.

    Raises:
        NotAModel: the request is not to a model.
        NoRequest: there is no request in it; the message quotes none of its text.
    """
    if not isinstance(value, dict):
        raise NoRequest(f"expected a JSON object, found {type(value).__name__}")
    if isinstance(value.get("standard_logging_object"), dict):
        value = value["standard_logging_object"]
    if "startedDateTime" in value:
        return _har(value, place, num_bytes, limits)
    if "call_type" in value and "messages" in value:
        return _litellm(value, place, num_bytes, limits)
    if "request" in value or isinstance(value.get("body"), dict | str):
        return _pair(value, place, num_bytes, limits)
    return make_record(value, time=_first_time(value), place=place, num_bytes=num_bytes)


def _pair(value: Json, place: str, num_bytes: int, limits: BodyLimits) -> Record:
    body = value.get("request", value.get("body"))
    headers = _headers(value.get("headers") or value.get("request_headers"))
    if isinstance(body, dict) and isinstance(body.get("body"), dict | str):  # an HTTP request, not a body
        headers = headers or _headers(body.get("headers"))
        value = {**value, **{name: body[name] for name in ("path", "url") if name in body}}
        body = body["body"]
    if isinstance(body, str):
        body = _parsed(body, limits)
    answer = value.get("response") or value.get("events")
    status = value.get("status") or value.get("status_code")
    if isinstance(answer, dict) and isinstance(answer.get("body"), dict | str | list):
        status = answer.get("status") or answer.get("status_code") or status
        answer = answer["body"]
    path = str(value.get("path") or value.get("url") or "")
    return make_record(
        body,
        read_answer(answer, limits),
        path=path,
        time=_first_time(value),
        seconds=_seconds(value, ("seconds", "duration", "duration_s", "elapsed", "latency")),
        first_seconds=_seconds(value, ("first_seconds", "first_byte_s", "ttft", "time_to_first_token")),
        key=secret_digest(key) if (key := _name(value.get("key"))) else key_digest(headers, path),
        conversation=_name(value.get("conversation") or value.get("session")) or conversation_in(headers),
        place=place,
        failed=isinstance(status, int) and status >= 400,
        num_bytes=num_bytes,
    )


def _litellm(value: Json, place: str, num_bytes: int, limits: BodyLimits) -> Record:
    parameters = value.get("model_parameters")
    metadata = value.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    body: Json = {**(parameters if isinstance(parameters, dict) else {}), "model": value.get("model")}
    path = _CALLS.get(str(value["call_type"]), "")
    sent = value["messages"]
    if isinstance(sent, str) and sent.lstrip()[:1] in ("[", "{"):
        sent = _parsed(sent, limits)
    if isinstance(sent, dict):
        body.update(sent)
    elif path.endswith("/responses"):
        body["input"] = sent
    elif path.endswith("/v1/completions"):
        body["prompt"] = _only_content(sent)
    else:
        body["messages"] = sent
    answer = read_answer(value.get("response"), limits)
    if isinstance(answer, dict) and isinstance(answer.get("id"), str):
        answer = {**answer, "id": _own_id(answer["id"])}
    if isinstance(body.get("previous_response_id"), str):
        body["previous_response_id"] = _own_id(body["previous_response_id"])
    usage = metadata.get("usage_object")
    if not isinstance(usage, dict) and isinstance(value.get("prompt_tokens"), int):
        usage = {"prompt_tokens": value["prompt_tokens"], "completion_tokens": value.get("completion_tokens")}
    if not (isinstance(answer, dict) and isinstance(answer.get("usage"), dict)) and usage:
        answer = {**answer, "usage": usage} if isinstance(answer, dict) else {"usage": usage}
    began, first, ended = (_time(value.get(name)) for name in ("startTime", "completionStartTime", "endTime"))
    return make_record(
        body,
        answer,
        path=path,
        time=began,
        seconds=None if began is None or ended is None else max(0.0, ended - began),
        first_seconds=None if began is None or first is None else max(0.0, first - began),
        key=secret_digest(key) if (key := _name(metadata.get("user_api_key_hash"))) else "",
        conversation=_name(value.get("session_id")),
        place=place,
        failed=value.get("status") == "failure",
        num_bytes=num_bytes,
    )


def _parsed(text: str, limits: BodyLimits) -> Any:
    return limits.parsed(text.encode("utf-8", "surrogatepass"))


def _only_content(sent: Any) -> Any:
    """Return a completion's prompt, which LiteLLM logs as the only message of a chat."""
    only = sent[0] if isinstance(sent, list) and len(sent) == 1 else None
    return only.get("content") if isinstance(only, dict) else sent


def _own_id(name: str) -> str:
    """Return the API's own id of an answer, unpacked from the id in which LiteLLM adds its routing data."""
    try:
        packed = base64.b64decode(name.removeprefix("resp_"), validate=True).decode()
    except ValueError:
        return name
    _, found, own = packed.partition("response_id:")
    return own.partition(";")[0] if found and packed.startswith("litellm:") else name


def _har(entry: Json, place: str, num_bytes: int, limits: BodyLimits) -> Record:
    request, response = entry.get("request"), entry.get("response")
    if not isinstance(request, dict):
        raise NotAModel("a page, not a request")
    response = response if isinstance(response, dict) else {}
    url = str(request.get("url") or "")
    posted = request.get("postData")
    if request.get("method") != "POST" or not isinstance(posted, dict):
        raise NotAModel("no POST")
    headers = _headers(request.get("headers"))
    path = urlsplit(url)
    try:
        sent = _har_text(posted)
        if not sent:
            raise NoRequest("the recorder left its body out; record bodies, too")
        content = response.get("content")
        got = _har_text(content) if isinstance(content, dict) else b""
        timings = entry.get("timings")
        timings = timings if isinstance(timings, dict) else {}
        return Exchange(
            path=f"{path.path}?{path.query}",
            request=sent,
            response=got,
            request_headers=headers,
            # A HAR's content is without the compression that it was sent with, whatever the headers say;
            # where a recorder left it in, its first bytes tell.
            response_headers={"content-encoding": "gzip"} if got[:2] == b"\x1f\x8b" else {},
            status=status if isinstance(status := response.get("status"), int) else 0,
            time=_time(entry.get("startedDateTime")),
            seconds=_milliseconds(entry.get("time")),
            first_seconds=_milliseconds(timings.get("wait")),
            place=place,
        ).record(num_bytes, limits)
    except NoRequest:
        if not path.path.rstrip("/").endswith(("/messages", "/completions", "/responses")):
            raise NotAModel("not sent to a model") from None
        raise


def _har_text(holder: Mapping[str, Any]) -> bytes:
    text = holder.get("text")
    if not isinstance(text, str):
        return b""
    if holder.get("encoding") == "base64":
        try:
            return base64.b64decode(text, validate=False)
        except (binascii.Error, ValueError):
            raise NoRequest("a body that is not base64, as it says") from None
    return text.encode("utf-8", "surrogatepass")


def _headers(given: Any) -> dict[str, str]:
    """Return headers by lower-case name, from a HAR's list or from an object."""
    if isinstance(given, Mapping):
        return {str(name).lower(): str(value) for name, value in given.items()}
    if not isinstance(given, Sequence) or isinstance(given, str):
        return {}
    pairs = [(one.get("name"), one.get("value")) for one in given if isinstance(one, dict)]
    return {str(name).lower(): str(value) for name, value in pairs if name}


def _name(value: Any) -> str:
    return str(value)[:200] if isinstance(value, str | int) and not isinstance(value, bool) else ""


def _first_time(value: Mapping[str, Any]) -> float | None:
    return next((found for name in _TIMES if (found := _time(value.get(name))) is not None), None)


def _time(value: Any) -> float | None:
    """Return seconds since 1970, or of any other clock; also from milliseconds and the ISO form."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            try:
                at = datetime.fromisoformat(value)
            except ValueError:
                return None
            return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
    if not _is_number(value):
        return None
    return value / 1000 if value > _MILLISECONDS else float(value)


def _is_number(value: Any) -> TypeGuard[int | float]:
    """Tell whether a value is a plausible time in seconds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_NUMBER


def _seconds(value: Mapping[str, Any], names: Sequence[str]) -> float | None:
    for name in names:
        for key, factor in ((name, 1.0), (f"{name}_ms", 1e-3)):
            found = value.get(key)
            if _is_number(found) and found >= 0:
                return found * factor
    return None


def _milliseconds(value: Any) -> float | None:
    return value / 1000 if _is_number(value) and value >= 0 else None
