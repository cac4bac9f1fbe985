"""Chats in no dialect: from messages, tools and options to a prompt, and from generated text to answers.

Each chat API converts its body to a `Chat` and says what `AnswerReaders` gives it; how the model's family
writes tools, calls and reasoning is decided below (`radixkv.chat`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from radixkv.chat.answer import Answer, AnswerEvent, AnswerParser, PlainParser
from radixkv.request import CompletionOutput, OutputDelta
from radixkv_server.context import ServerContext
from radixkv_server.errors import bad_request
from radixkv_server.generation_request import Job, sampling_params

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to be continued.

    Args:
        source: the messages as JSON-like data, for their size alone.
        convert: makes of them what chat templates expect: OpenAI's messages, with the arguments of tool calls
            as objects (`read_json_text` where they come as text, so that they are printed as they were),
            reasoning as `reasoning_content`, and content as text. Called once, off the event loop where they
            are long.
        param: what the body calls the messages, for errors.
        tools: in OpenAI's form, `{"type": "function", "function": {"name", "description", "parameters"}}`.
        tool_choice: `auto`, `none`, `required`, or the name of the one function to call.
        parallel_tool_calls: whether one answer may call more than once.
        add_generation_prompt: end the prompt where the assistant begins to speak.
        options: further arguments of the chat template.
    """

    source: Sequence[Any]
    convert: Callable[[], list[Message]]
    param: str = "messages"
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)


class AnswerReaders:
    """Turns the text of one request's samples into events, each sample with a parser of its own.

    Args:
        make_parser: a parser for a further sample.
    """

    def __init__(self, make_parser: Callable[[], AnswerParser] = PlainParser) -> None:
        self._make_parser = make_parser
        self._parsers: dict[int, AnswerParser] = {}
        self._called: set[int] = set()

    def read(self, delta: OutputDelta) -> list[AnswerEvent]:
        """What a delta adds to its sample; with the last one, what was held back, too."""
        parser = self._parsers.get(delta.index)
        if parser is None:
            parser = self._parsers[delta.index] = self._make_parser()
        events = parser.push(delta.text)
        return events if delta.finish_reason is None else events + parser.finish()

    def answer(self, sample: CompletionOutput) -> Answer:
        """The whole answer of a finished sample."""
        parser, answer = self._make_parser(), Answer()
        answer.add(parser.push(sample.text))
        answer.add(parser.finish())
        return answer


async def chat_job(
    context: ServerContext,
    chat: Chat,
    sampling: Mapping[str, Any],
    *,
    renamed: Mapping[str, str] | None = None,
) -> tuple[Job, AnswerReaders]:
    """The prompt of a chat with its sampling parameters, and what reads its answers.

    Args:
        sampling: arguments of SamplingParams; `max_tokens` is clamped to the room that the prompt leaves.
        renamed: argument -> field of the body, where they differ, for errors.

    Raises:
        ApiError, InvalidRequestError: the chat can't be rendered, is too long, or a value is out of range.
    """
    if len(chat.source) > context.settings.max_messages:
        raise bad_request(f"At most {context.settings.max_messages} messages are allowed.", param=chat.param)
    ids = await context.prompts.render_chat(
        chat.source,
        chat.convert,
        tools=None if chat.tool_choice == "none" else chat.tools,
        add_generation_prompt=chat.add_generation_prompt,
        options=chat.options,
        param=chat.param,
    )
    ids = context.prompts.check_length(ids, chat.param)
    params = sampling_params(
        dict(sampling),
        room=context.engine.max_model_len - len(ids),
        vocab_size=context.engine.tokenizer.vocab_size,
        renamed=renamed,
    )
    return Job(ids, params), AnswerReaders()
