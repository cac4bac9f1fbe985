# SPDX-License-Identifier: Apache-2.0
"""API keys: every route is closed without one, and each name is a namespace of its own."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from fastapi import APIRouter, Request
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine

from radixkv.errors import ConfigError
from radixkv_server.app import APIS
from radixkv_server.dialect import Api
from radixkv_server.http.middleware import require_admin
from radixkv_server.http.request_record import record_of
from radixkv_server.settings import ServerSettings, make_settings
from radixkv_server.tenants.api_keys import keys_from_environment, parse_api_key
from radixkv_server.tenants.tenant import Tenant

KEYS = ("alice=key-a", "alice=key-a2", "bob=key-b", "bare-key")
MESSAGES = [{"role": "user", "content": "say:hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(), api_keys=KEYS) as running:
        yield running


ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/scripted"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
    ("GET", "/no/such/route"),
    ("DELETE", "/v1/chat/completions"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "missing_api_key"),
        ({"authorization": "Bearer"}, "missing_api_key"),
        ({"authorization": "Basic key-a"}, "missing_api_key"),
        ({"authorization": "Bearer wrong"}, "invalid_api_key"),
        ({"authorization": "Bearer alice=key-a"}, "invalid_api_key"),
        ({"authorization": "Bearer KEY-A"}, "invalid_api_key"),
        ({"x-api-key": "wrong"}, "invalid_api_key"),
    ],
)
def test_no_route_without_a_key(
    server: LiveServer, method: str, path: str, headers: dict[str, str], code: str
) -> None:
    before = len(server.engine.requests)
    with server.http() as client:
        answer = client.request(method, path, headers=headers, json={} if method == "POST" else None)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == code
    assert answer.headers["www-authenticate"] == "Bearer"
    assert len(server.engine.requests) == before


def test_health_needs_no_key(server: LiveServer) -> None:
    with server.http() as client:
        assert client.get("/health").status_code == 200


def test_keys_let_in_and_say_whose_the_cache_is(server: LiveServer) -> None:
    tenants = []
    for key in ("key-a", "key-a2", "key-b", "bare-key"):
        with server.openai(key) as client:
            client.chat.completions.create(
                model="scripted", messages=MESSAGES, extra_body={"cache_salt": "s"}
            )
        asked = server.engine.requests[-1]
        assert asked.salt == "s"
        tenants.append(asked.tenant)
    assert tenants[0] == tenants[1] == "alice", "two keys of one name share the namespace"
    assert tenants[2] == "bob"
    assert tenants[3] not in ("alice", "bob", "")
    assert "bare-key" not in tenants[3], "the namespace does not hold the secret"


def test_a_salt_can_not_reach_another_tenant(server: LiveServer) -> None:
    with server.openai("key-a") as client:
        client.chat.completions.create(model="scripted", messages=MESSAGES, extra_body={"cache_salt": "bob"})
    assert server.engine.requests[-1].owner == ("alice", "bob")
    with server.openai("key-b") as client:
        client.chat.completions.create(model="scripted", messages=MESSAGES)
    assert server.engine.requests[-1].owner == ("bob", "")


def test_the_client_raises_its_own_error(server: LiveServer) -> None:
    with server.openai("wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_anthropic_style_header(server: LiveServer) -> None:
    with server.http() as client:
        assert client.get("/v1/models", headers={"x-api-key": "key-b"}).status_code == 200


def test_without_keys_any_key_will_do() -> None:
    with live_server(ScriptedEngine()) as open_server, open_server.openai("anything") as client:
        client.chat.completions.create(model="scripted", messages=MESSAGES)
        assert open_server.engine.requests[-1].owner == ("", "")


def admin_api() -> Api:
    router = APIRouter()

    @router.get("/admin")
    async def admin(request: Request) -> dict[str, str]:
        require_admin(request.scope)
        return {"name": record_of(request.scope).caller.name}

    return Api(router)


def test_what_only_an_admin_may_do() -> None:
    apis = (*APIS, admin_api())
    keys = {"api_keys": KEYS, "admin_keys": ["boss=key-boss"]}
    with live_server(ScriptedEngine(), apis=apis, **keys) as running, running.http() as client:
        for user in ("key-a", "bare-key"):
            refused = client.get("/admin", headers={"x-api-key": user})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_only")
        assert client.get("/admin", headers={"x-api-key": "key-boss"}).json() == {"name": "boss"}
    with live_server(ScriptedEngine(), apis=apis) as running, running.http() as client:
        assert client.get("/admin").json() == {"name": ""}, "without keys everybody is the admin"


def test_parsing_keys() -> None:
    assert parse_api_key("team-a=s3cret").tenant == Tenant("team-a", "user")
    assert parse_api_key("team-a=s3cret").digest == parse_api_key("s3cret").digest
    padded = parse_api_key("c2VjcmV0==")
    assert padded.tenant.name.startswith("key-"), "base64 padding is not a name"
    assert parse_api_key("c2VjcmV0==").tenant == padded.tenant, "stable over restarts"
    for bad in ("", "with space", "tab\t", "ümlaut", "name=with space"):
        with pytest.raises(ConfigError):
            parse_api_key(bad)


def test_settings_refuse_one_secret_for_two_names() -> None:
    with pytest.raises(ConfigError, match="given to 'a' and 'b'"):
        ServerSettings(api_keys=("a=same", "b=same"))
    with pytest.raises(ConfigError, match="as an admin's and as a user's"):
        ServerSettings(api_keys=("a=same",), admin_keys=("a=same",))


def test_secrets_are_not_shown() -> None:
    settings = ServerSettings(api_keys=("a=s3cret",))
    assert "s3cret" not in repr(settings)
    assert settings.api_keys == ("a=s3cret",)


def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keys_from_environment({"RADIXKV_API_KEY": "a=k1, k2"}) == ("a=k1", "k2")
    monkeypatch.setenv("RADIXKV_API_KEY", "from-env")
    assert make_settings(host="127.0.0.1").api_keys == ("from-env",)
    assert make_settings(api_keys=["given"]).api_keys == ("given",), "flags win over the environment"
    monkeypatch.delenv("RADIXKV_API_KEY")
    assert make_settings(port=0, api_keys=None, served_model_names=None, allowed_hosts=None).api_keys == ()


@pytest.mark.parametrize(
    "options",
    [{"port": 70_000}, {"max_body_bytes": 0}, {"header_timeout_s": -1}, {"no_such_option": 1}, {"host": ""}],
)
def test_wrong_settings(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        make_settings(**options)


def test_a_missing_key_is_asked_for_in_both_headers(server: LiveServer) -> None:
    with server.http() as client:
        for path in ("/v1/models", "/v1/messages"):
            message = client.get(path).json()["error"]["message"]
            assert "Authorization: Bearer" in message
            assert "x-api-key" in message
