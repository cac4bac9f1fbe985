# SPDX-License-Identifier: Apache-2.0
"""The command line: complete help, options that reach the configuration, errors without tracebacks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_models import save_tiny_model
from typer.testing import CliRunner

from radixkv.cli import main as cli
from radixkv.cli.brief_help import PANEL_OF, PANELS
from radixkv.cli.options import setting_helps
from radixkv.engine.config import EngineConfig, parse_size
from radixkv.errors import ConfigError
from radixkv.model.loading.checkpoint_formats import FORMATS
from radixkv.option_names import TABLE_OF
from radixkv_server.ray_serve.settings import ReplicaSettings
from radixkv_server.settings import ServerSettings

COMMANDS = (
    "serve",
    "keys",
    "chat",
    "pull",
    "explain",
    "cache",
    "bench",
    "replay",
    "simulate",
    "proxy",
)


@dataclass
class Ended:
    """What a command printed, and its exit status."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Ended]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process: to start one takes longer than most commands."""
    monkeypatch.setattr("radixkv.cli.serve_command.configure_logging", lambda *_: None)

    def run(*arguments: str) -> Ended:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["radixkv", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        return Ended(code if isinstance(code, int) else int(code is not None), *capfd.readouterr())

    return run


def assert_one_paragraph(done: Ended | subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    message = done.stderr[done.stderr.rindex("radixkv: ") :]
    assert "\n\n" not in message.strip()
    for part in parts:
        assert part in message


def test_help_of_every_command_is_complete():
    app, runner = cli.command_tree(), CliRunner()
    overview = runner.invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    for command in COMMANDS:
        assert command in overview
        result = runner.invoke(app, [command, "--help"], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output


def test_every_setting_has_its_help():
    output = CliRunner().invoke(cli.command_tree(), ["serve", "--help-all"], env={"COLUMNS": "250"}).output
    assert set(setting_helps(EngineConfig)) == set(EngineConfig.__dataclass_fields__)
    for flag in ("--num-blocks", "--block-size", "--max-model-len", "--kv-cache-memory", "--deterministic"):
        assert flag in output
    assert "--gpu-memory-utilization" in output


def test_help_names_the_stored_forms_that_are_served() -> None:
    told = setting_helps(EngineConfig)["quantization"]
    listed = told.partition("these forms: ")[2].removesuffix(".").split(", ")
    served = [form for form in FORMATS.values() if form.served is not None]
    assert {"FP8", "MXFP4", "AWQ", "GPTQ", "MLX"} <= set(listed)
    assert all(form.title.partition(",")[0] in listed for form in served)
    assert "HQQ" not in listed
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("command", ["serve", "chat", "explain"])
def test_help_shows_the_everyday_options_in_panels(command: str):
    app, runner = cli.command_tree(), CliRunner()
    brief = runner.invoke(app, [command, "--help"], env={"COLUMNS": "80"}).output
    whole = runner.invoke(app, [command, "--help-all"], env={"COLUMNS": "250"}).output
    whole_on_a_screen = runner.invoke(app, [command, "--help-all"], env={"COLUMNS": "80"}).output
    assert len(brief.splitlines()) < 0.7 * len(whole_on_a_screen.splitlines())
    panels = re.findall(r"╭─ ([A-Z][\w ]+) ─", brief)
    assert panels[2:5] == list(PANELS)[:3]
    assert "--max-model-len" in brief
    assert "--eviction-policy" not in brief
    assert re.search(r"--help-all +.*every option", brief)
    assert all(name in whole for name in ("--max-model-len", "--eviction-policy", *panels))


def test_panels_name_settings_that_exist():
    helps = {**setting_helps(EngineConfig), **setting_helps(ServerSettings), **setting_helps(ReplicaSettings)}
    assert set(PANEL_OF) <= {*helps, "config_file", "api_key_file"}
    assert set(PANEL_OF).isdisjoint(TABLE_OF)
    assert set(TABLE_OF) <= set(helps)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1024", 1024),
        ("2g", 2 * 1024**3),
        ("1.5 MiB", 3 * 1024**2 // 2),
        ("7KB", 7 * 1024),
        ("8e9", 8 * 10**9),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "two", "3x", "-1", "1 2"])
def test_bad_sizes(text):
    with pytest.raises(ConfigError, match="size"):
        parse_size(text)


def test_mistakes_end_in_one_paragraph(tmp_path: Path, run: Run):
    command = [sys.executable, "-m", "radixkv", "serve", "--block-size", "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert_one_paragraph(done, "block_size", "power of two", "--block-size")
    assert_one_paragraph(run("serve", "--num-blocks", "4", "--kv-cache-memory", "1g"), "--num-blocks")
    missing = str(tmp_path / "no-such-model")
    assert_one_paragraph(run("serve", missing, "--no-download"), "no-such-model")
    assert_one_paragraph(run("explain", "--prompt", str(tmp_path / "none.txt")), "none.txt")


def test_too_little_memory_gives_the_numbers_and_the_flags(tmp_path: Path, run: Run):
    model = str(save_tiny_model(tmp_path / "llama", "llama"))
    done = run("serve", model, "--num-blocks", "10", "--max-model-len", "256", "--port", "0")
    assert_one_paragraph(done, "16 blocks", "--max-model-len", "--num-blocks")
    done = run("serve", model, "--num-blocks", "1000000000", "--port", "0")
    assert_one_paragraph(done, "--num-blocks 1000000000", "GiB", "free")


def test_explain_says_where_prompts_part(tmp_path: Path, run: Run):
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("The harbour master counts the ships every evening and writes their number down. " * 3)
    second.write_text("The harbour master counts the ships every evening and paints their number red. " * 3)
    out = tmp_path / "report.json"
    done = run("explain", "--prompt", str(first), "--prompt", str(second), "--json", str(out))
    assert done.returncode == 0, done.stderr
    reports = json.loads(out.read_text())
    assert reports[0]["reason"] == "first_seen"
    assert reports[1]["reason"] == "diverged"
    assert 5 < reports[1]["diverged_at"] < 20
    assert '"The harbour master counts the ships every evening and' in done.stdout
    assert '" paints their number red.' in done.stdout
    assert '" writes their number down.' in done.stdout
