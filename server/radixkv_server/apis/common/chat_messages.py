# SPDX-License-Identifier: Apache-2.0
"""Messages of a chat: the clients' form, the plain form for chat templates, and OpenAI's cache breakpoints.

Content is a text, or a list of parts that are texts each.

The cache finds every prefix, wherever it ends. A breakpoint therefore changes no match while there is room;
it protects the prompt up to there from eviction for at least the breakpoint's TTL.

    mode        breakpoints that are written             the rest of the request
    implicit    the end of the prompt, the latest 3      stays cached until evicted
                on parts
    explicit    the latest 4 on parts, perhaps none      is dropped with the answer, unless other
                                                         requests used it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from radixkv.scheduling.request import Request
from radixkv.text.json_text import read_json_text
from radixkv_server.apis.common.fields import TEXT_OR_LIST, CacheFields
from radixkv_server.chats.breakpoints import MAX_BREAKPOINTS, Breakpoint, CacheControl, prefix_pins
from radixkv_server.chats.call_memory import Recall
from radixkv_server.chats.chat import Chat
from radixkv_server.context import ServerContext
from radixkv_server.errors import bad_request
from radixkv_server.generation.request import encoded_prompt, pin_whole
from radixkv_server.http.body import FAIL_FAST, ParamError, StrictModel
from radixkv_server.http.fields import NoOp, Refused, WithoutEffect

Media = Annotated[Any, Refused("all but text")]
_OfAnswer = Annotated[Any, WithoutEffect("it is of an answer's text, which is there")]


class PromptCacheBreakpoint(StrictModel):
    """Breakpoint: the prompt up to the end of this part stays cached for `ttl`, or the request's time."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class TextPart(StrictModel):
    """Text part; the text is in `refusal` for the type `refusal`, else in `text`."""

    KINDS: ClassVar[Sequence[str]]

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: _OfAnswer = None
    logprobs: _OfAnswer = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None
    image_url: Media = None
    input_audio: Media = None

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(kind := value.get("type"), str):
            if kind not in cls.KINDS:
                raise ParamError(
                    f"content of type {kind[:40]!r} is not supported: this server takes text, and fetches "
                    "nothing.",
                    code="unsupported_content",
                )
            if not isinstance(value.get("refusal" if kind == "refusal" else "text"), str):
                raise ParamError(f"content of type {kind!r} needs its text.")
        return value

    @property
    def plain_text(self) -> str:
        """Text of the part."""
        return (self.refusal if self.type == "refusal" else self.text) or ""


def joined(content: str | Sequence[TextPart]) -> str:
    """Return a text, or parts joined by line breaks."""
    return content if isinstance(content, str) else "\n".join(part.plain_text for part in content)


_ROLES = {"developer": "system", "function": "tool"}
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class ContentPart(TextPart):
    KINDS: ClassVar = ("text", "refusal")

    type: Literal["text", "refusal"]
    cache_control: CacheControl | None = None
    id: NoOp = None
    file: Media = None


class CalledFunction(StrictModel):
    name: str
    arguments: str


class CalledCustom(StrictModel):
    name: str
    input: str


class ChatToolCall(StrictModel):
    id: str | None = None
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    index: Annotated[Any, WithoutEffect("calls are in the order of the list")] = None
    cache_control: CacheControl | None = None
    extra_content: Annotated[Any, WithoutEffect("it is another provider's")] = None
    provider_specific_fields: Annotated[Any, WithoutEffect("they are another provider's")] = None

    @model_validator(mode="after")
    def _called(self) -> ChatToolCall:
        other = "custom" if self.type == "function" else "function"
        if getattr(self, self.type) is None or getattr(self, other) is not None:
            raise ParamError(f"a tool call of type {self.type!r} needs {self.type!r}, and no {other!r}.")
        return self

    def for_template(self, recall: Recall) -> dict[str, Any]:
        """Return the call as templates expect it, its arguments as an object.

        Raises:
            ApiError: 400; the arguments are not JSON.
        """
        plain: dict[str, Any] = {} if self.id is None else {"id": self.id}
        if self.custom is not None:
            arguments = recall(self.id or "", {"input": self.custom.input})
            return {
                **plain,
                "type": "function",
                "function": {"name": self.custom.name, "arguments": arguments},
            }
        assert self.function is not None
        name = self.function.name
        try:
            arguments = read_json_text(self.function.arguments or "{}", may_be_cut=True)
        except (ValueError, RecursionError):
            message = f"The arguments of the tool call {name[:64]!r} are not JSON."
            raise bad_request(message, param="messages") from None
        return {**plain, "type": "function", "function": {"name": name, "arguments": arguments}}


