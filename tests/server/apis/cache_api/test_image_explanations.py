# SPDX-License-Identifier: Apache-2.0
"""Images in explanations and in views of the cache: words, thumbnails, and why another image misses."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from PIL import Image
from scripted_engine import ScriptedEngine
from scripted_images import ScriptedImageProcessor, data_url, file_of, picture

from radixkv.images.image_files import decode_image

Body = dict[str, Any]
SCREEN = picture(1, (320, 200))
OTHER = picture(2, (320, 200))
SMALL = SCREEN.resize((160, 100), Image.Resampling.LANCZOS)
KEYS = {"api_keys": ("ada=key-aaaaaaaaaaaaaaaa", "bob=key-bbbbbbbbbbbbbbbb")}


def conversation(image: Image.Image) -> list[Body]:
    shown = {"type": "image_url", "image_url": {"url": data_url(image)}}
    return [
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, shown]},
        {"role": "assistant", "content": "a harbour"},
        {"role": "user", "content": "And now?"},
    ]


def words(image: Image.Image) -> str:
    return decode_image(file_of(image), 10**6).words


@pytest.fixture
def server() -> Iterator[LiveServer]:
    engine = ScriptedEngine(caches=True, image_processor=ScriptedImageProcessor(), num_blocks=500)
    with live_server(engine) as running:
        yield running


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def explained(http: httpx.Client, first: Image.Image, second: Image.Image) -> Body:
    chat = {"messages": conversation(first), "max_tokens": 2}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
    answer = http.post("/v1/cache/explain", json={"messages": conversation(second)})
    assert answer.status_code == 200, answer.text
    found: Body = answer.json()
    return found


def test_the_same_image_hits(http: httpx.Client) -> None:
    answer = explained(http, SCREEN, SCREEN)
    assert answer["cached_tokens"] >= answer["prompt_tokens"] - 20


@pytest.mark.parametrize(
    ("other", "kind", "said"),
    [
        (OTHER, "another_image", "Another image"),
        (SMALL, "image_resized", "The same image at another size"),
    ],
)
def test_the_image_is_named_as_the_reason(
    http: httpx.Client, other: Image.Image, kind: str, said: str
) -> None:
    answer = explained(http, SCREEN, other)
    assert answer["reason"] == "diverged"
    assert answer["breaker"]["kind"] == kind
    assert f"{said} in the 1st user message" in answer["advice"], answer["advice"]
    assert answer["advice"].startswith(
        f"An image at token 19 (“{words(other)}” instead of “{words(SCREEN)}”)"
    )
    assert answer["around"]["before"].endswith("What is this?")
    assert answer["around"]["prompt"].startswith(words(other))
    assert answer["around"]["cached"].startswith(words(SCREEN))


def test_compared_prompts_show_their_images(http: httpx.Client) -> None:
    pair = {"prompt": conversation(SCREEN), "with": conversation(OTHER)}
    answer = http.post("/v1/cache/explain", json={"compare": pair}).json()
    assert answer["around"]["prompt"].startswith(words(SCREEN))
    assert answer["around"]["with"].startswith(words(OTHER))


def test_requests_and_the_tree_show_words(http: httpx.Client) -> None:
    explained(http, SCREEN, SCREEN)
    (request,) = http.get("/v1/cache/requests").json()["data"]
    assert f"What is this?{words(SCREEN)}" in request["text"]
    tree = http.get("/v1/cache/tree").json()
    assert any(words(SCREEN) in (node["text"] or "") for node in tree["nodes"])


def test_a_thumbnail_is_its_own_tenants_alone() -> None:
    engine = ScriptedEngine(caches=True, image_processor=ScriptedImageProcessor(), num_blocks=500)
    name = words(SCREEN).split()[1]
    with live_server(engine, **KEYS) as server, server.http() as http:
        ada, bob = ({"x-api-key": f"key-{letter * 16}"} for letter in "ab")
        sent = {"messages": conversation(SCREEN), "max_tokens": 2}
        assert http.post("/v1/chat/completions", json=sent, headers=ada).status_code == 200
        shown = http.get(f"/v1/cache/images/{name}", headers=ada).json()
        assert (shown["width"], shown["height"]) == SCREEN.size
        data = base64.b64decode(shown["thumbnail"].partition(",")[2])
        assert max(Image.open(io.BytesIO(data)).size) == 96
        assert http.get(f"/v1/cache/images/{name}", headers=bob).status_code == 404
        assert http.get("/v1/cache/images/00000000", headers=ada).status_code == 404
