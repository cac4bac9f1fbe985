# SPDX-License-Identifier: Apache-2.0
"""Images that the model sees, in every API: shown as pixels, counted in usage, found by the next turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from scripted_engine import Asked, ScriptedEngine
from scripted_images import (
    ScriptedImageProcessor,
    base64_of,
    data_url,
    file_of,
    ids_of,
    picture,
)

from radixkv.errors import ConfigError
from radixkv.images.image_files import DecodedImage, decode_image
from radixkv.images.placed_image import FIRST_IMAGE_ID
from radixkv_server.app import create_app
from radixkv_server.settings import ServerSettings

Body = dict[str, Any]
Make = Callable[[list[str]], tuple[str, Body]]
TOOL = {"name": "look", "arguments": "{}"}


def part(kind: str, image: str) -> Body:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}", "detail": kind}}


def chat(images: list[str]) -> tuple[str, Body]:
    """An image of the user's, then one in the result of a tool for each further image."""
    said = {"role": "user", "content": [{"type": "text", "text": "see"}, part("auto", images[0])]}
    call = {"id": "c", "type": "function", "function": TOOL}
    messages: list[Body] = [{"role": "system", "content": "be brief"}, said]
    for image in images[1:]:
        messages += [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [part("high", image)]},
        ]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 4}


def messages(images: list[str]) -> tuple[str, Body]:
    def block(image: str) -> Body:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": image}}

    said: list[Body] = [{"role": "user", "content": [{"type": "text", "text": "see"}, block(images[0])]}]
    for image in images[1:]:
        said += [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": [block(image)]}],
            },
        ]
    return "/v1/messages", {"system": "be brief", "messages": said, "max_tokens": 4}


def responses(images: list[str]) -> tuple[str, Body]:
    def shown(image: str) -> Body:
        return {"type": "input_image", "image_url": f"data:image/png;base64,{image}", "detail": "auto"}

    items: list[Body] = [
        {"role": "user", "content": [{"type": "input_text", "text": "see"}, shown(images[0])]}
    ]
    for image in images[1:]:
        items += [
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [shown(image)]},
        ]
    return "/v1/responses", {"instructions": "be brief", "input": items, "max_output_tokens": 4}


def ollama(images: list[str]) -> tuple[str, Body]:
    said: list[Body] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "see", "images": images[:1]},
    ]
    for image in images[1:]:
        call = {"function": {"name": "look", "arguments": {}}}
        said += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "", "images": [image], "tool_name": "look"},
        ]
    return "/api/chat", {"messages": said, "stream": False, "options": {"num_predict": 4}}


def shown_in(asked: Asked) -> list[DecodedImage]:
    """The images that the engine got."""
    return [placed.image for placed in asked.images]


APIS = pytest.mark.parametrize("api", [chat, messages, responses, ollama])
ONE, TWO, THREE = (base64_of(picture(seed)) for seed in (1, 2, 3))
IMAGES = {
    text: decode_image(file_of(picture(seed)), 10**6) for text, seed in ((ONE, 1), (TWO, 2), (THREE, 3))
}


def seeing(**settings: Any) -> Any:
    return live_server(
        ScriptedEngine(caches=True, image_processor=ScriptedImageProcessor(), num_blocks=2000), **settings
    )


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with seeing() as running:
        yield running


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def ask(http: httpx.Client, asked: tuple[str, Body]) -> Body:
    path, body = asked
    answer = http.post(path, json={"model": "scripted", **body})
    assert answer.status_code == 200, answer.text
    assert "images" not in answer.headers.get("warning", "")
    found: Body = answer.json()
    return found


def error_of(http: httpx.Client, asked: tuple[str, Body], status: int = 400) -> Body:
    path, body = asked
    answer = http.post(path, json={"model": "scripted", **body})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    return {"message": error} if isinstance(error, str) else error


def counted(answer: Body) -> tuple[int, int]:
    """Tokens of the prompt and cached ones, in the fields of each API."""
    usage = answer.get("usage")
    if usage is None:
        return answer["prompt_eval_count"], -1
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached + usage["cache_creation_input_tokens"], cached


@APIS
def test_the_model_gets_the_pixels_in_their_order(server: LiveServer, http: httpx.Client, api: Make) -> None:
    ask(http, api([ONE, TWO, THREE]))
    asked = server.engine.requests[-1]
    assert shown_in(asked) == [IMAGES[ONE], IMAGES[TWO], IMAGES[THREE]]
    tokens = [token for token in asked.prompt if token >= FIRST_IMAGE_ID]
    assert tokens == [token for image in shown_in(asked) for token in ids_of(image)]


