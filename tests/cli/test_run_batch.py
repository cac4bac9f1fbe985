# SPDX-License-Identifier: Apache-2.0
"""`radixkv run-batch` as a user runs it: the command, an interruption, mistakes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "radixkv.cli.main", "run-batch"]


def requests_file(path: Path, count: int, max_tokens: int) -> Path:
    lines = [
        {
            "custom_id": f"c{i}",
            "url": "/v1/completions",
            "body": {
                "model": "batch",
                "prompt": f"Count from {i}:",
                "max_tokens": max_tokens,
                "temperature": 0,
            },
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
def test_a_killed_batch_goes_on_where_it_was(tmp_path: Path) -> None:
    answers = tmp_path / "out"
    options = ["--served-model-name", "batch", "--max-num-seqs", "2"]
    command = [*COMMAND, str(requests_file(tmp_path / "in", 12, 16)), str(answers), *options]
    first = subprocess.Popen(command, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 400
    while not answers.exists() or answers.read_bytes().count(b"\n") < 3:
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)  # another process: its file is all that tells
    first.send_signal(signal.SIGKILL)
    first.communicate()
    kept = answers.read_bytes()
    assert kept.count(b"\n") < 12

    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    assert answers.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert sorted(answer["line"] for answer in found) == list(range(1, 13))
    assert all(answer["response"]["status_code"] == 200 for answer in found)

    third = subprocess.run(command, capture_output=True, text=True, check=False)
    assert third.returncode == 0
    assert "all 12 lines have their answer" in third.stderr


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("missing", "out"), "name a file of requests"),
        (("in", "in"), "name another file for the answers"),
        (("in", "nowhere/out"), "name another file"),
    ],
)
def test_mistakes_are_named_before_a_model_is_loaded(
    files: tuple[str, str], message: str, tmp_path: Path
) -> None:
    requests_file(tmp_path / "in", 1, 1)
    command = [*COMMAND, *(str(tmp_path / name) for name in files), "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
