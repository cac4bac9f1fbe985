# SPDX-License-Identifier: Apache-2.0
"""`radixkv serve`: every setting is a flag or an entry of the configuration file; `radixkv key`."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from radixkv.cli import serve_command as cli
from radixkv.cli.config_file import with_entries
from radixkv.cli.main import command_tree
from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError
from radixkv.option_names import TABLE_OF
from radixkv_server.app import with_tenants
from radixkv_server.log_format import JsonFormatter
from radixkv_server.ray_serve.settings import ReplicaSettings
from radixkv_server.settings import ServerSettings, make_settings
from radixkv_server.tenants.api_keys import digest_of
from radixkv_server.tenants.keys_file import read_keys_file

TREE = get_command(command_tree())
assert isinstance(TREE, TyperGroup)
SERVE = TREE.commands["serve"]


def parsed(*arguments: str) -> dict[str, Any]:
    """The values that the command would get."""
    return SERVE.make_context("serve", list(arguments)).params


def test_every_setting_is_a_flag_or_an_entry_of_a_table() -> None:
    options = {param.name: param for param in SERVE.params}
    for settings in (ServerSettings, EngineConfig, ReplicaSettings):
        for item in fields(settings):
            assert (item.name in options) is not (item.name in TABLE_OF), item.name
            assert item.name not in options or not options[item.name].required


def test_a_file_gives_defaults_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(
        """
        model = "some/model"
        port = 9000
        [server]
        served-model-name = ["a", "b"]
        api_key = "alice=k"
        access-log = false
        [engine]
        kv-cache-memory = "2g"
        num-blocks = 7
        prefix-caching = false
        pin-budget = 0
        async_scheduling = false
        namespace-weights = { ada = 3, bob = 0.5 }
        [limits]
        header-timeout-s = 3
        max_queue = 9
        [replicas]
        target_queue_s = 0.5
        """
    )
    found = parsed("--config", str(path), "--num-blocks", "8", "--served-model-name", "c")
    assert found["model"] == "some/model"
    assert (found["port"], found["num_blocks"]) == (9000, 8)
    assert list(found["served_model_names"]) == ["c"]
    assert list(found["api_keys"]) == ["alice=k"]
    assert found["kv_cache_memory"] == "2g"
    assert (found["access_log"], found["enable_prefix_caching"]) == (False, False)
    assert parsed("--config", str(path), "--access-log", "other")["model"] == "other"
    context = SERVE.make_context("serve", ["--config", str(path)])
    assert list(context.params["served_model_names"]) == ["a", "b"]
    engine = with_entries(context, EngineConfig(num_blocks=8))
    assert engine == EngineConfig(
        num_blocks=8,
        pin_budget=0,
        async_scheduling=False,
        namespace_weights={"ada": 3, "bob": 0.5},
        max_queue=9,
    )
    assert with_entries(context, ServerSettings(port=1)) == ServerSettings(port=1, header_timeout_s=3)
    assert with_entries(context, ReplicaSettings()) == ReplicaSettings(target_queue_s=0.5)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[limits]\nmax_queue = 'many'", ["max_queue", "an integer", "'many'", "serve.toml"]),
        ("max_queue = true", ["max_queue", "an integer"]),
        ("[limits]\nping_interval_s = -1", ["ping_interval_s", "above 0"]),
        ("[engine]\npin_budget = 2", ["pin_budget", "below 1", "[engine]"]),
        ("namespace_weights = 3", ["namespace_weights", "a table"]),
        ("namespace_weights = { ada = 'x' }", ["namespace_weights", "numbers above 0"]),
        ("unknown_fields = 'keep'", ["unknown_fields", "warn"]),
        ("[replicas]\nmax_replicas = 3", ["max_replicas", "--replicas"]),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    result = CliRunner().invoke(command_tree(), ["serve", "no-such-model", "--config", str(path)])
    assert isinstance(result.exception, ConfigError)
    for part in parts:
        assert part in str(result.exception)


@pytest.mark.parametrize(
    ("flag", "parts"),
    [
        ("--ping-interval", ["ping_interval_s", "[limits]"]),
        ("--max-queue=4", ["--max-queue", "max_queue", "[limits]"]),
        ("--no-async-scheduling", ["async_scheduling", "[engine]"]),
        ("--namespace-weight", ["namespace_weights", "[engine]"]),
        ("--target_queue", ["target_queue_s", "[replicas]"]),
    ],
)
def test_a_setting_without_a_flag_names_its_table(flag: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(flag, "3")
    for part in (*parts, "--config FILE"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("prot = 1", ["prot", "did you mean port"]),
        ("[limits]\nping-interval = 3", ["[limits] ping-interval", "ping-interval-s"]),
        ("[server]\nserved-models = ['x']", ["[server] served-models", "served-model-name"]),
        ("xyzzy = 1", ["xyzzy", "flags"]),
        ("config = 'x'", ["config"]),
        ("port = 'many'", ["port", "many"]),
        ("port = true", ["port", "one value"]),
        ("access-log = 'yes'", ["access-log", "true or false"]),
        ("api-key = [1]", ["api-key", "texts"]),
        ("port = 1\n[server]\nport = 2", ["twice"]),
        ("port =", ["serve.toml"]),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parsed("--config", str(path))
    for part in ("--config", *parts):
        assert part in str(caught.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        parsed("--config", "/no/such/file.toml")


@pytest.mark.parametrize("command", ["chat", "explain"])
def test_commands_without_a_server_read_the_engines_part_of_its_file(command: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(
        """
        model = "some/model"
        block-size = 32
        [engine]
        pin-budget = 0
        [server]
        port = 9000
        [limits]
        header-timeout-s = 3
        max_queue = 9
        """
    )
    found = get_command(command_tree()).commands[command]  # type: ignore[attr-defined]
    context = found.make_context(command, ["--config", str(path)])
    assert (context.params["model"], context.params["block_size"]) == ("some/model", 32)
    config = with_entries(context, EngineConfig(block_size=32))
    assert config == EngineConfig(block_size=32, pin_budget=0, max_queue=9)
    path.write_text("port = 9000")
    with pytest.raises(ConfigError, match=r"port is not known.*the tables server, limits, replicas"):
        found.make_context(command, ["--config", str(path)])


def test_keys_come_from_flags_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIXKV_API_KEY", "env=k1")
    monkeypatch.setenv("RADIXKV_ADMIN_KEY", "env-admin")
    path = tmp_path / "keys"
    path.write_text("bob=k2\n")
    assert make_settings().api_keys == ("env=k1",)
    assert make_settings().admin_keys == ("env-admin",)
    assert make_settings(api_key_file=str(path)).api_keys == ("bob=k2",)
    assert make_settings(api_key_file=str(path), api_keys=["a=b"]).api_keys == ("a=b", "bob=k2")


def test_several_tenants_are_scheduled_fairly_unless_told_otherwise() -> None:
    one, two = ServerSettings(api_keys=("a=1", "a=2")), ServerSettings(api_keys=("a=1", "b=2"))
    assert with_tenants(EngineConfig(), one).scheduling_policy == "auto"
    assert with_tenants(EngineConfig(), two).scheduling_policy == "fair"
    assert with_tenants(EngineConfig(scheduling_policy="prefix"), two).scheduling_policy == "prefix"


def test_a_new_key_fits_the_keys_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(command_tree(), ["key", "new", "team.a", "--admin"])
    shown, _, *lines = result.output.splitlines()
    secret = shown.rsplit(" ", 1)[1]
    path = tmp_path / "keys.toml"
    path.write_text("\n".join(lines))
    (key,) = read_keys_file(path).keys
    assert (key.tenant.name, key.tenant.role, key.digest) == ("team.a", "admin", digest_of(secret))
    assert secret not in path.read_text()
    hashed = CliRunner().invoke(command_tree(), ["key", "hash"], input=f"{secret}\n").output.strip()
    assert hashed in path.read_text()
    with pytest.raises(ConfigError):
        cli.new_key("no name")


def test_a_key_without_a_name(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    for arguments, name, role in (([], "user", "user"), (["--admin"], "admin", "admin")):
        _, _, *lines = CliRunner().invoke(command_tree(), ["key", *arguments]).output.splitlines()
        path.write_text("\n".join(lines))
        (key,) = read_keys_file(path).keys
        assert (key.tenant.name, key.tenant.role) == (name, role)


def _options(command: Any, path: str = "radixkv") -> Iterator[tuple[str, str]]:
    for param in command.params:
        yield f"{path} {param.name}", getattr(param, "help", None) or ""
    for name, inner in getattr(command, "commands", {}).items():
        yield from _options(inner, f"{path} {name}")


def test_help_has_no_words_of_python() -> None:
    """Flags are named as they are written, and a default is no `None`."""
    names = {item.name for settings in (ServerSettings, EngineConfig) for item in fields(settings)}
    fields_of_requests = {"chat_template"}
    for option, text in _options(TREE):
        assert not re.search(r"\b(None|True|False)\b", text), (option, text)
        named = set(re.findall(r"`(\w+_\w+)`", text)) & names
        assert named <= fields_of_requests, (option, text)


def test_json_logs_are_an_object_a_line() -> None:
    record = logging.LogRecord("radixkv.access", logging.INFO, "", 0, "GET %s", ("/x\n",), None)
    record.fields = {"status": 200, "request_id": "req_1"}
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert found["message"] == "GET /x\n"
    assert (found["level"], found["logger"], found["status"]) == ("info", "radixkv.access", 200)
    assert found["time"].endswith("Z")
    try:
        raise ValueError("oops")
    except ValueError:
        failed = logging.LogRecord("radixkv", logging.ERROR, "", 0, "broken", (), sys.exc_info())
    assert "ValueError: oops" in json.loads(JsonFormatter().format(failed))["error"]
    with pytest.raises(ConfigError, match="log_format"):
        ServerSettings(log_format="xml")
