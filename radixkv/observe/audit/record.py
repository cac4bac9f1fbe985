# SPDX-License-Identifier: Apache-2.0
"""Record: a request to a model with its answer, in one form for all APIs and all kinds of logs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from radixkv.observe.prompt_parts import MessageParts, PromptParts

Json = dict[str, Any]
Dialect = Literal["chat", "responses", "messages", "completions"]
BlockKind = Literal["tool", "text", "thinking", "call", "media"]

#: Of a breakpoint that says nothing of its time.
DEFAULT_TTL = 0.0


class Block(NamedTuple):
    """Piece of a prompt, in the order in which providers cache it: tools, then system, then messages.

    Attributes:
        text: text as the client sent it; JSON for a tool, JSON text of the arguments for a call.
        role: `tool` for results of tools; empty for tool definitions and prompts without messages.
        message: index of its message; -1: a tool.
        name: name of the tool, or of the called function.
        ttl: time to live in seconds of a breakpoint at its end, or `DEFAULT_TTL`; None: no breakpoint.
        call_id: id of the call that it is, or that it is a result of; empty: none.
        image_tokens: estimated tokens of an image, for which `text` stands; 0: it is none, or not known.
    """

    text: str
    role: str
    kind: BlockKind
    message: int
    name: str = ""
    ttl: float | None = None
    call_id: str = ""
    image_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReportedUsage:
    """Token counts that the answer reports; None: not reported.

    Attributes:
        prompt: of the whole prompt, those from the cache and those written to it included.
        cached: of these, read from the cache.
        written: of these, written to it.
        output: of the answer.
    """

    prompt: int | None = None
    cached: int | None = None
    written: int | None = None
    output: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """Recorded request.

    Attributes:
        dialect: OpenAI's chat completions, responses or completions, or Anthropic's messages.
        body: body as sent.
        earlier: items of the stored conversation that it continues, in the Responses API.
        blocks: blocks of the prompt.
        answer, other_answers: blocks of the assistant's answer, and of further samples; empty: not recorded.
        response_id: id of the answer; empty: not recorded. output: its items, in the Responses API.
        time: time of its beginning, in seconds of any clock; None: not recorded.
        seconds: time to the answer's end; first_seconds: time to its beginning. None: not recorded.
        key: digest of the caller's key, never the key itself. Empty: not recorded.
        conversation: the client's name for the conversation; empty: none.
        salt: requests with different salts share nothing, as with `cache_salt`.
        parameters: other parameters, as text, that must be equal for messages to share a prefix.
        automatic_ttl: time to live of a requested breakpoint at the last block, as `Block.ttl`; None: none.
        explicit_only: True if only explicit breakpoints are to be cached.
        is_cut: True if the model did not end its answer itself.
        skips_cache: True if it asks for logprobs of its prompt, which no cache has: all tokens are computed.
        place: place in the log, such as `log.jsonl:17`.
        order: index of its file, and its own index in that.
        failed: True if the answer was an error.
        num_bytes: size of its entry in the log.
    """

    dialect: Dialect
    model: str
    body: Json
    blocks: Sequence[Block]
    tools: tuple[Json, ...] = ()
    answer: tuple[Block, ...] = ()
    other_answers: tuple[tuple[Block, ...], ...] = ()
    is_cut: bool = False
    skips_cache: bool = False
    response_id: str = ""
    output: tuple[Any, ...] = ()
    usage: ReportedUsage = field(default_factory=ReportedUsage)
    time: float | None = None
    seconds: float | None = None
    first_seconds: float | None = None
    key: str = ""
    conversation: str = ""
    salt: str = ""
    parameters: str = ""
    automatic_ttl: float | None = None
    explicit_only: bool = False
    place: str = ""
    order: tuple[int, int] = (0, 0)
    failed: bool = False
    num_bytes: int = 0
    earlier: Sequence[Any] = ()

    @property
    def whole_body(self) -> Json:
        """The body with the stored items that it continues in its input. O(items)."""
        if not self.earlier:
            return self.body
        body = {**self.body, "input": [*self.earlier, *input_items(self.body.get("input"))]}
        body.pop("previous_response_id", None)
        return body

    @property
    def parts(self) -> PromptParts:
        """The prompt in the form in which prompts are compared. O(its blocks)."""
        return prompt_parts(self.blocks, self.tools, self.model)


def input_items(given: Any) -> list[Any]:
    """Return the items of the Responses API's `input`, which may be a text."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return list(given) if isinstance(given, list) else []


def prompt_parts(blocks: Iterable[Block], tools: Sequence[Json], model: str) -> PromptParts:
    """Return a prompt in the form in which prompts are compared. O(its blocks)."""
    return PromptParts(tuple(_messages_of(blocks)), _tools_shown(tools), model)


def _tools_shown(tools: Sequence[Json]) -> tuple[Mapping[str, Any], ...]:
    """Return tools by name, description and parameters, whatever API they were defined for."""
    shown = []
    for tool in tools:
        function = tool.get("function", tool)
        function = function if isinstance(function, dict) else tool
        if "input_schema" in function:
            function = {**function, "parameters": function["input_schema"]}
            del function["input_schema"]
        shown.append({name: value for name, value in function.items() if name != "cache_control"})
    return tuple(shown)


def _messages_of(blocks: Iterable[Block]) -> Iterator[MessageParts]:
    """Yield the messages that blocks stand for."""
    grouped: dict[int, list[Block]] = {}
    for block in blocks:
        if block.message >= 0:
            grouped.setdefault(block.message, []).append(block)
    for group in grouped.values():
        role = group[0].role
        if len(group) == 1 and group[0].kind == "text":
            yield MessageParts(role, group[0].text)
            continue
        text = "\n".join(block.text for block in group if block.kind in ("text", "media"))
        thinking = "\n".join(block.text for block in group if block.kind == "thinking")
        calls = tuple((block.name, block.text) for block in group if block.kind == "call")
        yield MessageParts(role, text, thinking, calls)
