# SPDX-License-Identifier: Apache-2.0
"""Chats independent of APIs: from messages, tools and options to a prompt, and from output to answers.

Each chat API converts its body to a `Chat` and says what `AnswerReaders` gives it; how the model's family
writes tools, calls and reasoning is decided below (`radixkv.text.chat_formats`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from radixkv.cache.keys import TOKEN_BYTES, EncodedTokens, encode_tokens, shared_bytes
from radixkv.engine.outputs import CompletionOutput, OutputDelta
from radixkv.errors import InvalidRequestError
from radixkv.grammar.schema_text import json_schema
from radixkv.observe.message_places import place_name
from radixkv.observe.prompt_parts import PromptParts
from radixkv.sampling.structured import StructuredOutputs
from radixkv.scheduling.request import Request
from radixkv.text.chat_formats.answer import (
    Answer,
    AnswerEvent,
    AnswerParser,
    PlainParser,
    ReasoningDelta,
    ToolCallBegin,
    ToolCallEnd,
)
from radixkv.text.chat_formats.answer_grammar import AnswerGrammar, MarkToken
from radixkv.text.chat_formats.call_results import order_of_results
from radixkv.text.chat_formats.canonical_tools import canonical_tools
from radixkv.text.chat_formats.client_rules import ClientRule, divergence_hint, normalized
from radixkv.text.chat_formats.format import TAIL_TOKENS, ChatFormat, schemas_of
from radixkv.text.chat_formats.template_input import Thinking, reasoning_of, template_messages, template_tools
from radixkv.text.chat_formats.template_traits import TemplateTraits
from radixkv.text.text_tokenizer import TextTokenizer
from radixkv_server.context import ServerContext
from radixkv_server.errors import bad_request
from radixkv_server.generation.grammar_places import GrammarPlaces
from radixkv_server.generation.request import MakeParts, PromptFacts, sampling_params
from radixkv_server.settings import ServerSettings

if TYPE_CHECKING:
    from radixkv.cache.reporting.explain import MissReport

Message = dict[str, Any]
#: Where an answer has its reasoning: in fields of its own, in the content with its marks, or nowhere.
ReasoningPlace = Literal["apart", "in_content", "hidden"]
SHOWN_CHARS = 200  # of a chat's last message, in lists of requests
JUDGED_TOKENS = 8  # on each side of a break, for its hint


@dataclass(frozen=True, slots=True)
class InputGrammar:
    """Grammar of the text that a tool takes.

    Args:
        escaped: grammar in Lark for the text inside a JSON string (`radixkv.grammar.escaped_lark`).
        param: name of the field in the body, for errors.
    """

    escaped: str
    param: str


@dataclass(frozen=True, slots=True)
class Chat:
    """Conversation for the model to continue.

    Args:
        source: the messages as JSON-like data, used for their size alone.
        convert: makes the messages that chat templates expect: OpenAI's, with the arguments of tool calls as
            objects (through `read_json_text` if they come as text, so that they are printed unchanged),
            reasoning as `reasoning_content`, and content as text. Called once, off the event loop if they are
            long.
        param: name of the messages' field in the body, for errors.
        tools: in OpenAI's form, `{"type": "function", "function": {"name", "description", "parameters"}}`.
        unlisted_tools: further tools that may be called; messages of the prompt describe them.
        tool_choice: `auto`, `none`, `required`, or the name of the function to call.
        allowed_tools: names of the tools that may be called; the prompt shows all. None: all.
        tool_inputs: name of a tool with a text, `input`, as its only argument -> grammar of that text.
        parallel_tool_calls: allow several calls in an answer.
        add_generation_prompt: end the prompt with the assistant's header.
        options: further arguments of the chat template.
        thinking: settings of thinking, which become arguments of the template.
        reasoning_place: place of the reasoning in the answer.
        orders_results: put results of tool calls in the order of the calls; False: they are.
    """

    source: Sequence[Any]
    convert: Callable[[], list[Message]]
    param: str = "messages"
    tools: Sequence[Mapping[str, Any]] = ()
    unlisted_tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    allowed_tools: Collection[str] | None = None
    tool_inputs: Mapping[str, InputGrammar] = field(default_factory=dict)
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    thinking: Thinking = field(default_factory=Thinking)
    reasoning_place: ReasoningPlace = "apart"
    orders_results: bool = True

    @property
    def callable_tools(self) -> Sequence[Mapping[str, Any]]:
        """Names of all tools that may be called."""
        return [*self.tools, *self.unlisted_tools]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt(PromptFacts):
    """Rendered chat, and its facts.

    Attributes:
        ids: the prompt's tokens; their number is not checked.
        format: format of the answer.
        messages: messages given to the template.
        tools: tools in the form that the prompt shows.
        reasoning_sent: True if the messages carry the reasoning of earlier turns.
        traits: parts of a conversation that the template shows.
        tokenizer: of the model.
    """

    ids: Sequence[int] | npt.NDArray[np.int32]
    format: ChatFormat
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    reasoning_sent: bool
    traits: TemplateTraits
    tokenizer: TextTokenizer

    @property
    def last_message(self) -> str:
        texts = (message.get("content") for message in reversed(self.messages))
        return next((text for text in texts if isinstance(text, str) and text), "")[:SHOWN_CHARS]

    @property
    def parts(self) -> MakeParts:
        return functools.partial(PromptParts.of_chat, self.messages, self.tools)

    def hint(self, report: MissReport) -> str | None:
        """Explain changes by the template or client to an earlier turn."""
        if report.diverged_at is None:
            return None
        cached, new = (
            self.tokenizer.decode(ids[:JUDGED_TOKENS], skip_special_tokens=False)
            for ids in (report.cached_tokens_after, report.new_tokens_after)
        )
        drops = self.traits.drops_content and any(
            message.get("content") and message.get("tool_calls") for message in self.messages
        )
        return divergence_hint(
            cached, new, self.format, reasoning_sent=self.reasoning_sent, content_dropped=drops
        )

    def place_name(self, before: Sequence[int], after: Sequence[int]) -> str | None:
        texts = (b"".join(map(self.tokenizer.token_bytes, ids)) for ids in (before, after))
        return place_name(self.messages, self.tools, *texts)


class AnswerReaders:
    """Readers of a request's samples, which turn text into events with a parser per sample.

    Args:
        make_parser: a parser for a further sample.
        hides_reasoning: leave reasoning out.

    Attributes:
        forced: the answers are calls, without content.
    """

    def __init__(
        self,
        make_parser: Callable[[], AnswerParser] = PlainParser,
        *,
        forced: bool = False,
        hides_reasoning: bool = False,
    ) -> None:
        self.forced = forced
        self._hides_reasoning = hides_reasoning
        self._make_parser = make_parser
        self._parsers: dict[int, AnswerParser] = {}
        self._called: set[int] = set()

    def read(self, delta: OutputDelta) -> list[AnswerEvent]:
        """Return the events that a delta adds to its sample; the last delta also releases held back text."""
        parser = self._parsers.get(delta.index)
        if parser is None:
            parser = self._parsers[delta.index] = self._make_parser()
        events = parser.push(delta.text)
        if delta.finish_reason is not None:
            events = events + parser.finish(cut=_is_cut(delta))
        for event in events:
            if isinstance(event, ToolCallBegin):
                self._called.add(delta.index)
            elif isinstance(event, ToolCallEnd) and event.cut:
                self._called.discard(delta.index)
        return self._shown(events)

    def has_called(self, sample: int) -> bool:
        """Tell whether the text read so far has tool calls, the last of them complete."""
        return sample in self._called

    def read_whole(self, sample: CompletionOutput) -> list[AnswerEvent]:
        """Return all events of a finished sample."""
        parser = self._make_parser()
        return self._shown(parser.push(sample.text) + parser.finish(cut=_is_cut(sample)))

    def _shown(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        if not self._hides_reasoning:
            return events
        return [event for event in events if not isinstance(event, ReasoningDelta)]

    def answer(self, sample: CompletionOutput) -> Answer:
        """Return the whole answer of a finished sample."""
        return Answer.of(self.read_whole(sample))


def _is_cut(ended: OutputDelta | CompletionOutput) -> bool:
    """Tell whether a sample was cut by its parameters instead of ending by itself."""
    return ended.finish_reason == "length" or ended.stop_reason is not None


async def chat_prompt(context: ServerContext, chat: Chat) -> ChatPrompt:
    """Render the prompt of a chat, with its tools in the template or in a system message.

    Raises:
        ApiError, InvalidRequestError: the chat can't be rendered, or is far too long.
    """
    if len(chat.source) > context.settings.max_messages:
        raise bad_request(f"At most {context.settings.max_messages} messages are allowed.", param=chat.param)
    template = await context.templates.find(chat.options.get("chat_template"))
    settings = context.settings
    tools = chat.tools  # shown whatever the choice is: the next turn, with another choice, finds the prompt
    if settings.canonical_tools:
        tools = canonical_tools(tools)  # as shown; what may be called, and how, is as the client says
    given, more = template_tools(tools, template.format, template.traits)
    reasoning_sent = False
    messages: list[Message] = []
    rule: ClientRule | None = None

    def convert() -> list[Message]:
        nonlocal messages, reasoning_sent, rule
        messages = chat.convert()
        if chat.orders_results:
            messages = [messages[at] for at in order_of_results(messages, chat.param)]
        if settings.normalize_clients == "on":
            messages, rule = normalized(messages)
        reasoning_sent = any(reasoning_of(message) for message in messages)
        return template_messages(
            messages, tools, template.format, template.traits, tools_first=settings.tools_first
        )

    ids = await context.prompts.render_chat(
        [chat.source, () if given or more else tools],
        convert,
        tools=given,
        add_generation_prompt=chat.add_generation_prompt,
        options={**template.thinking.variables(chat.thinking), **chat.options, **more},
        param=chat.param,
    )
    if rule is not None:
        context.applied_rules.note(rule)
    return ChatPrompt(
        ids=ids,
        format=template.format,
        messages=messages,
        tools=tools,
        reasoning_sent=reasoning_sent,
        traits=template.traits,
        tokenizer=context.engine.tokenizer,
        client_rule=rule,
        ignored=tuple(template.thinking.unheeded(chat.thinking)),
    )


async def chat_request(
    context: ServerContext,
    chat: Chat,
    sampling: Mapping[str, Any],
    *,
    renamed: Mapping[str, str] | None = None,
    prompt_only: bool = False,
) -> tuple[Request, ChatPrompt, AnswerReaders]:
    """Return the prompt of a chat with its sampling parameters, and the readers of its answers.

    Args:
        sampling: arguments of SamplingParams; `max_tokens` is clamped to the room that the prompt leaves.
        renamed: argument -> field of the body, where they differ, for errors.
        prompt_only: no answer is to be generated.

    Raises:
        ApiError, InvalidRequestError: the chat can't be rendered, is too long, or a value is out of range.
    """
    prompt = await chat_prompt(context, chat)
    if prompt.traits.one_call:
        chat = replace(chat, parallel_tool_calls=False)
    tokenizer = context.engine.tokenizer
    encoded = await context.prompts.accept(prompt.ids, chat.param)
    end = tokenizer.decode(list(map(int, prompt.ids[-TAIL_TOKENS:])), skip_special_tokens=False)
    renamed = renamed or {}
    wanted = with_default(sampling.get("structured"), context.settings)
    if wanted is not None:
        _check_free(chat, renamed.get("structured", "structured_outputs"))
        if chat.options.get("continue_final_message"):
            wanted = _going_on(wanted, prompt)
    structured, places = _grammar(
        chat,
        prompt.format,
        tokenizer,
        wanted,
        end,
        context.settings.structured_additional_properties == "closed",
        renamed.get("structured", "structured_outputs"),
        sum(len(message.get("tool_calls") or ()) for message in prompt.messages),
    )
    forced = chat.tool_choice not in ("none", "auto")
    calls = bool(chat.callable_tools) and chat.tool_choice != "none"
    params = sampling_params(
        {
            **sampling,
            "kept_special_tokens": prompt.format.special_tokens,
            "structured": structured,
            "answer_marks": prompt.format.answer_marks(end, calls=calls, forced=forced),
        },
        defaults=context.engine.default_sampling,
        room=context.engine.limits.max_model_len - len(encoded),
        renamed=renamed,
        prompt_only=prompt_only,
    )
    in_content = chat.reasoning_place == "in_content"
    make_parser = functools.partial(
        (replace(prompt.format, reasoning=None) if in_content else prompt.format).parser,
        calls=calls,
        parallel=chat.parallel_tool_calls,
        prompt_end=end,
        forced=forced,
        tools=schemas_of(chat.callable_tools),
    )
    facts = replace(
        prompt,
        ids=encoded.token_ids,
        grammar_places=places,
        notes=context.templates.notes(prompt.format) if chat.callable_tools else (),
    )
    hides = chat.reasoning_place == "hidden"
    request = Request(encoded, params, checkpoints=await _steady_ends(context, chat, prompt, encoded))
    return request, facts, AnswerReaders(make_parser, forced=forced, hides_reasoning=hides)


async def _steady_ends(
    context: ServerContext, chat: Chat, prompt: ChatPrompt, encoded: EncodedTokens
) -> tuple[int, ...]:
    """Prompt tokens that the next turn will begin with, for models with states; empty: no more than usual.

    Where the template leaves thoughts out of earlier turns, the next turn parts from this prompt after the
    user's last message. It is asked by rendering the beginning of such a turn.
    """
    thinks = prompt.traits.drops_reasoning and prompt.format.reasoning is not None
    if not thinks or not context.keeps_states:
        return ()
    asked = [at for at, message in enumerate(prompt.messages) if message.get("role") == "user"]
    if not asked:
        return ()
    next_turn = [
        *prompt.messages[: asked[-1] + 1],
        {"role": "assistant", "content": "0"},
        {"role": "user", "content": "0"},
    ]
    try:
        other = await chat_prompt(
            context, replace(chat, convert=lambda: list(next_turn), orders_results=False)
        )
    except InvalidRequestError:  # a template with rules of its own
        return ()
    end = shared_bytes(encoded.data, encode_tokens(other.ids)) // TOKEN_BYTES
    return (end,) if end else ()


def with_default(wanted: StructuredOutputs | None, settings: ServerSettings) -> StructuredOutputs | None:
    """Apply the server's default for unlisted properties where the request gives none."""
    if wanted is None or wanted.json is None or wanted.disable_additional_properties is not None:
        return wanted
    return replace(
        wanted, disable_additional_properties=settings.structured_additional_properties == "closed"
    )


