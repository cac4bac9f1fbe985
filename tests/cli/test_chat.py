# SPDX-License-Identifier: Apache-2.0
"""`radixkv chat`: conversations with a server and in process, commands, and what the terminal's keys do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pexpect
import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine

from radixkv.cli.terminal_chat.partners import RemotePartner, Turn
from radixkv.cli.terminal_chat.session import ChatSession
from radixkv.errors import ConfigError, RequestFailedError


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def server(engine: ScriptedEngine) -> Iterator[LiveServer]:
    with live_server(engine, api_keys=("me=secret",)) as running:
        yield running


OPTIONS: dict[str, Any] = {"model": None, "api_key": "secret", "max_tokens": 64, "temperature": 0.0}


#: As it is drawn: the blank may be skipped over.
PROMPT = r">[ \x08]"


class Screen:
    """What a session printed."""

    def __init__(self, partner: RemotePartner, **options: str) -> None:
        self.text = ""
        self.notes: list[str] = []
        self.session = ChatSession(partner, write=self.write, note=self.notes.append, **options)

    def write(self, piece: str) -> None:
        self.text += piece

    def type(self, *lines: str) -> str:
        """The last note after these lines."""
        for line in lines:
            self.session.take(line)
        return self.notes[-1]


@pytest.fixture
def partner(server: LiveServer) -> Iterator[RemotePartner]:
    with closing(RemotePartner(server.url, **OPTIONS)) as made:
        yield made


def test_a_turn_says_what_was_cached_and_when_the_first_token_came(partner: RemotePartner) -> None:
    screen = Screen(partner, system="be brief")
    note = screen.type("say:hello")
    assert screen.text == "hello\n"
    assert "prompt tokens from the cache (50%)" in note or "(49%)" in note
    assert "first token after " in note
    assert [m["role"] for m in screen.session.messages] == ["system", "user", "assistant"]
    assert screen.session.messages[-1]["content"] == "hello"


def test_commands_change_the_conversation(partner: RemotePartner, tmp_path: Path) -> None:
    screen = Screen(partner)
    session = screen.session
    assert "no system prompt" in screen.type("/system")
    screen.type("/system you are a sailor", "say:ahoy")
    assert session.messages[0] == {"role": "system", "content": "you are a sailor"}
    assert screen.type("/system") == "you are a sailor"
    target = tmp_path / "a chat.json"
    assert "3 messages written" in screen.type(f"/save {target}")
    assert json.loads(target.read_text())["messages"] == session.messages
    before = list(session.messages)
    screen.type("/retry")
    assert session.messages == before
    screen.type("/undo")
    assert [m["role"] for m in session.messages] == ["system"]
    assert "no turn" in screen.type("/undo")
    assert "3 messages loaded" in screen.type(f"/load {target}")
    screen.type("/clear")
    assert session.messages == before[:1]
    screen.type("/system -")
    assert session.messages == []
    assert "/explain" in screen.type("/help")
    assert "there is no /frobnicate" in screen.type("/frobnicate")
    assert "can't be loaded" in screen.type("/load /no/such/file")
    assert "can't be written" in screen.type("/save /no/such/folder/file")
    screen.type("/quit")
    assert session.has_ended


def test_explain_asks_the_server(partner: RemotePartner) -> None:
    screen = Screen(partner)
    screen.session.messages.append({"role": "user", "content": "something new"})
    note = screen.type("/explain")
    assert "cached" in note or "first" in note


def test_an_error_leaves_the_conversation_as_it_was(partner: RemotePartner) -> None:
    screen = Screen(partner)
    note = screen.type("refused by the template")
    assert note.startswith("error: HTTP 400")
    assert screen.session.messages == []
    assert screen.type("say:fine").count("from the cache") == 1


def test_a_wrong_key_or_address_is_told_at_once(server: LiveServer) -> None:
    with pytest.raises(ConfigError, match="401"):
        RemotePartner(server.url, **{**OPTIONS, "api_key": "wrong"})
    with pytest.raises(ConfigError, match="no server"):
        RemotePartner("http://127.0.0.1:9", **OPTIONS)
    other = RemotePartner(server.url, **{**OPTIONS, "model": "other"})
    with closing(other), pytest.raises(RequestFailedError, match="404"):
        list(other.stream([{"role": "user", "content": "x"}], Turn()))


def test_an_interrupt_stops_the_answer_and_keeps_what_was_said(partner: RemotePartner) -> None:
    screen = Screen(partner)

    def write(piece: str) -> None:
        screen.text += piece
        if piece == "h":
            raise KeyboardInterrupt

    session = ChatSession(partner, write=write, note=screen.notes.append)
    session.take("say:hhhhhhhh")
    assert session.messages[-1]["content"].startswith("h")
    assert screen.notes[-1].endswith("stopped")


def test_keys_in_a_terminal(server: LiveServer, tmp_path: Path) -> None:
    """Arrow keys, several lines, Tab, and a history that lasts over sessions and is the user's alone."""
    env = {
        **os.environ,
        "TERM": "xterm",
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "XDG_STATE_HOME": str(tmp_path),
        "RADIXKV_API_KEY": "secret",
    }
    saved = tmp_path / "saved.json"

    def started() -> pexpect.spawn[str]:
        child = pexpect.spawn(
            sys.executable,
            ["-m", "radixkv", "chat", "--url", server.url],
            env=env,
            timeout=60,
            encoding="utf-8",
            dimensions=(24, 250),  # or long paths are broken into lines
        )
        child.expect(PROMPT)
        return child

    child = started()
    child.send("say:xne\x1b[D\x1b[D\x7f\r")  # left twice, then the key that deletes the x
    child.expect("from the cache")
    child.expect(PROMPT)
    child.send("say:two\x1b\rlines\r")  # Alt-Enter
    child.expect("from the cache")
    child.expect(PROMPT)
    child.send("/sa\t")
    child.expect("ve")
    child.send(f" {saved}\r")
    child.expect("4 messages written")
    child.expect(PROMPT)
    child.send("\x04")
    child.expect(pexpect.EOF)
    said = [m["content"] for m in json.loads(saved.read_text())["messages"] if m["role"] == "user"]
    assert said == ["say:ne", "say:two\nlines"]

    child = started()
    child.send("\x1b[A")
    child.expect("saved.json")  # the latest line of the session before
    child.send("\x03")
    child.expect(PROMPT)
    child.send("\x04")
    child.expect(pexpect.EOF)
    history = tmp_path / "radixkv" / "chat_history"
    assert history.stat().st_mode & 0o077 == 0


def test_the_command_chats_with_a_server_without_loading_a_model(server: LiveServer, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    command = [sys.executable, "-X", "importtime", "-m", "radixkv", "chat", "--url", server.url]
    done = subprocess.run(
        [*command, "--api-key-file", str(key)],
        input="say:hi there\n/quit\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "hi there\n"
    assert "from the cache" in done.stderr
    assert " torch" not in done.stderr, "a client needs no model library"


@pytest.mark.nightly
def test_shells_complete_commands() -> None:
    env = {**os.environ, "_RADIXKV_COMPLETE": "complete_bash", "COMP_WORDS": "radixkv se", "COMP_CWORD": "1"}
    code = "import sys; sys.argv[0] = 'radixkv'; from radixkv.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.stdout.split() == ["serve"], done.stderr
