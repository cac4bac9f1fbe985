# SPDX-License-Identifier: Apache-2.0
"""`radixkv replay` and `radixkv simulate` from the outside."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import typer
from trace_tools import random_paths, replay_app, write_hash_ids
from typer.testing import CliRunner

from radixkv.cache.eviction.registry import POLICIES
from radixkv.cli.options import parse_names
from radixkv.cli.replay.plots import line_styles
from radixkv.cli.replay.replay_command import parse_capacities
from radixkv.errors import ConfigError, RadixKVError

KEYS = [
    "trace",
    "policy",
    "capacity_blocks",
    "requests",
    "blocks",
    "hit_blocks",
    "tokens",
    "hit_tokens",
    "seconds",
]


@pytest.fixture
def app() -> typer.Typer:
    return replay_app()


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    paths = random_paths(random.Random(4), requests=200, blocks=4, depth=6)
    return write_hash_ids(tmp_path / "small.jsonl", paths, 100)


def test_replay_writes_tables_json_and_plot(app: typer.Typer, trace_file: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["replay", str(trace_file), "--policy", "lru,adaptive", "--capacity", "5,50,inf"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(out), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert "opt-pin" in result.output
    assert "infinite-cache bound" in result.output
    rows = json.loads(out.read_text())
    assert all(list(row) == KEYS for row in rows)
    lru = {row["capacity_blocks"]: row["hit_blocks"] for row in rows if row["policy"] == "lru"}
    best = {row["capacity_blocks"]: row["hit_blocks"] for row in rows if row["policy"] == "opt-pin"}
    assert list(lru) == [5, 50, None]
    assert all(lru[size] <= best[size] for size in lru)
    assert lru[None] == best[None] == next(r["hit_blocks"] for r in rows if r["policy"] == "infinite")
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_processes_give_the_same_figures(trace_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from radixkv.cli.replay import runner
    from radixkv.cli.replay.readers import read_trace

    trace = read_trace(trace_file)
    cells = [runner.Cell(0, policy, size) for policy in ("lru", "adaptive") for size in (5, 40)]
    console = Console(quiet=True)
    inline = runner.run_cells([trace], cells, 1, console).results
    monkeypatch.setattr(runner, "_SMALL", 0)
    spread = runner.run_cells([trace], cells, 2, console).results
    assert [(r.policy, r.capacity_blocks, r.hit_blocks) for r in inline] == [
        (r.policy, r.capacity_blocks, r.hit_blocks) for r in spread
    ]


def test_concurrency_is_reported_apart(app: typer.Typer, trace_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["replay", str(trace_file), "--policy", "lru", "--capacity", "60", "--concurrency", "8"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "requests in flight" in result.output
    apart = [row for row in json.loads(out.read_text()) if "concurrency" in row]
    assert len(apart) == 1
    assert apart[0]["concurrency"] == 8
    assert apart[0]["hit_blocks_in_flight"] > 0


def test_replay_refuses_before_it_runs(app: typer.Typer, trace_file: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (["--policy", "magic"], "magic"),
        (["--capacity", "many"], "numbers of blocks"),
        (["--plot", str(tmp_path / "x.txt")], "kind of file"),
        (["--json", str(tmp_path / "no" / "x.json")], "no folder"),
        (["--block-ids", "odd"], "--block-ids"),
    ):
        result = CliRunner().invoke(app, ["replay", str(trace_file), *arguments])
        assert isinstance(result.exception, RadixKVError), result.output
        assert message in str(result.exception)


def test_simulate(app: typer.Typer, trace_file: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "waste.json", tmp_path / "waste.svg"
    arguments = ["simulate", "uniform", str(trace_file), "--memory", "1GiB", "--sequences", "100"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(out), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())
    assert [row["scheme"] for row in rows] == ["slab", "buddy", "paged", "paged+sharing"] * 2
    assert {row["total_slots"] for row in rows} == {2**30 // (2 * 32 * 8 * 128 * 2)}
    assert b"<svg" in plot.read_bytes()


@pytest.mark.nightly
def test_model_shape_by_hand(app: typer.Typer, tmp_path: Path) -> None:
    out = tmp_path / "waste.json"
    shape = ["--layers", "2", "--kv-heads", "4", "--head-size", "8", "--dtype-bytes", "4"]
    result = CliRunner().invoke(app, ["simulate", "--memory", "10MiB", "--json", str(out), *shape])
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())[0]["total_slots"] == 10 * 2**20 // (2 * 2 * 4 * 8 * 4)


def test_parsing() -> None:
    assert parse_capacities("10, 20,inf,10") == [10, 20, None]
    assert "adaptive" in parse_names("--policy", "all", POLICIES)


@pytest.mark.parametrize("bad", ["", "GiB", "-1GiB", "nan", "12 parsecs", "0"])
def test_memory_that_is_none_is_refused(app: typer.Typer, bad: str) -> None:
    result = CliRunner().invoke(app, ["simulate", "--memory", bad])
    assert isinstance(result.exception, ConfigError)
    assert "size" in str(result.exception) or "more memory" in str(result.exception)


def test_a_line_looks_the_same_in_all_panels_and_like_no_other() -> None:
    names = [f"policy {number}" for number in range(25)]
    styles = line_styles([*names, *names[::-1]])
    looks = [(style["color"], str(style["linestyle"]), style["marker"]) for style in styles.values()]
    assert list(styles) == names
    assert len(set(looks)) == len(names)