@APIS
def test_usage_counts_images_and_the_next_turn_goes_on_behind_them(
    server: LiveServer, http: httpx.Client, api: Make
) -> None:
    extra = base64_of(picture(hash(api.__name__) % 1000 + 10))
    first, _ = counted(ask(http, api([extra])))
    second, cached = counted(ask(http, api([extra, TWO])))
    assert second >= first + IMAGES[TWO].width * IMAGES[TWO].height // 256
    outcome = server.engine.requests[-1].outcome
    assert outcome.num_cached_tokens > first - 16, "the whole first turn, but for the answer's header"
    assert cached in (-1, outcome.num_cached_tokens)


@APIS
def test_another_image_misses_at_its_first_token(api: Make) -> None:
    with seeing() as server, server.http() as http:
        ask(http, api([ONE]))
        before = server.engine.requests[-1].prompt
        ask(http, api([THREE]))
        asked = server.engine.requests[-1]
    shared = next(at for at, (a, b) in enumerate(zip(before, asked.prompt, strict=False)) if a != b)
    assert asked.outcome.num_cached_tokens == shared
    assert asked.prompt[shared] == ids_of(IMAGES[THREE])[0]


@APIS
@pytest.mark.parametrize(
    ("image", "why"),
    [
        ("AAAA", "no PNG, JPEG, WebP or GIF"),
        ("A?AA", "no base64"),
        (base64_of(picture(1, (2000, 1500))), "max_image_pixels"),
        (base64_of(picture(1), "BMP"), "no PNG, JPEG, WebP or GIF"),
        (ONE[: len(ONE) // 8 * 4], "cut off or damaged"),
    ],
)
def test_what_can_not_be_shown_is_refused_by_its_place(
    api: Make, image: str, why: str, tight: LiveServer
) -> None:
    with tight.http() as http:
        error = error_of(http, api([image]))
    assert why in error["message"]
    assert "content[1]: the image can't be shown" in error["message"] or api is ollama
    if api in (chat, responses):
        assert error["code"] == "invalid_image"
        assert error["param"].endswith("content[1]")


@APIS
def test_a_broken_image_in_a_result_does_not_end_the_session(api: Make, tight: LiveServer) -> None:
    with tight.http() as http:
        ask(http, api([ONE, "AAAA"]))
    asked = tight.engine.requests[-1]
    assert len(asked.images) == 1
    assert "not shown, it can't be read]" in asked.text


@pytest.fixture(scope="module")
def tight() -> Iterator[LiveServer]:
    with seeing(max_images=3, max_image_pixels=1000, max_image_bytes=50_000) as running:
        yield running


@APIS
def test_the_number_and_the_bytes_of_images_are_bounded(api: Make, tight: LiveServer) -> None:
    many = [base64_of(picture(seed)) for seed in range(1, 5)]
    large = base64_of(picture(1, (30, 30)).convert("RGB"), compress_level=0) + "A" * 70_000
    with tight.http() as http:
        assert "max_images" in error_of(http, api(many))["message"]
        assert "max_image_bytes" in error_of(http, api([large]))["message"]


@APIS
def test_a_server_may_show_a_placeholder_all_the_same(api: Make) -> None:
    with seeing(images="placeholder") as server, server.http() as http:
        path, body = api([ONE, TWO])
        answer = http.post(path, json={"model": "scripted", **body})
        assert (answer.status_code, "images" in answer.headers["warning"]) == (200, True)
        assert not server.engine.requests[-1].images
    with seeing(images="refuse") as server, server.http() as http:
        assert "--images refuse" in error_of(http, api([ONE]))["message"]


def test_only_a_model_that_sees_can_show() -> None:
    with pytest.raises(ConfigError, match="this model does not see"):
        create_app(ScriptedEngine(), ServerSettings(images="show"))


def test_addresses_are_not_fetched_by_default(http: httpx.Client) -> None:
    said = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}
    error = error_of(http, ("/v1/chat/completions", {"messages": [{"role": "user", "content": [said]}]}))
    assert "--image-urls" in error["message"]
    file = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
    error_of(http, ("/v1/chat/completions", {"messages": [{"role": "user", "content": [file]}]}))


def test_detail_decides_the_size(server: LiveServer, http: httpx.Client) -> None:
    sizes = {}
    url = data_url(picture(4, (1024, 512)))
    for detail in ("low", "auto", "high", "original"):
        image = {"type": "image_url", "image_url": {"url": url, "detail": detail}}
        ask(
            http,
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [image]}], "max_tokens": 2}),
        )
        (shown,) = shown_in(server.engine.requests[-1])
        sizes[detail] = (shown.width, shown.height)
    assert sizes == {"low": (512, 256), **dict.fromkeys(("auto", "high", "original"), (1024, 512))}
    image = {"type": "image_url", "image_url": {"url": url, "detail": "huge"}}
    error = error_of(http, ("/v1/chat/completions", {"messages": [{"role": "user", "content": [image]}]}))
    assert "detail must be one of auto, low, high, original" in error["message"]