def _going_on(wanted: StructuredOutputs, prompt: ChatPrompt) -> StructuredOutputs:
    """Let a grammar go on after the content of a last message that the prompt leaves open.

    JSON may have as much white space between its tokens as that content has.
    """
    content = prompt.messages[-1].get("content")
    if not isinstance(content, str) or not content.strip():
        return wanted
    # As the template shows it: some take white space off.
    tail = list(map(int, prompt.ids[-len(content.encode()) - TAIL_TOKENS :]))
    end = prompt.tokenizer.decode(tail, skip_special_tokens=False)
    begun = next((text for text in (content, content.rstrip(), content.strip()) if end.endswith(text)), "")
    wanted = replace(wanted, prefix=begun)
    if wanted.whitespace_pattern is not None or not wanted.disable_any_whitespace:
        return wanted
    most = max(map(len, re.findall(r"\s+", begun)), default=0)
    return replace(wanted, whitespace_pattern=rf"[ \t\r\n]{{0,{most}}}") if most else wanted


def _check_free(chat: Chat, param: str) -> None:
    """Refuse a required call if the answer's content is constrained, too."""
    if chat.tool_choice not in ("none", "auto"):
        named = (
            chat.tool_choice if chat.tool_choice == "required" else f"of the function {chat.tool_choice!r}"
        )
        raise bad_request(
            f"tool_choice {named:.80} and {param} exclude each other: an answer that must call a tool can't "
            "be anything else. Leave one of them out, or use tool_choice 'auto'.",
            param=param,
        )