class ChatMessage(StrictModel):
    """Message of a chat. Undeclared fields (`reasoning_content`, ...) reach the template unchanged."""

    model_config = ConfigDict(extra="allow")
    FOR_TEMPLATES: ClassVar = frozenset(
        {"refusal", "function_call", "reasoning_content", "reasoning", "thinking"}
    )

    role: Role
    content: Annotated[str | Annotated[list[ContentPart], FAIL_FAST], TEXT_OR_LIST] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ChatToolCall], Field(max_length=1024), FAIL_FAST] | None = None
    tool_call_id: str | None = None
    cache_control: CacheControl | None = None
    audio: Annotated[Any, Refused("an answer as sound")] = None

    @model_validator(mode="before")
    @classmethod
    def _content_shape(cls, value: Any) -> Any:
        if isinstance(value, dict):
            content = value.get("content")
            if content is not None and not isinstance(content, str | list):
                raise ParamError("content must be a string, a list of parts, or null.", code="invalid_type")
            if value.get("function_call") and not value.get("tool_calls"):
                return {**value, "tool_calls": [{"function": value["function_call"]}]}
        return value

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        extra = self.model_extra or {}
        may_be_null = self.role in ("tool", "function") or (
            self.role == "assistant"
            and (self.tool_calls is not None or any(extra.get(name) for name in self.FOR_TEMPLATES))
        )
        if self.content is None and not may_be_null:
            raise ParamError(
                "content may be null only in the result of a tool, and in an assistant message with "
                "tool_calls, reasoning or a refusal."
            )
        return self

    def for_template(self, recall: Recall) -> dict[str, Any]:
        """Return the message as templates expect it.

        Text parts are joined by a newline; `developer` is OpenAI's newer name of `system`; the arguments
        of tool calls, JSON text in the API, become objects; a refusal is content; calls and results in the
        older form (`function_call`, role `function`) are tools'.

        Args:
            recall: arguments of calls of custom tools, as the model wrote them where that is known.

        Raises:
            ApiError: 400; the arguments of a tool call are not JSON.
        """
        extra = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        extra.pop("function_call", None)
        refusal = extra.pop("refusal", "")
        message: dict[str, Any] = {
            "role": _ROLES.get(self.role, self.role),
            "content": "\n".join(filter(None, (joined(self.content or ""), refusal))),
        }
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [call.for_template(recall) for call in self.tool_calls]
        message.update(extra)
        return message


def _as_given(call_id: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    return arguments


def template_messages(messages: Sequence[ChatMessage], recall: Recall = _as_given) -> list[dict[str, Any]]:
    """Return all messages in the form that templates expect."""
    plain = [message.for_template(recall) for message in messages]
    for at, (message, shown) in enumerate(zip(messages, plain, strict=True)):
        if (message.model_extra or {}).get("function_call"):
            shown["tool_calls"] = [{"id": f"call_{at}", **call} for call in shown["tool_calls"]]
        elif (
            message.role == "function" and "tool_call_id" not in shown and at and messages[at - 1].tool_calls
        ):
            shown["tool_call_id"] = plain[at - 1]["tool_calls"][0].get("id")
    return plain


def breakpoints_in(messages: Sequence[ChatMessage]) -> list[tuple[CacheControl, Breakpoint]]:
    """Return the breakpoints of messages, and their places in `template_messages`. O(parts)."""
    found = []
    for index, message in enumerate(messages):
        chars = -1
        for part in message.content if isinstance(message.content, list) else ():
            chars += 1 + len(part.plain_text)
            if part.cache_control is not None:
                breakpoint = Breakpoint(part.cache_control.seconds, message=index, chars=chars)
                found.append((part.cache_control, breakpoint))
        for at, called in enumerate(message.tool_calls or ()):
            if called.cache_control is not None:
                place = Breakpoint(called.cache_control.seconds, message=index, call=at)
                found.append((called.cache_control, place))
        control = message.cache_control
        if control is not None:
            chars = len(message.content or "") if not isinstance(message.content, list) else chars
            call = len(message.tool_calls) - 1 if message.tool_calls else None
            found.append(
                (control, Breakpoint(control.seconds, message=index, chars=max(0, chars), call=call))
            )
    return found


@dataclass(frozen=True, slots=True)
class MarkedPart:
    """A part with a `prompt_cache_breakpoint`.

    Args:
        ttl: of the breakpoint, as the client wrote it; None: the request's.
        chars: where the part ends in the text of its message.
    """

    ttl: str | None
    chars: int


def marked_parts(content: str | Sequence[TextPart] | None) -> Iterator[MarkedPart]:
    """Return the parts of a message that end with a breakpoint, in the text of `content.joined`."""
    chars = -1
    for part in content if not isinstance(content, str) and content else ():
        chars += 1 + len(part.plain_text)
        if part.prompt_cache_breakpoint is not None:
            yield MarkedPart(part.prompt_cache_breakpoint.ttl, chars)


async def with_cache_controls(
    context: ServerContext,
    body: CacheFields,
    chat: Chat,
    request: Request,
    marked: Sequence[tuple[int, MarkedPart]],
    others: Sequence[Breakpoint] = (),
) -> None:
    """Set a request's pins from its breakpoints, and the number of its tokens that may stay cached.

    Args:
        chat: the chat from which the request's prompt was rendered.
        marked: parts with breakpoints, each with the index of its message in the chat, in their order.
        others: breakpoints in other forms than OpenAI's.
    """
    breakpoints = [
        *others,
        *(
            Breakpoint(body.breakpoint_s(part.ttl), message=message, chars=part.chars)
            for message, part in marked[-(MAX_BREAKPOINTS - (not body.is_explicit)) :]
        ),
    ]
    if breakpoints:
        request.pins = await prefix_pins(context, chat, breakpoints, encoded_prompt(request))
    if body.is_explicit:
        request.keep_tokens = max((pin.num_tokens for pin in request.pins), default=0)
    else:
        pin_whole(request, body.breakpoint_s() if marked else body.pinned_s)
