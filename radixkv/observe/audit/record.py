# SPDX-License-Identifier: Apache-2.0
"""Record: one request to a model with its answer, in one form for all APIs and all kinds of logs."""

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
    """A piece of a prompt, at the place that providers cache it in: tools, then the system's, then messages.

    Attributes:
        text: as the client sent it; of a tool its JSON, of a call the JSON text of its arguments.
        role: `tool` for what tools answered; empty for tool definitions and prompts without messages.
        message: index of its message; -1: a tool.
        name: of the tool, or of the function that is called.
        ttl: there is a breakpoint at its end, for so many seconds, or `DEFAULT_TTL`; None: there is none.
    """

    text: str
    role: str
    kind: BlockKind
    message: int
    name: str = ""
    ttl: float | None = None


@dataclass(frozen=True, slots=True)
class ReportedUsage:
    """Tokens as the answer tells them; None: not told.

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
    """One request.

    Attributes:
        dialect: OpenAI's chat completions, responses or completions, or Anthropic's messages.
        body: as it was sent.
        blocks: the prompt.
        answer: what came back, as blocks of the assistant's; empty: not recorded.
        response_id: of the answer; empty: not told. output: its items, of the Responses API.
        time: when it began, seconds of any clock; None: not recorded.
        seconds: until its answer ended; first_seconds: until that began. None: not recorded.
        key: a digest of whose key it came with; never the key. Empty: not recorded.
        conversation: what its client calls the conversation; empty: nothing.
        salt: requests with another one share nothing, as `cache_salt`.
        parameters: what else decides whether the messages of two requests can share a prefix, as text.
        automatic_ttl: it asks for a breakpoint at its last block, as `Block.ttl`; None: it does not.
        explicit_only: it asks that nothing but its own breakpoints be cached.
        answer, other_answers: what the assistant said; further samples of it.
        is_cut: the model did not end its answer itself.
        skips_cache: it asks for logprobs of its prompt, which no cache has: every token is computed.
        place: where it stands, as `log.jsonl:17`.
        order: the number of its file, and its own in that.
        failed: the answer was an error.
        num_bytes: of the log that it took.
    """

    dialect: Dialect
    model: str
    body: Json
    blocks: tuple[Block, ...]
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

    @property
    def parts(self) -> PromptParts:
        """The prompt in the form in which prompts are compared. O(its blocks)."""
        return prompt_parts(self.blocks, self.tools, self.model)


def prompt_parts(blocks: Iterable[Block], tools: Sequence[Json], model: str) -> PromptParts:
    """A prompt in the form in which prompts are compared. O(its blocks)."""
    return PromptParts(tuple(_messages_of(blocks)), _tools_shown(tools), model)


def _tools_shown(tools: Sequence[Json]) -> tuple[Mapping[str, Any], ...]:
    """Tools by name, description and parameters, whatever API they were defined for."""
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
    """The messages that blocks stand for."""
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
