"""Tenants on one cache, through the server: nobody hits another's prefixes, and floods respect floors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from live_server import live_server
from paged_language_model import LetterTokenizer, make_engine

from radixkv.async_engine import AsyncEngine
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
