# SPDX-License-Identifier: Apache-2.0
"""Images in messages, of every API: refused in the user's latest words, and a short text elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine

from radixkv.errors import ConfigError
from radixkv_server.settings import ServerSettings

Body = dict[str, Any]
PNG = base64.b64encode(b"\x89PNG" + bytes(200)).decode()
OTHER = base64.b64encode(b"\x89PNG" + bytes(201)).decode()
SHOWN = "not shown, this model reads text]"
WARNING = "images, files and sounds (the model is shown a short text for each)"


def _data_url(data: str) -> str:
    return f"data:image/png;base64,{data}"


def chat(data: str, *, place: str) -> tuple[str, Body]:
    part = {"type": "image_url", "image_url": {"url": _data_url(data), "detail": "high"}}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said, answer = {"role": "user", "content": [{"type": "text", "text": "see"}, part]}, {"role": "assistant"}
    messages = {
        "latest": [said],
        "history": [said, {**answer, "content": "nice"}, {"role": "user", "content": "and?"}],
        "result": [
            {"role": "user", "content": "look"},
            {**answer, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [part]},
        ],
        # Where tools can give text alone, clients show an image after it.
        "beside": [
            {"role": "user", "content": "look"},
            {**answer, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "see below"},
            said,
        ],
    }
    return "/v1/chat/completions", {"messages": messages[place]}


def messages(data: str, *, place: str) -> tuple[str, Body]:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1"}
    said = {"role": "user", "content": [{"type": "text", "text": "see"}, image]}
    before = [{"role": "user", "content": "look"}, {"role": "assistant", "content": [call]}]
    shown = {
        "latest": [said],
        "history": [said, {"role": "assistant", "content": "nice"}, {"role": "user", "content": "and?"}],
        "result": [*before, {"role": "user", "content": [{**result, "content": [image]}]}],
        "beside": [*before, {"role": "user", "content": [{**result, "content": "see below"}, image]}],
    }
    return "/v1/messages", {"messages": shown[place], "max_tokens": 8}


def responses(data: str, *, place: str) -> tuple[str, Body]:
    part = {"type": "input_image", "image_url": _data_url(data), "detail": "auto"}
    said = {"role": "user", "content": [{"type": "input_text", "text": "see"}, part]}
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1"}
    before = [{"role": "user", "content": "look"}, call]
    items = {
        "latest": [said],
        "history": [said, {"role": "assistant", "content": "nice"}, {"role": "user", "content": "and?"}],
        "result": [*before, {**result, "output": [part]}],
        "beside": [*before, {**result, "output": "see below"}, said],
    }
    return "/v1/responses", {"input": items[place]}


APIS = pytest.mark.parametrize("api", [chat, messages, responses])
Api = Callable[..., tuple[str, Body]]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine()) as running:
        yield running


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def ask(http: httpx.Client, asked: tuple[str, Body]) -> httpx.Response:
    path, body = asked
    return http.post(path, json={"model": "scripted", **body})


@APIS
def test_an_image_that_the_user_shows_now_is_refused_by_its_place(http: httpx.Client, api: Api) -> None:
    answer = ask(http, api(PNG, place="latest"))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "[0].content[1]: the model reads text" in error["message"]
    if api is not messages:
        assert error["code"] == "unsupported_content"
        assert error["param"] == ("input" if api is responses else "messages") + "[0].content[1]"


@APIS
@pytest.mark.parametrize("place", ["history", "result", "beside"])
def test_images_elsewhere_become_a_short_text_and_a_warning(
    server: LiveServer, http: httpx.Client, api: Api, place: str
) -> None:
    """A session goes on after a tool has shown a picture, and its next turn finds the prompt."""
    prompts = []
    for data in (PNG, PNG, OTHER):
        answer = ask(http, api(data, place=place))
        assert answer.status_code == 200, answer.text
        assert WARNING in answer.headers["warning"]
        prompts.append(server.engine.requests[-1].text)
    assert prompts[0] == prompts[1], "the text is a function of the image alone"
    assert prompts[0] != prompts[2], "another image is another text"
    assert prompts[0].count(SHOWN) == 1
    assert PNG[:40] not in prompts[0]
    shown = prompts[0][: prompts[0].index(SHOWN)].rpartition("[")[2] + SHOWN
    assert len(shown) < 64


@APIS
def test_a_server_may_replace_all_or_refuse_all(api: Api) -> None:
    with live_server(ScriptedEngine(), images="placeholder") as lenient, lenient.http() as http:
        answer = ask(http, api(PNG, place="latest"))
        assert (answer.status_code, WARNING in answer.headers["warning"]) == (200, True)
        assert lenient.engine.requests[-1].text.count(SHOWN) == 1
    with live_server(ScriptedEngine(), images="refuse") as strict, strict.http() as http:
        for place in ("latest", "history", "result"):
            answer = ask(http, api(PNG, place=place))
            assert answer.status_code == 400
            assert "--images refuse" in answer.json()["error"]["message"]


def test_the_setting_is_one_of_four() -> None:
    with pytest.raises(
        ConfigError, match="images must be one of auto, show, placeholder, refuse, not 'hide'"
    ):
        ServerSettings(images="hide")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA", "filename": "a.pdf"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        {"type": "video_url", "video_url": {"url": "https://a.example/b.mp4"}},
    ],
)
def test_files_and_sounds_are_replaced_as_images_are(
    server: LiveServer, http: httpx.Client, part: Body
) -> None:
    said = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "x"}]
    answer = ask(http, ("/v1/chat/completions", {"messages": [*said, {"role": "user", "content": "go on"}]}))
    assert answer.status_code == 200, answer.text
    assert server.engine.requests[-1].text.count(SHOWN) == 1


def test_documents_of_text_are_shown_and_others_keep_their_title(
    server: LiveServer, http: httpx.Client
) -> None:
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}
    page = {"type": "content", "content": [{"type": "text", "text": "a page"}]}
    blocks = [
        {"type": "document", "title": "Report", "source": pdf, "cache_control": {"type": "ephemeral"}},
        {"type": "document", "source": page},
    ]
    said = [{"role": "user", "content": blocks}, {"role": "assistant", "content": "x"}]
    body = {"messages": [*said, {"role": "user", "content": "go on"}], "max_tokens": 4}
    answer = ask(http, ("/v1/messages", body))
    assert answer.status_code == 200, answer.text
    asked = server.engine.requests[-1]
    assert "Report\n[file " in asked.text
    assert "a page" in asked.text
    assert len(asked.pins) == 1, "the breakpoint stands after the text"


def test_addresses_that_are_signed_anew_are_the_same_text(server: LiveServer, http: httpx.Client) -> None:
    texts = []
    for signature in ("a", "b"):
        url = f"https://files.example/cat.png?signature={signature}"
        said = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        history = [said, {"role": "assistant", "content": "x"}, {"role": "user", "content": "go on"}]
        assert ask(http, ("/v1/chat/completions", {"messages": history})).status_code == 200
        texts.append(server.engine.requests[-1].text)
    assert texts[0] == texts[1]


def test_a_part_without_its_content_is_an_error(http: httpx.Client) -> None:
    said = [{"role": "user", "content": [{"type": "image_url"}]}, {"role": "assistant", "content": "x"}]
    answer = ask(http, ("/v1/chat/completions", {"messages": said}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0]"


def test_a_screenshot_may_be_larger_than_the_context() -> None:
    asked = chat(base64.b64encode(bytes(3_000_000)).decode(), place="result")
    with live_server(ScriptedEngine(max_model_len=512)) as server, server.http() as http:
        assert ask(http, asked).status_code == 200
        assert len(server.engine.requests[-1].prompt) < 200
    with live_server(ScriptedEngine(max_model_len=512), images="refuse") as server, server.http() as http:
        assert ask(http, asked).status_code == 413
