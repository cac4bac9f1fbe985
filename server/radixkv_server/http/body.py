# SPDX-License-Identifier: Apache-2.0
"""BodyReader: read JSON bodies strictly, with a 400 for anything but plain, finite, shallow JSON.

The standard parser accepts NaN, overflowing floats and lone surrogates and recurses as deep as the input
says; each of these would surface later as a crash far from its cause.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError, ValidationInfo, model_validator
from starlette.requests import Request

from radixkv.text.segments import text_owner
from radixkv_server.concurrency import off_loop
from radixkv_server.dialect import Json
from radixkv_server.errors import ApiError, bad_request
from radixkv_server.http.fields import Ignored, Refused, Rule, asks_for_nothing, passed_on, rules_of
from radixkv_server.http.json_pieces import WINDOW, outline, parse_pieces
from radixkv_server.http.request_record import record_of

Model = TypeVar("Model", bound=BaseModel)

#: Bodies above this size are parsed one at a time.
HUGE_BYTES = 1024 * 1024

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _loads(text: str) -> Any:
    value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    if _SURROGATE_ESCAPE.search(text):  # looks for backslashes first, which base64 has none of
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("it holds half of a surrogate pair (\\ud800 to \\udfff alone)") from None
    return value


def parse_json(body: bytes, max_depth: int, max_parts: int = 2**63) -> Any:
    """Parse JSON text of any length, letting other threads run in between.

    Raises:
        ApiError: 400; the text is not UTF-8 or not JSON, nests deeper than `max_depth`, holds NaN,
            Infinity or a number beyond float64, or a lone surrogate. 413; it has more than `max_parts`
            arrays, objects and members of objects.
    """

    def refuse(reason: str) -> ApiError:
        return bad_request(f"The request body is not valid JSON: {reason}.", code="invalid_json")

    def has_few_parts() -> bool:
        return body.count(b"[") + body.count(b"{") + body.count(b":") <= min(max_depth, max_parts)

    try:
        if len(body) <= WINDOW and has_few_parts():
            return _loads(body.rstrip(b" \t\n\r").decode("utf-8"))
        shape = outline(body, max_depth=max_depth, max_parts=max_parts)
        if shape.depth > max_depth:
            raise refuse(f"it nests deeper than {max_depth} levels")
        if shape.num_parts > max_parts:
            message = f"The request body has more than {max_parts:,} arrays, objects and fields."
            raise ApiError(413, message, code="request_too_large")
        return parse_pieces(body, shape, _loads)
    except UnicodeDecodeError as error:
        raise refuse(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise refuse(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise refuse("it nests too deeply") from None
    except ValueError as error:
        raise refuse(str(error)[:200]) from None


class BodyReader:
    """Reader of JSON bodies: parses long ones in a thread, huge ones one at a time.

    Args:
        max_depth: deepest nesting of arrays and objects.
        max_parts: most arrays, objects and members of objects. Each is an object of Python's, which takes
            memory, and time in the garbage collector for all requests.
        takes_unknown: drop unknown fields with a warning instead of refusing them.
        images, image_urls: see `Ignored`.
    """

    def __init__(
        self,
        max_depth: int,
        max_parts: int,
        *,
        takes_unknown: bool = False,
        images: str = "auto",
        image_urls: bool = False,
    ) -> None:
        self._max_depth = max_depth
        self._max_parts = max_parts
        self._takes_unknown = takes_unknown
        self._images = images
        self._image_urls = image_urls
        self._one_at_a_time = asyncio.Lock()

    async def read(self, request: Request, model: type[Model], max_bytes: int) -> Model:
        """Read, parse and validate the body of `request`; its record notes ignored fields.

        Raises:
            ApiError: 415 without a JSON content type, or compressed (it could be a bomb), 413 with a body
                over `max_bytes`, and what `parse_json` or `model` refuses.
        """
        _check_media_type(request)
        body = await _read(request, max_bytes)
        parsed, ignored = await self.parse(body, lambda _: model, max_bytes)
        record = record_of(request.scope)
        record.ignored += ignored
        set_text_owner(record.tenant, parsed)
        return parsed

    def ignored(self) -> Ignored:
        """Return the context for the check of another body, with nothing ignored yet."""
        return Ignored(self._takes_unknown, self._images, self._image_urls)

    async def parse(
        self, body: bytes, choose: Callable[[Json], type[Model]], max_bytes: int
    ) -> tuple[Model, list[str]]:
        """Parse and validate a body by the model that `choose` finds for its object.

        Returns:
            The body, and the fields of it that are ignored.

        Raises:
            ApiError: see `read`.
        """
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if len(body) <= HUGE_BYTES:
            return await off_loop(lambda: self._parse(body, choose), num_bytes=len(body))
        async with self._one_at_a_time:
            return await off_loop(lambda: self._parse(body, choose))

    def _parse(self, body: bytes, choose: Callable[[Json], type[Model]]) -> tuple[Model, list[str]]:
        value = parse_json(body, self._max_depth, self._max_parts)
        if not isinstance(value, dict):
            raise bad_request("The request body must be a JSON object.", code="invalid_json")
        model, ignored = choose(value), self.ignored()
        try:
            return model.model_validate(value, context=ignored), ignored.describe(value)
        except ValidationError as error:
            raise validation_error(error, model) from None


def set_text_owner(tenant: str, body: BaseModel) -> None:
    """Set the owner of the request's texts: its tenant and the salt in its body.

    No owner finds the tokens of another, so that no time tells of another's texts.
    """
    text_owner.set((tenant, getattr(body, "cache_salt", None) or ""))


def _check_media_type(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        message = f"Content-Encoding {encoding[:40]!r} is not supported: send the body uncompressed."
        raise ApiError(415, message, code="unsupported_content_encoding")
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        message = f"Content-Type must be application/json, not {media_type[:80] or 'empty'}."
        raise ApiError(415, message, code="unsupported_media_type")


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    """Make the error of a body over the limit."""
    message = f"The request body is larger than {max_bytes:,} bytes."
    return ApiError(413, message, code="request_too_large")


def _param(location: tuple[int | str, ...]) -> str | None:
    """Convert `("messages", 0, "content")` to `messages[0].content`."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif "[" in part or part in ("str", "dict"):
            continue  # the branch of a union, not a field
        else:
            text += f".{part}" if text else part
    return text or None


def validation_error(error: ValidationError, model: type[BaseModel]) -> ApiError:
    """Reword the first complaint of pydantic for users."""
    first = error.errors(include_url=False, include_context=True)[0]
    param = _param(first["loc"])
    kind = first["type"]
    if kind == "missing":
        message = f"Missing required parameter: '{param}'."
        return bad_request(message, param=param, code="missing_required_parameter")
    if kind == "value_error":
        inner = first["ctx"]["error"]
        if isinstance(inner, FieldError):
            path = f"{param}.{inner.field}" if param else inner.field
            return bad_request(inner.message(path), param=path, code=inner.code)
        if isinstance(inner, ParamError):
            return bad_request(str(inner), param=inner.param or param, code=inner.code)
        return bad_request(f"Invalid value for '{param}': {inner}", param=param)
    given = repr(first.get("input"))
    shown = given if len(given) <= 80 else given[:77] + "..."
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return bad_request(f"Invalid value for '{param}': {first['msg']}; got {shown}.", param=param, code=code)


class _HashableFailFast(FailFast):
    def __hash__(self) -> int:
        return hash(type(self))


#: Stop at a list's first bad item: a body of a million bad items must not make a million errors. Pydantic's
#: own marker can't be hashed, which optional types need.
FAIL_FAST = _HashableFailFast()


class ParamError(ValueError):
    """A validator's complaint that names its own field, for checks that span several fields."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def unsupported(param: str, what: str) -> ParamError:
    """Make the error of a field that would change the meaning of the answer."""
    return ParamError(f"{param}: {what} is not supported by this server.", param, "unsupported_parameter")


#: Fields of other servers -> their names here, in the order of preference.
_OTHER_NAMES = {
    "enable_thinking": ("chat_template_kwargs.enable_thinking", "thinking", "think"),
    "thinking": ("chat_template_kwargs.enable_thinking", "reasoning", "think"),
    "reasoning": ("chat_template_kwargs.reasoning_effort", "thinking", "think"),
    "reasoning_effort": (
        "reasoning.effort",
        "chat_template_kwargs.reasoning_effort",
        "output_config.effort",
        "think",
    ),
    "thinking_budget": ("chat_template_kwargs.thinking_budget", "thinking.budget_tokens", "think"),
    "chat_template_kwargs": ("thinking", "think"),
    "add_generation_prompt": ("chat_template_kwargs",),
    "system": ("instructions", "messages"),
    "system_prompt": ("instructions", "system", "messages"),
    "prompt": ("messages", "input"),
    "input": ("messages", "prompt"),
    "repeat_penalty": ("repetition_penalty",),
    "stop_sequences": ("stop",),
    "response_format": ("text.format", "output_config.format"),
    "name": ("function.name", "custom.name"),
    "parameters": ("function.parameters", "input_schema"),
    "conversation_id": ("previous_response_id", "prompt_cache_key"),
    **dict.fromkeys(
        ("max_new_tokens", "max_length", "n_predict", "num_predict"), ("max_tokens", "max_output_tokens")
    ),
    **dict.fromkeys(("grammar", "regex", "json_schema", "guided_grammar"), ("structured_outputs",)),
}

#: Fields that take effect in a chat template; routes without them say where they work.
_OF_TEMPLATES = frozenset(
    {"enable_thinking", "thinking", "reasoning", "reasoning_effort"}
    | {"thinking_budget", "chat_template_kwargs"}
)


class FieldError(ValueError):
    """Complaint about an unknown or refused field, at any place of the body.

    Args:
        field: its name in its object, whose place pydantic knows.
        what: the unsupported feature; None: the field is unknown.
        known: names of fields that may have been meant.
    """

    def __init__(self, field: str, what: str | None, known: Iterable[str] = ()) -> None:
        super().__init__(field)
        self.field = field[:100]
        self._what = what
        self._known = known
        self.code = "unknown_parameter" if what is None else "unsupported_parameter"

    def message(self, path: str) -> str:
        """Return the message, with the field's path in the whole body."""
        if self._what is not None:
            return f"{path}: {self._what} is not supported by this server."
        close = difflib.get_close_matches(self.field, self._known, n=1)
        elsewhere = next(
            (ours for ours in _OTHER_NAMES.get(self.field, ()) if ours.split(".")[0] in self._known), None
        )
        of_template = self.field in _OF_TEMPLATES
        meant = elsewhere or (close[0] if close and not of_template else "")
        hint = f" Did you mean {meant}?" if meant else ""
        if of_template and "chat_template_kwargs" not in self._known:
            hint += " POST /v1/chat/completions takes chat_template_kwargs, the settings of a chat template."
        elif self.field == "extra_body":
            hint = " It is an SDK's argument, and no part of a body: its fields belong beside the others."
        return f"Unrecognized request argument supplied: {path}.{hint}"


class StrictModel(BaseModel):
    """A body or a part of one, without coercion: `"0.5"` is not a number, `true` is not 1.

    See `fields` for supported, refused and unknown fields. A subclass with `extra="allow"` also takes the
    names in its `PASSED_ON` unchecked; without `PASSED_ON`, any name.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        ignored = info.context if isinstance(info.context, Ignored) else Ignored()
        rules, others = rules_of(cls), passed_on(cls)
        left_out = []
        for name, given in value.items():
            rule = rules.get(name)
            if rule is not None:
                if given is not None and _check_field(value, name, rule, given, ignored):
                    left_out.append(name)
            elif others is not None and name not in others:
                if not ignored.takes_unknown:
                    raise FieldError(name, None, rules)
                ignored.note(value, name, is_unknown=True)
                left_out.append(name)
        return {name: given for name, given in value.items() if name not in left_out} if left_out else value


def _check_field(owner: dict[str, Any], name: str, rule: Rule, given: Any, ignored: Ignored) -> bool:
    """Return whether to drop a known field: its value asks for nothing, in a form foreign to its type."""
    marker = rule.marker
    if marker is None:
        return type(given) in rule.drops and asks_for_nothing(given)
    if asks_for_nothing(given):
        return True
    if given not in marker.usual:
        if isinstance(marker, Refused):
            raise FieldError(name, marker.what)
        ignored.note(owner, name)
    return False


def as_data(value: Any) -> Any:
    """Return the fields of messages and tools, including extra ones, as plain data. O(fields)."""
    if isinstance(value, BaseModel):
        return {name: as_data(item) for name, item in value}
    return [as_data(item) for item in value] if isinstance(value, list) and _has_models(value) else value


def _has_models(items: list[Any]) -> bool:
    return bool(items) and isinstance(items[0], BaseModel)