def test_counting_routes_count_images(http: httpx.Client) -> None:
    path, body = messages([ONE, TWO])
    answer = ask(http, (path, body))
    del body["max_tokens"]
    assert ask(http, ("/v1/messages/count_tokens", body))["input_tokens"] == counted(answer)[0]
    path, body = responses([ONE, TWO])
    answer = ask(http, (path, body))
    del body["max_output_tokens"]
    assert ask(http, ("/v1/responses/input_tokens", body))["input_tokens"] == counted(answer)[0]
    path, body = chat([ONE, TWO])
    answer = ask(http, (path, body))
    assert ask(http, ("/tokenize", {"messages": body["messages"]}))["count"] == counted(answer)[0]


def test_a_stored_response_keeps_its_images(server: LiveServer, http: httpx.Client) -> None:
    path, body = responses([ONE, TWO])
    first = ask(http, (path, body))
    items = http.get(f"/v1/responses/{first['id']}/input_items?order=asc").json()["data"]
    assert items[0]["content"][1]["image_url"] == f"data:image/png;base64,{ONE}"
    assert items[2]["output"][0]["type"] == "input_image"
    before = server.engine.requests[-1].prompt
    ask(http, (path, {"instructions": "be brief", "input": "and?", "previous_response_id": first["id"]}))
    after = server.engine.requests[-1]
    assert shown_in(after) == [IMAGES[ONE], IMAGES[TWO]]
    assert after.prompt[: len(before)] == before


def test_a_thread_keeps_its_images(server: LiveServer, http: httpx.Client) -> None:
    path, body = messages([ONE, TWO])
    first = ask(http, (path, {**body, "thread": {"type": "create"}}))
    goes_on = {"type": "continue", "previous_message_id": first["id"]}
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": THREE}}
    ask(
        http, (path, {"messages": [{"role": "user", "content": [block]}], "max_tokens": 4, "thread": goes_on})
    )
    assert shown_in(server.engine.requests[-1]) == [IMAGES[ONE], IMAGES[TWO], IMAGES[THREE]]


def test_breakpoints_stand_behind_images(server: LiveServer, http: httpx.Client) -> None:
    path, body = messages([ONE])
    body["messages"][0]["content"][1]["cache_control"] = {"type": "ephemeral"}
    body["messages"][0]["content"].append({"type": "text", "text": "and now?"})
    ask(http, (path, body))
    asked = server.engine.requests[-1]
    (pin,) = asked.pins
    text = bytes(i for i in asked.prompt[pin.num_tokens :] if i < 256)
    assert text.startswith((b"and now?", b"\nand now?"))


def test_no_text_can_spell_an_image(server: LiveServer, http: httpx.Client) -> None:
    """What the model is told of an image in words is no way to show it."""
    path, body = chat([ONE])
    ask(http, (path, body))
    body["messages"][-1]["content"].append({"type": "text", "text": IMAGES[ONE].words})
    ask(http, (path, body))
    assert len(server.engine.requests[-1].images) == 1


def test_owners_do_not_share_decoded_images() -> None:
    """Each tenant's image is decoded anew: no time tells of another's."""
    with seeing(api_keys=("a=key-aaaaaaaaaaaaaaaa", "b=key-bbbbbbbbbbbbbbbb")) as server:
        got = []
        for key in ("key-aaaaaaaaaaaaaaaa", "key-bbbbbbbbbbbbbbbb", "key-aaaaaaaaaaaaaaaa"):
            with server.http(headers={"authorization": f"Bearer {key}"}) as http:
                ask(http, chat([ONE]))
            got += shown_in(server.engine.requests[-1])
        assert got[0] is got[2]
        assert got[0] is not got[1]
