# SPDX-License-Identifier: Apache-2.0
"""Bodies of the Messages routes: pydantic models, checked strictly.

How a field is declared to work, to change nothing, or to be refused: see `radixkv_server.http.fields`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from radixkv_server.apis.anthropic.blocks import (
    Effort,
    InputMessage,
    TextBlock,
    Texts,
    ToolAdditionBlock,
    ToolDefinition,
    is_cacheable,
)
from radixkv_server.apis.anthropic.context_edits import ContextEdits
from radixkv_server.apis.anthropic.tools import AnthropicTool, AnyTool, KnownTool, client_tools, is_deferred
from radixkv_server.apis.common.fields import MAX_TOOLS, ByType, RequestFields
from radixkv_server.apis.common.media import TEXT_ONLY, WithImages
from radixkv_server.chats.breakpoints import MAX_BREAKPOINTS, CacheControl, check_breakpoints
from radixkv_server.http.body import FAIL_FAST, ParamError, StrictModel, unsupported
from radixkv_server.http.fields import EmptyCounts, Refused, WithoutEffect

_Attribution = Annotated[Any, WithoutEffect("only says who asks")]
_Format = Annotated[dict[str, Any], Field(min_length=1)]
_Billing = Annotated[Any, WithoutEffect("nothing is billed")]

MIN_THINKING_TOKENS = 1024


class AnthropicToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _name_of_a_tool(self) -> AnthropicToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise ParamError("tool_choice has a name if its type is 'tool', and only then.", "tool_choice")
        return self


class ThinkingConfig(StrictModel):
    """Settings of thinking; `between_tools` allows it only after tool results."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None
    block_binding: Annotated[Any, WithoutEffect("thinking blocks are taken from anywhere")] = None

    @model_validator(mode="after")
    def _budget(self) -> ThinkingConfig:
        if (self.budget_tokens is not None) != (self.type == "enabled"):
            raise ParamError("thinking needs budget_tokens if it is enabled, and only then.", "thinking")
        if self.budget_tokens is not None and self.budget_tokens < MIN_THINKING_TOKENS:
            least = MIN_THINKING_TOKENS
            raise ParamError(f"thinking.budget_tokens must be at least {least}.", "thinking.budget_tokens")
        return self


class OutputConfig(StrictModel):
    effort: Effort | None = None
    format: _Format | None = None
    task_budget: Annotated[Any, WithoutEffect("templates tell models of no budget")] = None

    @model_validator(mode="after")
    def _schemas_only(self) -> OutputConfig:
        _check_format(self.format, "output_config.format")
        return self


def _check_format(wanted: Mapping[str, Any] | None, param: str) -> None:
    if wanted is not None and (wanted.get("type") != "json_schema" or set(wanted) != {"type", "schema"}):
        raise unsupported(param, 'anything but {"type": "json_schema", "schema": {...}}')


class Diagnostics(StrictModel):
    """Request for a cache diagnosis, with the id of an earlier request to compare with."""

    previous_message_id: str | None = None


class CreateThread(StrictModel):
    """Request to store this conversation under the id of its answer."""

    type: Literal["create"]


class ContinueThread(StrictModel):
    """Request to continue a stored conversation after the answer of this id."""

    type: Literal["continue"]
    previous_message_id: Annotated[str, Field(min_length=1, max_length=256)]


_THREAD = ByType("thread", lambda kind, known: f"thread: there is no type {kind!r}, only {known}.")


