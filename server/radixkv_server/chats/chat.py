# SPDX-License-Identifier: Apache-2.0
"""Values of a chat on its way through the server, the same for all APIs.

    Chat            the wish of a body: messages, tools, thinking, sampling
    ChatPrompt      the chat in tokens, rendered by the model's template, with its parts
    AnswerReaders   the text of each sample as events: content, reasoning, tool calls

How a family of models writes tools, calls and reasoning is decided in `radixkv.text.chat_formats`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from radixkv.cache.reporting.explain import MissReport
from radixkv.engine.outputs import CompletionOutput, OutputDelta
from radixkv.images.placed_image import PlacedImage
from radixkv.observe.message_places import place_name
from radixkv.observe.prompt_parts import MakeParts, PromptParts
from radixkv.text.chat_formats.answer import (
    Answer,
    AnswerEvent,
    AnswerParser,
    PlainParser,
    ReasoningDelta,
    ToolCallBegin,
    ToolCallEnd,
)
from radixkv.text.chat_formats.client_rules import ClientRule, divergence_hint
from radixkv.text.chat_formats.format import TAIL_TOKENS, ChatFormat, schemas_of
from radixkv.text.chat_formats.formats import KnownTemplate
from radixkv.text.chat_formats.template_input import reasoning_of
from radixkv.text.chat_formats.thinking import Thinking
from radixkv.text.text_tokenizer import TextTokenizer
from radixkv_server.chats.image_marks import ImageSource, with_words

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
    """Conversation for the model to continue, and the form of its answer.

    Args:
        source: the messages as JSON-like data, used for their size alone.
        convert: makes the messages that chat templates expect: OpenAI's, with the arguments of tool calls as
            objects (through `read_json_text` if they come as text, so that they are printed unchanged),
            reasoning as `reasoning_content`, and content as text. Called once, off the event loop if they are
            long.
        param: name of the messages' field in the body, for errors.
        images: sources of the images whose marks the messages have, by their keys (`chats.image_marks`).
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
        sampling: arguments of SamplingParams; `max_tokens` is clamped to the room that the prompt leaves.
        renamed: argument of SamplingParams -> field of the body, where they differ, for errors.
        prompt_only: no answer is to be generated.
        request_options: further arguments of the engine's Request: cache, priority and session.
    """

    source: Sequence[Any]
    convert: Callable[[], list[Message]]
    param: str = "messages"
    images: Mapping[str, ImageSource] = field(default_factory=dict)
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
    sampling: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    prompt_only: bool = False
    request_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def callable_tools(self) -> Sequence[Mapping[str, Any]]:
        """All tools that may be called."""
        return [*self.tools, *self.unlisted_tools]

    @property
    def may_call(self) -> bool:
        """True if the answer may have tool calls."""
        return bool(self.callable_tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> bool:
        """True if the answer is a tool call."""
        return self.tool_choice not in ("none", "auto")

    @property
    def grammar_param(self) -> str:
        """Field of the body with the grammar of the answer, for errors."""
        return self.renamed.get("structured", "structured_outputs")


@dataclass(frozen=True, slots=True, eq=False)
class ChatPrompt:
    """Chat rendered by its template.

    Attributes:
        chat: the chat before it was rendered.
        ids: tokens of the prompt; their number is not checked.
        messages: messages given to the template, with marks for images.
        tools: tools in the form that the prompt shows.
        template: the template's traits, and the format of the answer.
        tokenizer: of the model.
        client_rule: rule that held the client's own text constant; None: none applied.
        images: its images, as the engine takes them.
        image_words: words for its images, by the keys of their marks.
    """

    chat: Chat
    ids: Sequence[int] | npt.NDArray[np.int32]
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    template: KnownTemplate
    tokenizer: TextTokenizer
    client_rule: ClientRule | None
    images: Sequence[PlacedImage] = ()
    image_words: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown_messages(self) -> Sequence[Message]:
        """Its messages as people and comparisons see them: with words for images."""
        messages: Sequence[Message] = with_words(list(self.messages), self.image_words)
        return messages

    @property
    def format(self) -> ChatFormat:
        """Format of the answer."""
        return self.template.format

    @property
    def end(self) -> str:
        """Text of the last tokens, where the answer begins."""
        return self.tokenizer.decode(list(map(int, self.ids[-TAIL_TOKENS:])), skip_special_tokens=False)

    @property
    def parallel_tool_calls(self) -> bool:
        """True if an answer may have several calls."""
        return self.chat.parallel_tool_calls and not self.template.traits.one_call

    @property
    def ignored(self) -> Sequence[str]:
        """Fields of the body that the template does not heed."""
        return self.template.thinking.unheeded(self.chat.thinking)

    @property
    def last_message(self) -> str:
        """Beginning of the last message with text."""
        texts = (message.get("content") for message in reversed(self.shown_messages))
        return next((text for text in texts if isinstance(text, str) and text), "")[:SHOWN_CHARS]

    @property
    def parts(self) -> MakeParts:
        """Maker of the parts by which prompts are compared."""
        return partial(PromptParts.of_chat, self.shown_messages, self.tools)

    def hint(self, report: MissReport) -> str | None:
        """Name a change by the template or client to an earlier turn that explains a miss; None: no such."""
        if report.diverged_at is None:
            return None
        cached, new = (
            self.tokenizer.decode(ids[:JUDGED_TOKENS], skip_special_tokens=False)
            for ids in (report.cached_tokens_after, report.new_tokens_after)
        )
        drops = self.template.traits.drops_content and any(
            message.get("content") and message.get("tool_calls") for message in self.messages
        )
        thinks = any(reasoning_of(message) for message in self.messages)
        return divergence_hint(cached, new, self.format, reasoning_sent=thinks, content_dropped=drops)

    def place_name(self, before: Sequence[int], after: Sequence[int]) -> str | None:
        """Name the message that contains a place, by the token ids before and after it; None: not known."""
        texts = (b"".join(map(self.tokenizer.token_bytes, ids)) for ids in (before, after))
        return place_name(self.shown_messages, self.tools, *texts)

    def readers(self) -> AnswerReaders:
        """Make the readers of its answers."""
        chat, answer_format = self.chat, self.format
        if chat.reasoning_place == "in_content":
            answer_format = replace(answer_format, reasoning=None)
        make_parser = partial(
            answer_format.parser,
            calls=chat.may_call,
            parallel=self.parallel_tool_calls,
            prompt_end=self.end,
            forced=chat.must_call,
            tools=schemas_of(chat.callable_tools),
        )
        hides = chat.reasoning_place == "hidden"
        return AnswerReaders(make_parser, forced=chat.must_call, hides_reasoning=hides)


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
        return self._visible(events)

    def has_called(self, sample: int) -> bool:
        """Tell whether the text read so far has tool calls, the last of them complete."""
        return sample in self._called

    def read_whole(self, sample: CompletionOutput) -> list[AnswerEvent]:
        """Return all events of a finished sample."""
        parser = self._make_parser()
        return self._visible(parser.push(sample.text) + parser.finish(cut=_is_cut(sample)))

    def _visible(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        if not self._hides_reasoning:
            return events
        return [event for event in events if not isinstance(event, ReasoningDelta)]

    def answer(self, sample: CompletionOutput) -> Answer:
        """Return the whole answer of a finished sample."""
        return Answer.of(self.read_whole(sample))


def _is_cut(ended: OutputDelta | CompletionOutput) -> bool:
    """Tell whether a sample was cut by its parameters instead of ending by itself."""
    return ended.finish_reason == "length" or ended.stop_reason is not None
