# SPDX-License-Identifier: Apache-2.0
"""Rendering of chats: from a `Chat` to its prompt, and from the prompt to the engine's request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from radixkv.cache.keys import TOKEN_BYTES, EncodedTokens, encode_tokens, shared_bytes
from radixkv.errors import InvalidRequestError
from radixkv.images.image_files import DecodedImage
from radixkv.images.image_processor import ImageProcessor
from radixkv.images.placed_image import PlacedImage
from radixkv.scheduling.request import Request
from radixkv.text.chat_formats.call_results import order_of_results
from radixkv.text.chat_formats.canonical_tools import canonical_tools
from radixkv.text.chat_formats.client_rules import ClientRule, normalized
from radixkv.text.chat_formats.template_input import template_messages, template_tools
from radixkv.text.segments import text_owner
from radixkv_server.chats.chat import Chat, ChatPrompt, Message
from radixkv_server.chats.constraint import answer_constraint
from radixkv_server.chats.image_loader import LoadedImages
from radixkv_server.chats.image_marks import chat_keys, has_marks, images_after_results, template_content
from radixkv_server.concurrency import off_loop
from radixkv_server.context import ServerContext
from radixkv_server.errors import bad_request
from radixkv_server.generation.grammar_places import GrammarPlaces
from radixkv_server.generation.request import sampling_params

logger = logging.getLogger("radixkv.server")


async def chat_prompt(context: ServerContext, chat: Chat) -> ChatPrompt:
    """Render the prompt of a chat, with its tools in the template or in a system message.

    Raises:
        ApiError, InvalidRequestError: the chat can't be rendered, or is far too long.
    """
    settings = context.settings
    if len(chat.source) > settings.max_messages:
        raise bad_request(f"At most {settings.max_messages} messages are allowed.", param=chat.param)
    template = await context.templates.find(chat.options.get("chat_template"))
    tools = chat.tools  # shown whatever the choice is: the next turn, with another choice, finds the prompt
    if settings.canonical_tools:
        tools = canonical_tools(tools)  # as shown; what may be called, and how, is as the client says
    given, more = template_tools(tools, template.format, template.traits)
    images = await context.images.load([*chat.images], chat.images, chat.param)
    shown_keys: Sequence[str] = ()
    messages: list[Message] = []
    rule: ClientRule | None = None

    def convert() -> list[Message]:
        nonlocal messages, rule, shown_keys
        messages = chat.convert()
        if chat.orders_results:
            messages = [messages[at] for at in order_of_results(messages, chat.param)]
        if settings.normalize_clients == "on":
            messages, rule = normalized(messages)
        prepared = template_messages(
            messages, tools, template.format, template.traits, tools_first=settings.tools_first
        )
        if not chat.images:
            return prepared
        if not template.traits.images_in_results:
            prepared = images_after_results(prepared, images.shown)
        shown_keys = [key for key in chat_keys(prepared) if key in images.shown]
        return [_with_parts(message, images) for message in prepared]

    ids = await context.prompts.render_chat(
        [chat.source, () if given or more else tools],
        convert,
        tools=given,
        add_generation_prompt=chat.add_generation_prompt,
        options={**template.thinking.variables(chat.thinking), **chat.options, **more},
        param=chat.param,
    )
    if rule is not None:
        _log_rule(context, rule)
    inputs: Sequence[PlacedImage] = ()
    processor = context.engine.image_processor
    if shown_keys and processor is not None:
        rendered, shown = list(map(int, ids)), [images.shown[key] for key in shown_keys]
        ids, inputs = await off_loop(lambda: _placed(context, processor, rendered, shown, chat.param))
    tokenizer = context.engine.tokenizer
    return ChatPrompt(chat, ids, messages, tools, template, tokenizer, rule, inputs, images.words)


def _placed(
    context: ServerContext,
    processor: ImageProcessor,
    ids: Sequence[int],
    images: Sequence[DecodedImage],
    param: str,
) -> tuple[Sequence[int], Sequence[PlacedImage]]:
    """Put the tokens of images into a prompt, and remember the images for those who watch the cache.

    Raises:
        InvalidRequestError: the model can't be shown one of them, or the template leaves one out.
    """
    try:
        token_ids, placed = processor.place(ids, images)
    except InvalidRequestError as error:
        raise InvalidRequestError(str(error), param=error.param or param, code=error.code) from None
    tenant = str(next(iter(text_owner.get()), ""))
    for one in placed:
        context.shown_images.note(tenant, one.image, token_ids[one.start : one.end])
    return token_ids, placed


def _with_parts(message: Message, images: LoadedImages) -> Message:
    """Return a message as the template gets it: its images are parts of their own."""
    content = message.get("content")
    if not isinstance(content, str) or not has_marks(content):
        return message
    return {**message, "content": template_content(content, images.unshown)}


async def chat_request(context: ServerContext, prompt: ChatPrompt) -> tuple[Request, GrammarPlaces]:
    """Return the engine's request for the answers to a chat, and the fields that their grammar comes from.

    Raises:
        ApiError, InvalidRequestError: the prompt is too long, or a value is out of range.
    """
    chat = prompt.chat
    encoded = await context.prompts.accept(prompt.ids, chat.param)
    structured, places = answer_constraint(prompt, context.settings)
    params = sampling_params(
        {
            **chat.sampling,
            "kept_special_tokens": prompt.format.special_tokens,
            "structured": structured,
            "answer_marks": prompt.format.answer_marks(prompt.end, calls=chat.may_call),
        },
        defaults=context.engine.default_sampling,
        room=context.engine.limits.max_model_len - len(encoded),
        renamed=chat.renamed,
        prompt_only=chat.prompt_only,
    )
    checkpoints = await _steady_ends(context, prompt, encoded)
    options = {**chat.request_options, "images": prompt.images}
    return Request(encoded, params, checkpoints=checkpoints, **options), places


async def _steady_ends(context: ServerContext, prompt: ChatPrompt, encoded: EncodedTokens) -> tuple[int, ...]:
    """Return the number of tokens that the next turn will begin with, for models with states.

    Empty: no more than usual. Where the template leaves thoughts out of earlier turns, the next turn parts
    from this prompt after the user's last message: the beginning of such a turn is rendered to find out.
    """
    thinks = prompt.template.traits.drops_reasoning and prompt.format.reasoning is not None
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
    chat = replace(prompt.chat, convert=lambda: list(next_turn), orders_results=False)
    try:
        other = await chat_prompt(context, chat)
    except InvalidRequestError:  # a template with rules of its own
        return ()
    end = shared_bytes(encoded.data, encode_tokens(other.ids)) // TOKEN_BYTES
    return (end,) if end else ()


def _log_rule(context: ServerContext, rule: ClientRule) -> None:
    """Log a rule that has changed a prompt, once."""
    if rule.what not in context.applied_rules:
        context.applied_rules.add(rule.what)
        logger.info("%s, so that prompts are found again; --normalize-clients off leaves it", rule.effect)
