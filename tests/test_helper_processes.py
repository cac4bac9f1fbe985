# SPDX-License-Identifier: Apache-2.0
"""Programs that are started in a folder with a json.py run Python's own; so do their helpers.

Tests of the other helpers (ranks, copies of a model, trials of grammars) use `trapped_folder` too.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import httpx
import pytest
from running_proxy import running_proxy
from scripted_upstream import scripted_upstream
from source_graph import PACKAGES


@pytest.mark.parametrize("command", [["-m", "radixkv"], [str(Path(sys.executable).with_name("radixkv"))]])
def test_the_command_and_the_observer_of_a_proxy(
    tmp_path: Path, trapped_folder: Path, command: list[str]
) -> None:
    record = tmp_path / "record.jsonl"
    start = [sys.executable, *command, "proxy"]
    with (
        scripted_upstream() as upstream,
        running_proxy(f"http://127.0.0.1:{upstream.port}", "--record", str(record), command=start) as proxy,
    ):
        httpx.post(f"{proxy.url}/length", json={"model": "m", "prompt": "x"})
        while not record.exists() and not list(tmp_path.glob("mark")):
            time.sleep(0.02)
    assert not [line for line in proxy.lines if "the observer ended" in line]


def test_helpers_are_started_in_one_way() -> None:
    """A helper started otherwise would look for its modules in the working folder first."""
    files = [path for folder in PACKAGES.values() for path in folder.rglob("*.py")]
    starting = {path.name for path in files if '[sys.executable, "-' in path.read_text(encoding="utf-8")}
    assert starting == {"compile_ahead.py"}  # of the kernels, with `-P`
