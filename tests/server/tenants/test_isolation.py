# SPDX-License-Identifier: Apache-2.0
"""Tenants on one cache, through the server: nobody hits another's prefixes, and floods respect floors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import live_server
from paged_language_model import LetterTokenizer, make_engine

from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv_server.tenants.api_keys import stored_form

KEYS = f"""
[tenants.quiet]
keys = ["{stored_form("q")}"]
floor_blocks = 12
[tenants.noisy]
keys = ["{stored_form("n")}"]
"""


def ask(client: httpx.Client, key: str, prompt: str) -> int:
    """Cached tokens of a completion."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = client.post("/v1/completions", headers={"x-api-key": key}, json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_tenants_share_nothing_but_what_is_public_and_floors_hold(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    engine = AsyncEngine(make_engine(num_blocks=48, block_size=8, tokenizer=LetterTokenizer())[0])
    mine = "the quiet tenant has a prompt of its own, which is long enough for some blocks"
    public = "what everybody may read and nobody owns, "
    with live_server(engine, keys_file=str(path), admin_keys=["adm"]) as server, server.http() as client:
        assert ask(client, "q", mine) == 0
        first = ask(client, "q", mine)
        assert first > 0
        assert [ask(client, "n", mine) for _ in range(1)] == [0], "another tenant's prefix is not hit"
        for i in range(30):
            ask(client, "n", f"{i} is the number of this prompt, one of a flood that fills the whole pool")
        assert ask(client, "q", mine) == first, "the flood did not push the tenant under its floor"
        done = client.post("/v1/cache/public", headers={"x-api-key": "adm"}, json={"prompt": public})
        assert done.status_code < 300, done.text
        ask(client, "q", public + "asks one")
        assert ask(client, "n", public + "asks the other") > 0


CEILING = f"""
[tenants.small]
keys = ["{stored_form("s")}"]
ceiling_blocks = 4
"""

LONG_TEXT = "x" * 40
LONG_CHAT = {"messages": [{"role": "user", "content": LONG_TEXT}]}
ROUTES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "short", "max_tokens": 99}, {"prompt": LONG_TEXT}),
    ("/v1/completions", {"prompt": ["short", "two"], "n": 2}, {"prompt": ["short", LONG_TEXT, "two"]}),
    ("/v1/completions", {"prompt": "short", "best_of": 3}, {"prompt": LONG_TEXT, "best_of": 3}),
    ("/v1/chat/completions", {"n": 2}, LONG_CHAT),
    ("/v1/responses", {"input": "short"}, {"input": LONG_TEXT}),
    (
        "/v1/messages",
        {"max_tokens": 99},
        {"max_tokens": 9, **LONG_CHAT},
    ),
]


@pytest.mark.parametrize(("path", "fits", "never"), ROUTES)
def test_a_ceiling_refuses_what_never_fits_and_ends_what_reaches_it(
    tmp_path: Path, path: str, fits: dict[str, Any], never: dict[str, Any]
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(CEILING)
    engine, model = make_engine(num_blocks=64, block_size=8, tokenizer=LetterTokenizer())
    messages = {"messages": [{"role": "user", "content": "short"}]}
    base = messages if path.endswith(("chat/completions", "messages")) else {}
    more = {} if path.endswith(("responses", "messages")) else {"ignore_eos": True}
    headers = {"x-api-key": "s"}
    with live_server(AsyncEngine(engine), keys_file=str(file)) as server, server.http() as client:
        for stream in (False, True)[: 1 + ("best_of" not in never)]:
            refused = client.post(path, headers=headers, json={**base, **never, "stream": stream})
            assert refused.status_code == 400, refused.text
            assert "ceiling_blocks" in refused.json()["error"]["message"]
            if path != "/v1/messages":
                assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert not model.batches, "no work was done for it"
        answer = client.post(path, headers=headers, json={**base, **fits, **more, "temperature": 0})
        assert answer.status_code == 200, answer.text
        said = answer.json()
        if "choices" in said and "max_tokens" not in fits:
            assert {choice["finish_reason"] for choice in said["choices"]} == {"length"}