def _grammar(
    chat: Chat,
    chat_format: ChatFormat,
    tokenizer: TextTokenizer,
    wanted: StructuredOutputs | None,
    end: str,
    closes_objects: bool,
    param: str,
    num_calls: int,
) -> tuple[StructuredOutputs | None, GrammarPlaces]:
    """Return the constraint on an answer, and the fields that it comes from.

    Args:
        wanted: the body's constraint on the answer's content.
        end: end of the prompt.
        closes_objects: see AnswerGrammar.
        param: name of `wanted` in the body.
        num_calls: calls in the conversation so far.

    Raises:
        ApiError: the required call is impossible.
    """
    allowed = chat.allowed_tools
    is_free = wanted is None and allowed is None and not chat.callable_tools
    if is_free and chat.tool_choice in ("none", "auto"):
        return None, GrammarPlaces(param)
    tools = () if chat.tool_choice == "none" else chat.callable_tools
    grammar = AnswerGrammar(
        chat_format,
        tools if allowed is None else [tool for tool in tools if tool["function"]["name"] in allowed],
        chat.parallel_tool_calls,
        functools.partial(_token_of, tokenizer),
        end,
        others=allowed is not None,
        closes_objects=closes_objects,
        inputs={name: given.escaped for name, given in chat.tool_inputs.items()},
        num_calls=num_calls,
    )
    if allowed is not None or chat.tool_choice not in ("none", "auto"):
        _check_choice(chat)
    if chat.tool_choice not in ("none", "auto"):
        lark = grammar.required(None if chat.tool_choice == "required" else chat.tool_choice)
        if lark is None:
            message = f"tool_choice: the chat format of this model, {chat_format.name}, has no tool calls."
            raise bad_request(message, param="tool_choice", code="unsupported_parameter")
    elif wanted is None and chat.tool_choice == "none":
        lark = replace(grammar, tools=chat.callable_tools).without_calls()
    elif wanted is None:
        lark = grammar.optional()
        if lark is None and allowed is not None and chat_format.forms:
            message = (
                f"tool_choice: in the chat format {chat_format.name}, allowed_tools need mode 'required'."
            )
            raise bad_request(message, param="tool_choice", code="unsupported_parameter")
    elif (schema := json_schema(wanted)) is not None:
        lark = grammar.json(schema, begun=bool(wanted.prefix))
    else:
        lark = None
    if lark is None:
        return wanted, GrammarPlaces(param)
    inputs = {chat.tool_inputs[name].param: lines for name, lines in grammar.inputs_in(lark)}
    places = GrammarPlaces("tools" if wanted is None else param, inputs, grammar.tools_in(lark))
    return StructuredOutputs(grammar=lark, prefix=wanted.prefix if wanted is not None else ""), places


def _check_choice(chat: Chat) -> None:
    names = [tool["function"]["name"] for tool in chat.callable_tools]
    if not names:
        raise bad_request("tool_choice needs tools to choose from.", param="tool_choice")
    wanted = chat.allowed_tools
    if wanted is None:
        wanted = () if chat.tool_choice == "required" else (chat.tool_choice,)
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        raise bad_request(f"tool_choice: there is no tool {unknown[0][:64]!r}.", param="tool_choice")


def _token_of(tokenizer: TextTokenizer, text: str) -> MarkToken | None:
    """Return the token that a text is, if it is a single one."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        return None
    return MarkToken(ids[0], is_special=tokenizer.is_added_token(ids[0]))
