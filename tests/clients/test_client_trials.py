# SPDX-License-Identifier: Apache-2.0
"""Trials of `make clients` that take seconds; how the others are skipped, and what is written of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import client_environment
import pytest
from client_environment import EnvironmentNotMade, node_environment, python_environment
from client_trials import CLIENTS, ENVIRONMENTS, PROGRAMS, Client, Servers, Trial, serving, try_client
from try_clients import PAGE, page

QUICK = [client for client in CLIENTS if client.is_quick]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with serving(tmp_path_factory.mktemp("trials"), QUICK) as running:
        yield running


@pytest.mark.nightly
@pytest.mark.parametrize("client", QUICK, ids=str)
def test_two_turns_and_a_forced_call(servers: Servers, client: Client) -> None:
    trial = try_client(client, servers)
    if trial.skipped:
        pytest.skip(f"{client} can't be tried here: {trial.skipped}")
    assert trial.works, trial.error
    assert trial.version
    assert trial.prompt_tokens is not None
    assert trial.cached_tokens is not None
    # All of the first turn's prompt was found in the second's.
    assert trial.prompt_tokens > trial.cached_tokens > 1500
    for arguments in trial.called:
        assert isinstance(arguments["city"], str)
        assert isinstance(arguments["days"], int)


def test_every_client_has_a_program_and_an_environment() -> None:
    for client in CLIENTS:
        assert (PROGRAMS / client.program).is_file(), client
        assert (ENVIRONMENTS / client.environment).exists(), client
    assert len({str(client) for client in CLIENTS}) == len(CLIENTS)


def test_what_is_installed_is_pinned() -> None:
    for file in ENVIRONMENTS.glob("*.txt"):
        lines = [line for line in file.read_text().splitlines() if line[:1] not in ("#", "-", "")]
        assert all("==" in line for line in lines), file.name
    for folder in (path for path in ENVIRONMENTS.iterdir() if path.is_dir()):
        lock = (folder / "package-lock.json").read_text()
        assert '"integrity"' in lock
        assert '"resolved"' not in lock, "packages come from wherever npm is told to look"


def test_the_page_is_what_the_command_writes() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page([]) == text
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert [tuple(row.strip("| ").split(" | ")[:2]) for row in rows] == [(c.name, c.api) for c in CLIENTS]


def test_a_trial_that_failed_does_not_work() -> None:
    client = Client("a", "chat", "p.py", "e.txt")
    assert not Trial(client, turns=["one", "two"]).works, "its tool was not called"
    assert Trial(client, turns=["one", "two"], called=[{}]).works
    assert not Trial(client, turns=["one", "two"], called=[{}], error="a fault").works
    assert not Trial(client, turns=["one"], called=[{}]).works


def test_what_can_not_be_installed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_environment, "ROOT", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    pins = tmp_path / "absent.txt"
    pins.write_text("radixkv-absent-package==1.0\n")
    with pytest.raises(EnvironmentNotMade, match=r"absent\.txt can't be installed: .*radixkv-absent-package"):
        python_environment(pins)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentNotMade, match=r"no Node\.js"):
        node_environment(ENVIRONMENTS / "codex")
