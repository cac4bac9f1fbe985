# SPDX-License-Identifier: Apache-2.0
"""Images in recorded logs of all providers: the same hit, others miss, and each has its tokens."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image
from scripted_images import base64_of, file_of, picture

from radixkv.observe.audit.exchange import make_record
from radixkv.observe.audit.prompt_units import CharacterCoding, byte_coding
from radixkv.observe.audit.record import Record
from radixkv.observe.audit.rule_sets import rule_set
from radixkv.observe.audit.rules import Rules

Body = dict[str, Any]
SCREEN = picture(1, (1280, 800))
OTHER = picture(2, (1280, 800))
SMALL = SCREEN.resize((640, 400), Image.Resampling.LANCZOS)


def chat(image: str, *more: str) -> Body:
    """A conversation that begins with an image, and goes on."""
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    said: list[Body] = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, shown]}]
    for text in more:
        said += [{"role": "assistant", "content": "a harbour"}, {"role": "user", "content": text}]
    return {"model": "gpt-4o", "messages": said}


def responses(image: str, *more: str) -> Body:
    shown = {"type": "input_image", "image_url": f"data:image/png;base64,{image}", "detail": "auto"}
    asked = {"type": "input_text", "text": "What is this?"}
    items: list[Body] = [{"role": "user", "content": [asked, shown]}]
    for text in more:
        answer = {"type": "output_text", "text": "a harbour"}
        items += [
            {"type": "message", "role": "assistant", "content": [answer]},
            {"role": "user", "content": text},
        ]
    return {"model": "gpt-4o", "input": items}


def messages(image: str, *more: str) -> Body:
    source = {"type": "base64", "media_type": "image/png", "data": image}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": source}]}
    call = {"type": "tool_use", "id": "c", "name": "screen", "input": {}}
    said: list[Body] = [
        {"role": "user", "content": "What is this?"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    for text in more:
        said += [{"role": "assistant", "content": "a harbour"}, {"role": "user", "content": text}]
    return {"model": "claude-x", "max_tokens": 9, "system": "Be brief.", "messages": said}


def screenshots(image: str, *more: str) -> Body:
    """The same for a computer's screen."""
    shown = {"type": "computer_screenshot", "image_url": f"data:image/png;base64,{image}"}
    items: list[Body] = [
        {"role": "user", "content": "What is this?"},
        {"type": "computer_call", "call_id": "c", "id": "cu_1", "action": {"type": "screenshot"}},
        {"type": "computer_call_output", "call_id": "c", "output": shown},
    ]
    for text in more:
        items += [{"role": "assistant", "content": "a harbour"}, {"role": "user", "content": text}]
    return {"model": "computer-use-preview", "input": items}


def ollama(image: str, *more: str) -> Body:
    said: list[Body] = [{"role": "user", "content": "What is this?", "images": [image]}]
    for text in more:
        said += [{"role": "assistant", "content": "a harbour"}, {"role": "user", "content": text}]
    return {"model": "qwen3-vl", "messages": said, "stream": False}


Make = Callable[..., Body]
ALL = pytest.mark.parametrize("make", [chat, responses, messages, screenshots, ollama])


def record(body: Body, time: float = 0.0) -> Record:
    return make_record(body, time=time, seconds=0.0)


def rules() -> Rules:
    return Rules(rule_set("radixkv"), byte_coding())


@ALL
def test_a_later_turn_hits_through_the_image(make: Make) -> None:
    tree = rules()
    image = base64_of(SCREEN)
    first = tree.observe(record(make(image)))
    second = tree.observe(record(make(image, "And now?"), 1.0))
    assert second.cached_tokens >= first.prompt_tokens - 40
    again = rules()
    again.observe(record(make(image)))
    gif = base64_of(SCREEN, "GIF")
    assert again.observe(record(make(gif, "And now?"), 1.0)).cached_tokens == second.cached_tokens, (
        "the pixels decide, not the file"
    )


@ALL
@pytest.mark.parametrize(("other", "kind"), [(OTHER, "another_image"), (SMALL, "image_resized")])
def test_another_image_and_another_size_are_named(make: Make, other: Image.Image, kind: str) -> None:
    tree = rules()
    tree.observe(record(make(base64_of(SCREEN), "And now?")))
    seen = tree.observe(record(make(base64_of(other), "And now?"), 1.0))
    assert seen.cached_tokens < 120
    assert seen.breaker is not None
    assert seen.breaker.kind == kind
    assert "[image " in seen.breaker.old
    assert seen.breaker.remedy


@pytest.mark.parametrize(
    ("make", "least", "most"),
    # 1280 x 800: Anthropic's 1,366 tokens by 750 pixels; gpt-4o's 85 and six tiles of 170
    [(messages, 1366, 1450), (chat, 1105, 1190), (responses, 1105, 1190)],
)
def test_tokens_follow_the_providers_rule(make: Make, least: int, most: int) -> None:
    units = CharacterCoding().encode(record(make(base64_of(SCREEN))))
    assert least * 0.97 <= units.num_tokens <= most


def test_what_is_no_image_is_known_by_its_digest() -> None:
    broken = base64.b64encode(file_of(SCREEN)[:100]).decode()
    for image in ("AAAA", broken):
        (block,) = [block for block in record(chat(image)).blocks if block.kind == "media"]
        assert block.text.startswith("<image_url ")
    url = {"type": "image_url", "image_url": {"url": "https://images.example/a.png"}}
    sent = {"model": "m", "messages": [{"role": "user", "content": [url]}]}
    assert record(sent).blocks[0].text.startswith("<image_url ")