class CountTokensRequest(WithImages):
    """Body of POST /v1/messages/count_tokens: all fields that determine the prompt."""

    messages: Annotated[list[InputMessage], FAIL_FAST, TEXT_ONLY]
    model: str | None = None
    system: Texts | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS), FAIL_FAST] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: _Format | None = None
    context_management: ContextEdits | None = None
    cache_control: CacheControl | None = None
    speed: Annotated[Any, WithoutEffect("there is one speed", usual=("standard",))] = None
    betas: Annotated[Any, WithoutEffect("what works here needs no opting in")] = None
    billing_policy: _Billing = None
    compaction: Annotated[Any, WithoutEffect("counted is what is sent")] = None
    mcp_servers: Annotated[Any, Refused("connecting to MCP servers", usual=([],))] = None
    user_profile_id: _Attribution = None
    workspace_id: _Attribution = None

    @property
    def continues(self) -> bool:
        """True if the body continues a conversation that the server stores."""
        return False

    @property
    def answer_format(self) -> Mapping[str, Any] | None:
        """Required format of the answer; `output_format` is the former name of `output_config.format`."""
        wanted = None if self.output_config is None else self.output_config.format
        return self.output_format if wanted is None else wanted

    @property
    def effort(self) -> str | None:
        """Latest requested effort: of a system message, or of the body."""
        of_messages = (message.output_config for message in reversed(self.messages))
        efforts = (config.effort for config in (*of_messages, self.output_config) if config is not None)
        return next((effort for effort in efforts if effort is not None), None)

    @property
    def listed_tools(self) -> list[AnthropicTool | KnownTool]:
        """Tools at the beginning of the prompt."""
        tools = self.tools or ()
        return [tool for tool in client_tools(tools) if not is_deferred(tool, tools)]

    @property
    def loaded_tools(self) -> list[AnthropicTool | KnownTool]:
        """Further tools that the model can call, which messages show or may show."""
        tools = self.tools or ()
        return [*(tool for tool in client_tools(tools) if is_deferred(tool, tools)), *self.added_tools]

    @property
    def added_tools(self) -> list[AnthropicTool | KnownTool]:
        """Tools that messages define."""
        blocks = (block for message in self.messages for block in message.blocks)
        changes = (block.tool for block in blocks if isinstance(block, ToolAdditionBlock))
        return client_tools([change.definition for change in changes if isinstance(change, ToolDefinition)])

    @model_validator(mode="after")
    def _one_format(self) -> CountTokensRequest:
        _check_format(self.output_format, "output_format")
        if self.output_format is not None and self.answer_format != self.output_format:
            message = "output_format is the former name of output_config.format: give one of them."
            raise ParamError(message, "output_format")
        return self

    @model_validator(mode="after")
    def _some_message(self) -> CountTokensRequest:
        if not self.messages and not self.continues:
            raise ParamError("messages must have at least one message.", "messages")
        return self

    @model_validator(mode="after")
    def _sound_breakpoints(self) -> CountTokensRequest:
        blocks: list[Any] = [
            *(self.tools or ()),
            *(() if isinstance(self.system, str) else self.system or ()),
        ]
        for message in self.messages:
            for block in message.blocks:
                parts = getattr(block, "content", None)
                blocks += [*(parts if isinstance(parts, list) else ()), block]
        controls = [getattr(block, "cache_control", None) for block in blocks]
        given = [control for control in controls if control is not None]
        check_breakpoints(given)
        if self.cache_control is not None:
            self._check_automatic_breakpoint(self.cache_control, given)
        return self

    def _check_automatic_breakpoint(self, automatic: CacheControl, given: Sequence[CacheControl]) -> None:
        """Refuse an automatic breakpoint if the last block has another TTL, or the limit is reached.

        Args:
            given: the breakpoints of blocks.
        """
        last = next((block for block in self._blocks_from_the_end() if is_cacheable(block)), None)
        own = getattr(last, "cache_control", None)
        if own is None:
            if len(given) == MAX_BREAKPOINTS:
                raise ParamError(
                    f"cache_control: at most {MAX_BREAKPOINTS} breakpoints are allowed, and blocks have all "
                    "of them; remove the one beside messages, or one of a block.",
                    "cache_control",
                )
            if last is not None:
                check_breakpoints([*given, automatic])
        elif own.seconds != automatic.seconds:
            raise ParamError(
                "cache_control beside messages and that of the last block have different ttls.",
                "cache_control",
            )

    def _blocks_from_the_end(self) -> Iterator[Any]:
        for message in reversed(self.messages):
            yield from reversed(message.blocks)
        if isinstance(self.system, str):
            yield TextBlock(type="text", text=self.system)
        else:
            yield from reversed(self.system or ())
        yield from reversed(self.tools or ())

    @model_validator(mode="after")
    def _sound_tools(self) -> CountTokensRequest:
        names = [tool.name for tool in (*client_tools(self.tools or ()), *self.added_tools)]
        if len(set(names)) < len(names):
            raise ParamError("tools: their names must differ.", "tools")
        choice = None if self.continues else self.tool_choice
        if choice is not None and choice.type in ("any", "tool") and not names:
            raise ParamError("tool_choice: there are no tools to choose from.", "tool_choice")
        if choice is not None and choice.name is not None and choice.name not in names:
            raise ParamError(f"tool_choice: there is no tool {choice.name[:64]!r}.", "tool_choice")
        return self


class MessagesRequest(CountTokensRequest, RequestFields):
    """Body of POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: _Attribution = None
    service_tier: Annotated[
        Literal["auto", "standard_only"] | None,
        WithoutEffect("there is one tier", usual=("auto", "standard_only")),
    ] = None
    inference_geo: Annotated[Any, WithoutEffect("it runs where it runs")] = None
    fallback_credit_token: _Billing = None
    fallbacks: Annotated[Any, WithoutEffect("this server declines nothing")] = None
    container: Annotated[Any, Refused("a container")] = None
    compaction: Annotated[Any, Refused("summaries made by the server")] = None
    diagnostics: Annotated[Diagnostics, EmptyCounts] | None = None
    thread: Annotated[CreateThread | ContinueThread, _THREAD] | None = None

    @property
    def continues(self) -> bool:
        return isinstance(self.thread, ContinueThread)

    @model_validator(mode="after")
    def _only_what_works(self) -> MessagesRequest:
        if self.temperature is not None and not 0 <= self.temperature <= 1:
            raise ParamError("temperature must be from 0 to 1.", "temperature")
        self._check_prewarm()
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        if budget is not None and budget >= self.max_tokens:
            raise ParamError(
                "thinking.budget_tokens must be below max_tokens, which counts thinking, too.",
                "thinking.budget_tokens",
            )
        return self

    @property
    def prewarms(self) -> bool:
        """True if the request only fills the cache and generates nothing."""
        return self.max_tokens == 0

    def _check_prewarm(self) -> None:
        """Refuse fields about the answer in a request without one."""
        choice, thinking = self.tool_choice, self.thinking
        refused = {
            "stream": bool(self.stream),
            "tool_choice": choice is not None and choice.type in ("any", "tool"),
            "output_config.format": self.answer_format is not None,
            "thinking": thinking is not None and thinking.type == "enabled",
        }
        for param, is_given in refused.items():
            if self.prewarms and is_given:
                said = "tool_choice 'any' and 'tool'" if param == "tool_choice" else param
                raise ParamError(
                    f"{said} can't be used with max_tokens 0, which generates nothing: leave it out or raise "
                    "max_tokens.",
                    param,
                )
