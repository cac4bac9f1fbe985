# SPDX-License-Identifier: Apache-2.0
"""`radixkv explain`: text around a break, chats, files that are none, and running servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from live_server import LiveServer, live_server
from scripted_engine import ByteTokenizer, ScriptedEngine
from typer.testing import CliRunner

from radixkv.cli import main as cli
from radixkv.errors import ConfigError
from radixkv.model.loading import loader

RULES = "Count the ships every evening and write their number into the book. "


@pytest.fixture(autouse=True)
def small_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "load_tokenizer", lambda config: ByteTokenizer())
    monkeypatch.delenv("RADIXKV_API_KEY", raising=False)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(), api_keys=("ada=ada-key",)) as running:
        yield running


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.command_tree(), ["explain", *map(str, arguments)])


def refusal(*arguments: object) -> str:
    """The message that `radixkv` prints after its own name, without a traceback."""
    result = run(*arguments)
    assert isinstance(result.exception, ConfigError), (result.exception, result.output)
    return str(result.exception)


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": RULES}, {"role": "user", "content": text}]


def test_it_shows_text_not_token_ids(tmp_path: Path) -> None:
    one = write(tmp_path / "a.txt", "It is 7:01. " + RULES)
    two = write(tmp_path / "b.txt", "It is 7:02. " + RULES)
    shown = run(one, two).output
    assert f"{one}: 0 of 80 tokens are cached: first_seen." in shown
    assert f"{two}: 9 of 80 tokens are cached: diverged." in shown
    assert 'before   "It is 7:0"' in shown
    assert 'prompt   "2. Count the ships' in shown
    assert 'cached   "1. Count the ships' in shown


def test_causes_and_advice_are_those_of_a_server(tmp_path: Path) -> None:
    old = [{"role": "system", "content": f"It is 2026-11-21 09:12. {RULES}"}, *chat("How many?")[1:]]
    new = [{"role": "system", "content": f"It is 2026-11-21 09:47. {RULES}"}, *chat("How many?")[1:]]
    report = tmp_path / "reports.json"
    shown = run(write(tmp_path / "a.json", old), write(tmp_path / "b.json", new), "--json", report).output
    first, second = json.loads(report.read_text(encoding="utf-8"))
    assert first["breaker"] is None
    assert second["breaker"] == {"kind": "timestamp", "place": "the system prompt"}
    assert second["advice"] in shown
    texts = [write(tmp_path / f"{n}.txt", f"It is 2026-11-21 09:{n}. {RULES * 4}") for n in (12, 47)]
    assert run(*texts, "--json", report).exit_code == 0
    found = json.loads(report.read_text(encoding="utf-8"))[1]["breaker"]
    assert found == {"kind": "timestamp", "place": "the prompt"}


def test_settings_of_the_engine_come_from_a_file(tmp_path: Path) -> None:
    prompt = write(tmp_path / "a.txt", RULES)
    settings = write(tmp_path / "explain.toml", "block-size = 32\n[engine]\npin_budget = 2")
    assert "pin_budget must be from 0 to below 1" in refusal(prompt, "--config", settings)
    write(settings, "num-blocks = 1")
    assert "5 blocks are needed" in str(run(prompt, "--config", settings).exception)
    assert run(prompt, "--config", settings, "--num-blocks", 99).exit_code == 0, "flags win over the file"


def test_a_json_chat_is_a_chat(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    first = write(tmp_path / "a.json", chat("How many?"))
    second = write(tmp_path / "b.json", {"messages": chat("How few?"), "temperature": 0.5})
    assert run(first, "--prompt", second, "--json", out).exit_code == 0
    reports = json.loads(out.read_text())
    tokenizer = ByteTokenizer()
    assert reports[0]["prompt_tokens"] == len(tokenizer.apply_chat_template(chat("How many?")))
    assert reports[1]["around"]["before"].endswith("user\nHow ")
    assert [report["file"] for report in reports] == [str(first), str(second)]
    as_text = write(tmp_path / "c.json", '{"no": "chat"}')
    assert f"of {len(as_text.read_text())} tokens" in run(as_text).output


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    image.write_bytes(b"abc\xff\xfe")
    assert "image.png is not UTF-8 text (byte 3 is 0xff)" in refusal(image)
    assert "No such file" in refusal(tmp_path / "none.txt")
    assert "is empty" in refusal(write(tmp_path / "empty.txt", ""))
    assert "at least one file" in refusal()
    good = write(tmp_path / "good.txt", RULES)
    assert "--json" in refusal(good, "--json", tmp_path / "no" / "such" / "folder.json")
    assert "a folder" in refusal(good, "--json", tmp_path)
    bad_chat = write(tmp_path / "bad.json", {"messages": [{"role": "user"}]})
    assert "bad.json" in refusal(bad_chat)


def test_a_running_server_is_asked(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ByteTokenizer().encode("It is 7:01. " + RULES)
    lease = server.engine.prefix_cache.acquire(ids, server.engine.cache.namespace("ada"))
    lease.commit(len(ids))
    lease.release()
    prompt = write(tmp_path / "p.txt", "It is 7:02. " + RULES)
    key_file = write(tmp_path / "key", "ada-key\n")
    shown = run(prompt, "--url", server.url, "--api-key-file", key_file).output
    assert "9 of 80 tokens are cached: diverged." in shown
    assert 'cached   "1. Count the ships' in shown
    assert "A time at token 9" in shown
    monkeypatch.setenv("RADIXKV_API_KEY", "ada-key")
    compared = write(tmp_path / "c.json", {"compare": {"prompt": "same A", "with": "same B"}})
    shown = run(compared, "--url", server.url + "/").output
    assert "5 of 6 tokens are shared." in shown
    assert 'with     "B"' in shown
    assert not server.engine.requests, "nothing goes to the model"


def test_servers_that_do_not_help(server: LiveServer, tmp_path: Path) -> None:
    prompt = write(tmp_path / "p.txt", RULES)
    assert "401" in refusal(prompt, "--url", server.url)
    assert "does not answer" in refusal(prompt, "--url", "http://127.0.0.1:1")
    assert "does not answer" in refusal(prompt, "--url", "not a url")
    assert "must hold one key" in refusal(
        prompt, "--url", server.url, "--api-key-file", write(tmp_path / "k", "")
    )
    assert "--api-key-file" in refusal(prompt, "--url", server.url, "--api-key-file", tmp_path / "none")
    assert "--url" in refusal(prompt, "--api-key-file", prompt)
    assert "leave the engine's options" in refusal(prompt, "--url", server.url, "--block-size", 32)
