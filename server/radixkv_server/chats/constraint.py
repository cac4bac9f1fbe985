# SPDX-License-Identifier: Apache-2.0
"""Grammar of an answer: from the body's own constraint, the tools and the choice among them."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from radixkv.grammar.grammar_text import json_schema
from radixkv.sampling.structured import StructuredOutputs
from radixkv.text.chat_formats.answer_grammar import AnswerGrammar, MarkToken
from radixkv.text.chat_formats.format import TAIL_TOKENS, ChatFormat
from radixkv.text.text_tokenizer import TextTokenizer
from radixkv_server.chats.chat import Chat, ChatPrompt
from radixkv_server.errors import bad_request
from radixkv_server.generation.grammar_places import GrammarPlaces
from radixkv_server.settings import ServerSettings


def with_default(wanted: StructuredOutputs | None, settings: ServerSettings) -> StructuredOutputs | None:
    """Apply the server's default for unlisted properties where the request gives none."""
    if wanted is None or wanted.json is None or wanted.disable_additional_properties is not None:
        return wanted
    return replace(
        wanted, disable_additional_properties=settings.structured_additional_properties == "closed"
    )


def answer_constraint(
    prompt: ChatPrompt, settings: ServerSettings
) -> tuple[StructuredOutputs | None, GrammarPlaces]:
    """Return the grammar of the answers to a chat, and the fields of the body that it comes from.

    Raises:
        ApiError: 400; the required call is impossible, or the content of the answer is constrained, too.
    """
    chat, allowed, param = prompt.chat, prompt.chat.allowed_tools, prompt.chat.grammar_param
    wanted = with_default(chat.sampling.get("structured"), settings)
    if wanted is not None:
        _check_free(chat)
        if chat.options.get("continue_final_message"):
            wanted = _continue_content(wanted, prompt)
    if wanted is None and allowed is None and not chat.callable_tools and not chat.must_call:
        return None, GrammarPlaces(param)
    tools = () if chat.tool_choice == "none" else chat.callable_tools
    grammar = AnswerGrammar(
        prompt.format,
        tools if allowed is None else [tool for tool in tools if tool["function"]["name"] in allowed],
        prompt.parallel_tool_calls,
        partial(_token_of, prompt.tokenizer),
        prompt.end,
        others=allowed is not None,
        closes_objects=settings.structured_additional_properties == "closed",
        inputs={name: given.escaped for name, given in chat.tool_inputs.items()},
        num_calls=sum(len(message.get("tool_calls") or ()) for message in prompt.messages),
    )
    lark = _lark(chat, prompt.format, grammar, wanted)
    if lark is None:
        return wanted, GrammarPlaces(param)
    inputs = {chat.tool_inputs[name].param: lines for name, lines in grammar.inputs_in(lark)}
    places = GrammarPlaces("tools" if wanted is None else param, inputs, grammar.tools_in(lark))
    return StructuredOutputs(grammar=lark, prefix=wanted.prefix if wanted is not None else ""), places


def _lark(
    chat: Chat, chat_format: ChatFormat, grammar: AnswerGrammar, wanted: StructuredOutputs | None
) -> str | None:
    """Return the grammar in Lark; None: the wanted constraint is used as it is.

    Args:
        wanted: the body's constraint on the answer's content.
    """
    allowed = chat.allowed_tools
    if allowed is not None or chat.must_call:
        _check_choice(chat)
    if chat.must_call:
        lark = grammar.required(None if chat.tool_choice == "required" else chat.tool_choice)
        if lark is None:
            message = f"tool_choice: the chat format of this model, {chat_format.name}, has no tool calls."
            raise bad_request(message, param="tool_choice", code="unsupported_parameter")
        return lark
    if wanted is None and chat.tool_choice == "none":
        return replace(grammar, tools=chat.callable_tools).without_calls()
    if wanted is None:
        lark = grammar.optional()
        if lark is None and allowed is not None and chat_format.forms:
            message = (
                f"tool_choice: in the chat format {chat_format.name}, allowed_tools need mode 'required'."
            )
            raise bad_request(message, param="tool_choice", code="unsupported_parameter")
        return lark
    schema = json_schema(wanted)
    return None if schema is None else grammar.json(schema, begun=bool(wanted.prefix))


def _check_free(chat: Chat) -> None:
    """Refuse a required call if the answer's content is constrained, too."""
    param = chat.grammar_param
    if chat.must_call:
        named = (
            chat.tool_choice if chat.tool_choice == "required" else f"of the function {chat.tool_choice!r}"
        )
        raise bad_request(
            f"tool_choice {named:.80} and {param} exclude each other: an answer that must call a tool can't "
            "be anything else. Leave one of them out, or use tool_choice 'auto'.",
            param=param,
        )


def _continue_content(wanted: StructuredOutputs, prompt: ChatPrompt) -> StructuredOutputs:
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
