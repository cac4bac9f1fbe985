# SPDX-License-Identifier: Apache-2.0
"""Tenants: keys files, limits of requests and tokens, quotas, and reading them again."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import openai
import pytest
from live_server import live_server
from scripted_engine import ScriptedEngine
from waiting import Clock

from radixkv.cache.accounts import Quota
from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError
from radixkv_server.app import create_app, serve
from radixkv_server.errors import ApiError
from radixkv_server.settings import ServerSettings
from radixkv_server.tenants.api_keys import keys_from_file, new_secret, stored_form
from radixkv_server.tenants.keys_file import read_keys_file
from radixkv_server.tenants.registry import Limiter, TenantRegistry, TokenBucket
from radixkv_server.tenants.tenant import Limits, Tenant

MESSAGES = [{"role": "user", "content": "say:hello"}]


def keys_file(folder: Path, text: str) -> str:
    """A keys file; `KEY(name)` stands for the stored form of the key `key-name`."""
    for name in ("alice", "bob", "boss"):
        text = text.replace(f"KEY({name})", stored_form(f"key-{name}"))
    path = folder / "keys.toml"
    path.write_text(text)
    return str(path)


# ---------------------------------------------------------------------- limits


def test_a_bucket_fills_evenly_and_may_owe() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    bucket.take(60)
    assert (bucket.remaining, bucket.wait_for(1), bucket.full_in_s) == (0, 1.0, 60.0)
    clock.now += 30
    assert (bucket.remaining, bucket.wait_for(30), bucket.wait_for(40)) == (30, 0.0, 10.0)
    bucket.take(50)
    assert (bucket.remaining, bucket.wait_for(1)) == (0, 21.0)
    bucket.take(-1000)
    assert bucket.remaining == 60, "it never holds more than its limit"
    bucket.take(30)
    bucket.change_limit(600)
    assert bucket.remaining == 300
    clock.now += 1e9
    assert bucket.remaining == 600


def refused(limiter: Limiter, *expected: int) -> ApiError:
    with pytest.raises(ApiError) as caught:
        limiter.enter().expect(*expected) if expected else limiter.enter()
    assert caught.value.status == 429
    return caught.value


def test_requests_a_minute() -> None:
    clock = Clock()
    limiter = Limiter(Limits(requests_per_minute=2), clock)
    for _ in range(2):
        limiter.enter().end(0)
    assert refused(limiter).headers["Retry-After"] == "30"
    clock.now += 29.5
    assert refused(limiter).headers["Retry-After"] == "1"
    clock.now += 0.5
    limiter.enter()


def test_requests_at_a_time() -> None:
    limiter = Limiter(Limits(concurrency=1), Clock())
    visit = limiter.enter()
    assert refused(limiter).code == "concurrency_limit_exceeded"
    visit.end(5)
    visit.end(5)  # told twice, counted once
    limiter.enter()
    refused(limiter)


def test_tokens_are_estimated_before_and_corrected_after() -> None:
    clock = Clock()
    limiter = Limiter(Limits(tokens_per_minute=600), clock)
    visit = limiter.enter()
    visit.expect(100, 200)
    (state,) = limiter.state()
    assert (state.limit, state.remaining, state.reset_s) == (600, 300, 30.0)
    visit.end(150)
    assert limiter.state()[0].remaining == 450
    error = refused(limiter, 400, 100)
    assert error.headers["Retry-After"] == "5"
    assert "450 are left" in error.message
    unknown = limiter.enter()
    unknown.expect(50, 50)
    unknown.end(None)
    assert limiter.state()[0].remaining == 350
    clock.now += 60
    long = limiter.enter()
    long.expect(10, 10_000)  # longer than a minute's tokens: it takes them all
    long.end(1800)
    assert refused(limiter).headers["Retry-After"] == "121", "what was used beyond is owed"
    clock.now += 1000
    assert refused(limiter, 601, 1).headers == {"x-should-retry": "false"}


# ---------------------------------------------------------------------- the keys file


def test_a_keys_file(tmp_path: Path) -> None:
    text = """
    [tenants.alice]
    keys = ["KEY(alice)", "KEY(bob)"]
    requests_per_minute = 60
    floor_blocks = 5
    ceiling_blocks = 50
    [tenants.boss]
    role = "admin"
    keys = ["KEY(boss)"]
    [tenants.from-flag]
    concurrency = 1
    """
    settings = ServerSettings(
        api_keys=("from-flag=other",), admin_keys=("adm",), keys_file=keys_file(tmp_path, text)
    )
    book = TenantRegistry(settings)
    assert book.tenant_of("key-alice") == book.tenant_of("key-bob") == Tenant("alice", "user")
    assert book.tenant_of("key-boss") == Tenant("boss", "admin")
    assert book.tenant_of("other") == Tenant("from-flag", "user")
    assert book.tenant_of("adm").is_admin
    assert book.tenant_of(stored_form("key-alice")) is None
    assert not book.is_open
    named = {name: quota for name, quota in book.quotas.items() if not name.startswith("key-")}
    assert named == {"alice": Quota(5, 50), "boss": Quota(), "from-flag": Quota()}
    assert [state.limit for state in book.limiter_of(Tenant("alice")).state()] == [60]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[tenants.alice]\nkeys = ["s3cret-plain"]', ["[tenants.alice]", "plain text", "radixkv key hash"]),
        ("[tenants.alice]\nrequest_per_minute = 5", ["did you mean requests_per_minute?"]),
        ("[tenants.alice]\nconcurrency = 0", ["concurrency", "at least 1", "0"]),
        ("[tenants.alice]\nconcurrency = true", ["concurrency"]),
        ('[tenants.alice]\nrole = "root"', ["admin", "root"]),
        ("[tenants.alice]\nfloor_blocks = 9\nceiling_blocks = 8", ["ceiling_blocks (8)"]),
        ('[tenants."a b"]', ["'a b'"]),
        ("[tenant.alice]", ["did you mean tenants?"]),
        ("tenants = 5", ["[tenants.alice]"]),
        ("[tenants", ["keys.toml"]),
        ('[tenants.alice]\nkeys = ["KEY(bob)"]\n[tenants.bob]\nkeys = ["KEY(bob)"]', ["'alice'", "'bob'"]),
    ],
)
def test_what_is_wrong_with_a_keys_file_is_said(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = keys_file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        TenantRegistry(ServerSettings(keys_file=path))
    for part in parts:
        assert part in str(caught.value)
    assert "s3cret" not in str(caught.value), "no key is printed"


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n\n")
    (tmp_path / "keys").write_text("# mine\nalice=k1\n\n  k2\n")
    assert keys_from_file(tmp_path / "keys") == ("alice=k1", "k2")
    for wrong in (tmp_path / "none", tmp_path / "empty"):
        with pytest.raises(ConfigError, match="--api-key-file"):
            keys_from_file(wrong)
    with pytest.raises(ConfigError, match="--keys-file"):
        read_keys_file(tmp_path / "none")


#: Hashes that pages of this project have had.
DOCUMENTED = (
    "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    "sha256:ffe1eabe048697bf837b93a8ec684db51b9891236458c8a4d397883c8daa54d2",
)


@pytest.mark.parametrize(
    "secret", ["token-abc123", "EMPTY", "empty", "none", "Password", "sk-1234", "abc", "$ADMIN_KEY"]
)
def test_an_admins_key_that_anybody_can_guess_is_refused(tmp_path: Path, secret: str) -> None:
    path = keys_file(tmp_path, f'[tenants.ops]\nrole = "admin"\nkeys = ["{stored_form(secret)}"]')
    for settings in ({"keys_file": path}, {"admin_keys": (f"ops={secret}",)}, {"admin_keys": (secret,)}):
        with pytest.raises(ConfigError, match=r"anybody can guess; .*`radixkv key new .* --admin`"):
            TenantRegistry(ServerSettings(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("role", ["admin", "user"])
@pytest.mark.parametrize("stored", DOCUMENTED)
def test_a_hash_from_our_pages_is_refused(tmp_path: Path, role: str, stored: str) -> None:
    path = keys_file(tmp_path, f'[tenants.ops]\nrole = "{role}"\nkeys = ["{stored}"]')
    with pytest.raises(ConfigError, match="'ops' is a sample"):
        TenantRegistry(ServerSettings(keys_file=path))


def test_keys_on_our_pages_do_not_work(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "operations.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "[tenants." in block]
    for table in re.split(r"\n\n(?=\[)", block):
        with pytest.raises(ConfigError, match=r"radixkv key new"):
            read_keys_file(keys_file(tmp_path, table))


def test_a_users_key_that_anybody_can_guess_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    book = TenantRegistry(ServerSettings(api_keys=("ada=token-abc123", "bob=7f3k-of-bob")))
    assert book.tenant_of("token-abc123") == Tenant("ada", "user")
    book.warn_of_well_known_keys()
    assert "guess: ada;" in caplog.text


def test_new_keys_differ() -> None:
    assert new_secret() != new_secret()
    assert len(new_secret()) > 40


# ---------------------------------------------------------------------- through the server


LIMITED = """
[tenants.alice]
keys = ["KEY(alice)"]
requests_per_minute = 3
tokens_per_minute = 1000
[tenants.bob]
keys = ["KEY(bob)"]
concurrency = 1
"""


def ask(client: httpx.Client, key: str, **body: object) -> httpx.Response:
    body = {"model": "scripted", "messages": MESSAGES, "max_tokens": 20, **body}
    return client.post("/v1/chat/completions", headers={"authorization": f"Bearer {key}"}, json=body)


def test_limits_and_their_headers(tmp_path: Path) -> None:
    path = keys_file(tmp_path, LIMITED)
    with live_server(ScriptedEngine(), keys_file=path) as server, server.http() as client:
        first = ask(client, "key-alice", messages=[{"role": "user", "content": "word " * 150}])
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "3"
        assert first.headers["x-ratelimit-remaining-requests"] == "2"
        assert 0 < int(first.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 20
        assert first.headers["x-ratelimit-limit-tokens"] == "1000"
        used = first.json()["usage"]["total_tokens"]
        assert 500 < used < 900, "so much that it takes half a minute until all is left again"
        too_many = ask(client, "key-alice", max_tokens=2000, n=1)
        assert too_many.status_code == 429, "the answer could take all that a minute allows"
        assert int(too_many.headers["retry-after"]) >= 1
        assert too_many.json()["error"]["type"] == "rate_limit_error"
        assert int(too_many.headers["x-ratelimit-remaining-tokens"]) >= 1000 - used
        streamed = ask(client, "key-alice", stream=True)
        assert streamed.status_code == 200
        assert "x-ratelimit-remaining-requests" in streamed.headers
        with server.openai("key-alice") as sdk, pytest.raises(openai.RateLimitError) as caught:
            sdk.chat.completions.create(model="scripted", messages=MESSAGES)
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 20
        assert caught.value.code == "rate_limit_exceeded"
        other = ask(client, "key-bob")
        assert other.status_code == 200
        assert not [name for name in other.headers if name.startswith("x-ratelimit")], "bob has no such limit"
        models = client.get("/v1/models", headers={"authorization": "Bearer key-alice"})
        assert models.status_code == 200, "only what generates counts"


def test_anthropics_names_of_limits(tmp_path: Path) -> None:
    path = keys_file(tmp_path, LIMITED)
    with live_server(ScriptedEngine(), keys_file=path) as server, server.http() as client:
        headers = {"x-api-key": "key-alice"}
        body = {"model": "scripted", "messages": MESSAGES, "max_tokens": 20}
        for remaining in (2, 1):
            before = datetime.now(UTC)
            answer = client.post("/v1/messages", headers=headers, json=body)
            assert answer.status_code == 200
            assert answer.headers["anthropic-ratelimit-requests-limit"] == "3"
            assert answer.headers["anthropic-ratelimit-requests-remaining"] == str(remaining)
            reset = datetime.fromisoformat(answer.headers["anthropic-ratelimit-requests-reset"])
            assert timedelta(0) < reset - before < timedelta(minutes=1), "in full seconds, UTC"
            assert answer.headers["anthropic-ratelimit-tokens-limit"] == "1000"
            assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
        free = client.post("/v1/messages/count_tokens", headers=headers, json={**body, "max_tokens": None})
        assert not [name for name in free.headers if "ratelimit" in name], "only what generates counts"
        assert client.post("/v1/messages", headers=headers, json=body).status_code == 200
        refused = client.post("/v1/messages", headers=headers, json=body)
        assert refused.status_code == 429
        assert refused.headers["anthropic-ratelimit-requests-remaining"] == "0"
        assert int(refused.headers["retry-after"]) >= 1


def test_what_has_ended_makes_place(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    path = keys_file(tmp_path, LIMITED)
    with live_server(engine, keys_file=path) as server, server.http() as client:
        headers = {"authorization": "Bearer key-bob"}
        body = {"model": "scripted", "messages": MESSAGES, "stream": True}
        engine.hold_at = 2
        engine.gate.clear()
        with client.stream("POST", "/v1/chat/completions", headers=headers, json=body) as running:
            frames = running.iter_bytes()  # kept: without it the stream is closed
            next(frames)
            with server.http() as second:
                refused = ask(second, "key-bob")
            assert refused.json()["error"]["code"] == "concurrency_limit_exceeded"
        engine.gate.set()
        while ask(client, "key-bob").status_code != 200:
            pass  # until the server has seen that the client has left
        assert ask(client, "key-bob").status_code == 200


def test_quotas_reach_the_cache_and_change_on_a_signal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = keys_file(tmp_path, '[tenants.alice]\nkeys = ["KEY(alice)"]\nfloor_blocks = 5\nconcurrency = 1')
    engine = ScriptedEngine()
    app = create_app(engine, ServerSettings(keys_file=path, api_keys=("carol=key-carol",)))
    book = app.state.context.tenants
    limiter = book.limiter_of(Tenant("alice"))

    def floors() -> dict[str, int]:
        return {usage.namespace[0]: usage.floor for usage in engine.prefix_cache.quota_usage()}

    async def change(text: str, level: int) -> None:
        keys_file(tmp_path, text)
        told = len(caplog.records)
        os.kill(os.getpid(), signal.SIGHUP)
        while len(caplog.records) == told:
            await asyncio.sleep(0)
        assert [record.levelno for record in caplog.records[told:]] == [level]

    async def main() -> None:
        async with app.router.lifespan_context(app):
            assert floors() == {"alice": 5, "carol": 0}
            await change('[tenants.alice]\nkeys = ["oops"]', logging.ERROR)
            await change('[tenants.alice]\nkeys = ["KEY(alice)"]\nfloor_blocks = 101', logging.ERROR)
            assert "the pool has 100" in caplog.records[-1].getMessage()
            assert book.tenant_of("key-alice") == Tenant("alice")
            assert floors() == {"alice": 5, "carol": 0}
            visit = limiter.enter()
            text = '[tenants.alice]\nconcurrency = 2\n[tenants.bob]\nkeys = ["KEY(bob)"]\nfloor_blocks = 7'
            await change(text, logging.WARNING)
            assert book.tenant_of("key-alice") is None
            assert book.tenant_of("key-bob") == Tenant("bob")
            assert floors() == {"alice": 0, "carol": 0, "bob": 7}
            lease = engine.prefix_cache.acquire(range(40), ("carol", ""))
            lease.commit(40)
            await change("[tenants.carol]\nfloor_blocks = 3", logging.WARNING)
            assert floors() == {"alice": 0, "carol": 3, "bob": 0}, "of a flag, and has blocks already"
            lease.release()
            await change(text, logging.WARNING)
            limiter.enter()
            refused(limiter)
            visit.end(0)

    with caplog.at_level(logging.WARNING, logger="radixkv.server"):
        asyncio.run(main())


WHOLE = """[tenants.alice]
keys = ["KEY(alice)"]
[tenants.boss]
role = "admin"
keys = ["KEY(boss)"]
"""


@pytest.mark.parametrize(
    ("left", "flags"),
    [
        ("", {}),
        ("", {"api_keys": ["carol=key-carol"]}),
        ("\n# nothing\n", {}),
        ("[tenants]\n", {}),
        ("[tenants.alice]\n", {}),
        ("[tenants.alice]\n", {"api_keys": ["carol=key-carol"]}),
        ('[tenants.alice]\nkeys = ["sha256:ab', {}),
        ("[tenants.alice]\nkeys = []\n[tenants.boss]\nconcurrency = 3\n", {}),
        ("\0" * 100, {}),
    ],
)
async def test_what_is_left_of_a_keys_file_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, left: str, flags: dict[str, list[str]]
) -> None:
    path = keys_file(tmp_path, WHOLE)
    book = TenantRegistry(ServerSettings(keys_file=path, **flags))
    engine = ScriptedEngine()
    keys_file(tmp_path, left)
    for expected in (left, WHOLE):
        keys_file(tmp_path, expected)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="radixkv.server"):
            await book.reload(engine.cache)
        (record,) = caplog.records
        assert (record.levelno == logging.ERROR) == (expected == left)
        assert path in record.getMessage()
        assert book.tenant_of("key-alice") == Tenant("alice")
        assert book.tenant_of("key-boss") == Tenant("boss", "admin")
    keys_file(tmp_path, '[tenants.alice]\nkeys = []\n[tenants.bob]\nkeys = ["KEY(bob)"]')
    await book.reload(engine.cache)
    assert book.tenant_of("key-alice") is book.tenant_of("key-boss") is None
    assert "gone: boss" in caplog.records[-1].getMessage()


def test_floors_above_the_pool_are_an_error_in_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = keys_file(tmp_path, '[tenants.alice]\nkeys = ["KEY(alice)"]\nfloor_blocks = 101')
    made = []

    def factory(config: EngineConfig) -> ScriptedEngine:
        made.append(config)
        return ScriptedEngine()  # its pool has 100 blocks

    with pytest.raises(ConfigError, match="sum up to 101 blocks; the pool has 50"):
        serve(EngineConfig(num_blocks=50), engine_factory=factory, keys_file=path, port=0)
    assert not made, "known before the model is loaded"
    with pytest.raises(ConfigError, match=r"sum up to 101 blocks; the pool has 100.*floor_blocks"):
        serve(EngineConfig(), engine_factory=factory, keys_file=path, port=0)
    assert made
    assert not caplog.records, "nothing beside the error itself"
    keys_file(tmp_path, '[tenants.alice]\nkeys = ["plain"]')
    with pytest.raises(ConfigError, match=r"\[tenants.alice\] has a key in plain text"):
        serve(EngineConfig(), engine_factory=made.append, keys_file=path, port=0)
    assert len(made) == 1, "known before the model is loaded"


def test_a_hangup_while_the_model_is_loaded_ends_nothing(tmp_path: Path) -> None:
    path = keys_file(tmp_path, WHOLE)
    before = signal.getsignal(signal.SIGHUP)

    def factory(config: EngineConfig) -> ScriptedEngine:
        os.kill(os.getpid(), signal.SIGHUP)
        raise ConfigError("it was loaded up to here")

    with pytest.raises(ConfigError, match="up to here"):
        serve(EngineConfig(), engine_factory=factory, keys_file=path, port=0)
    assert signal.getsignal(signal.SIGHUP) == before
