# SPDX-License-Identifier: Apache-2.0
"""`radixkv cache ls|verify|clear`: the folder of a disk tier, seen from outside."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from radixkv.cache.block_run import BlockRun
from radixkv.cache.keys import encode_tokens
from radixkv.cli.main import command_tree
from radixkv.errors import ConfigError
from radixkv.tiers.disk.disk_tier import DiskTier
from radixkv.tiers.record import BlockKind

KIND = BlockKind("0123456789abcdef", "float32", 8, 500, model_name="smol-model")


def tier_in(folder: Path, blocks: int = 0) -> DiskTier:
    tier = DiskTier(folder, 1 << 20, KIND)
    run = BlockRun(("",), False, encode_tokens(range(8 * blocks)), 0, (b"",) * blocks)
    tier.save(run, np.zeros((blocks, 500), np.uint8))
    return tier


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tier_in(tmp_path / "kv", 6).close()
    return tmp_path / "kv"


def run(*arguments: str):
    result = CliRunner().invoke(command_tree(), ["cache", *arguments], catch_exceptions=True)
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result


def figures(folder: Path, command: str = "ls") -> dict:
    file = folder.parent / "figures.json"
    run(command, str(folder), "--json", str(file))
    return json.loads(file.read_text())


def test_ls_lists_what_is_there(folder):
    result = run("ls", str(folder))
    assert result.exit_code == 0
    assert "00000001.seg" in result.stdout
    assert "6 blocks of 48 tokens" in result.stdout
    told = figures(folder)
    assert told["summary"]["records"] == told["files"][0]["num_records"] == 6
    assert told["summary"]["bytes"] == (folder / "00000001.seg").stat().st_size
    assert told["summary"]["process"] is None
    assert (told["files"][0]["model"], told["files"][0]["fingerprint"]) == ("smol-model", "0123456789abcdef")
    assert "smol-model 01234567" in result.stdout
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_verify_finds_damage_that_ls_does_not_look_for(folder):
    assert run("verify", str(folder)).exit_code == 0
    path = folder / "00000001.seg"
    data = bytearray(path.read_bytes())
    data[len(data) // 6 * 2 - 1] ^= 1  # the last byte of the second block
    path.write_bytes(data[:-1])
    told = figures(folder)["summary"]
    assert (told["records"], told["damaged"], told["lost_bytes"]) == (5, 0, len(data) // 6 - 1)
    result = run("verify", str(folder))
    assert result.exit_code == 1
    assert "1 damaged" in result.stdout
    assert figures(folder, "verify")["files"][0]["damaged"] == [len(data) // 6]


def test_clear_removes_blocks_and_nothing_else(folder):
    (folder / "notes.txt").write_text("mine")
    assert "removed" in run("clear", str(folder)).stdout
    assert figures(folder)["files"] == []
    assert (folder / "notes.txt").exists()
    tier_in(folder, 2).close()
    assert figures(folder)["summary"]["records"] == 2


def test_a_folder_in_use_is_shown_but_not_cleared(folder):
    tier = tier_in(folder)
    assert figures(folder)["summary"]["process"] == str(os.getpid())
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        run("clear", str(folder))
    assert figures(folder)["summary"]["records"] == 6
    with pytest.raises(ConfigError, match="in use"):  # to look did not end the lock
        tier_in(folder)
    tier.close()
    assert run("clear", str(folder)).exit_code == 0


@pytest.mark.parametrize("command", ["ls", "verify", "clear"])
def test_what_is_no_such_folder_is_refused(tmp_path, command):
    with pytest.raises(ConfigError, match="there is no folder"):
        run(command, str(tmp_path / "nowhere"))
    (tmp_path / "photo.jpg").write_text("mine")
    with pytest.raises(ConfigError, match="is no folder of a K/V tier"):
        run(command, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]
