# SPDX-License-Identifier: Apache-2.0
"""Mistakes that need no torch to see are answered before it is imported, by the commands and in Python."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from source_graph import ROOT
from tiny_models import save_tiny_model, write_tiny_gguf
from typer.testing import CliRunner

from radixkv import LLM
from radixkv.cli.main import command_tree
from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError, ModelLoadError
from radixkv.model.loading import load_progress
from radixkv.option_names import ENGINE_NAMES, as_flag

COMMANDS = """
import contextlib, io, json, sys
found = []
for line in json.loads(sys.stdin.read()):
    sys.argv = ["radixkv", *line]
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            from radixkv.cli.main import main
            main()
        except SystemExit as end:
            found.append([end.code, errors.getvalue(), "torch" in sys.modules])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama")


def test_mistakes_are_answered_before_torch_is_imported(folder: Path, tmp_path: Path) -> None:
    model, gguf = str(folder), str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "target_modules": ["q_proj"], "r": 128}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    rank = tmp_path / "rank.toml"
    rank.write_text("[engine]\nmax_lora_rank = 128\n")
    stored = tmp_path / "exl2"
    stored.mkdir()
    for each in folder.iterdir():
        (stored / each.name).write_bytes(each.read_bytes())
    config = {
        **json.loads((folder / "config.json").read_text()),
        "quantization_config": {"quant_method": "exl2"},
    }
    (stored / "config.json").write_text(json.dumps(config))
    expected: dict[tuple[str, ...], str] = {
        ("serve", "/no/such/folder"): "There is no file or folder /no/such/folder",
        ("chat", "/no/such/folder"): "There is no file or folder /no/such/folder",
        ("serve", str(tmp_path)): "is not a model folder: it has no config.json",
        ("serve", str(stored)): "as ExLlamaV2",
        ("chat", str(stored)): "as ExLlamaV2",
        ("serve", model, "--max-model-len", "1000000"): "more than the 512 positions",
        ("serve", gguf, "--max-model-len", "1000000"): "positions this model was made for",
        ("serve", model, "--tensor-parallel", "3"): "more than the 2 KV heads of llama",
        ("serve", model, "--lora", f"sql={tmp_path}/none"): "The adapter 'sql' can't be loaded",
        ("serve", model, "--lora", f"sql={adapter}"): "rank 128, above the largest taken, 64",
        ("serve", model, "--lora", f"sql={adapter}", "--config", str(rank)): "no file",
        ("serve", model, "--lora-dir", f"{tmp_path}/none"): "there is no such folder",
        ("serve", model, "--kv-tier", "disk:/no-such-top/x"): "there is no /no-such-top",
        ("serve", model, "--kv-tier", f"disk:{model}/config.json/x"): "the K/V tier's folder",
        ("serve", model, "--device", "cpu", "--kv-cache-memory", "4000000g"): "are free",
        ("serve", model, "--device", "cpu", "--state-memory", "4000000g"): "--state-memory asks for",
        ("serve", model, "--device", "cpu", "--kv-cache-memory", "20k"): "too few for any chat",
        (
            "serve",
            model,
            "--device",
            "cpu",
            "--kv-cache-memory",
            "200k",
            "--max-model-len",
            "400",
        ): "fewer than",
        ("serve", model, "--device", "cpu", "--num-blocks", "1000000000"): "use at most",
        ("serve", model, "--num-blocks", "10", "--max-model-len", "256"): "needs 16 blocks",
        ("serve", gguf, "--device", "cpu", "--kv-cache-memory", "1k"): "too few for any chat",
        ("serve", model, "--eviction-policy", "mru"): "mru",
        (
            "serve",
            model,
            "--tool-call-parser",
            "hermes",
        ): "is a flag of other engines; leave it out",
        ("serve", model, "--tensor-parallel-size=2"): "here it is --tensor-parallel",
        ("chat", model, "-tp", "2"): "here it is --tensor-parallel",
    }
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input=json.dumps(list(expected)),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    for line, (code, errors, has_torch) in zip(expected, json.loads(done.stdout), strict=True):
        assert code == 2, (line, errors)
        assert expected[line] in errors, (line, errors)
        assert not has_torch, line


def test_the_same_in_python(folder: Path) -> None:
    for options, message in (
        ({"max_model_len": 1000}, "more than the 512 positions"),
        ({"kv_cache_memory": 2**60}, "are free"),
        ({"kv_tier": "disk:/no-such-top/x"}, "there is no /no-such-top"),
        ({"lora": "a=/none"}, "The adapter 'a'"),
    ):
        with pytest.raises((ConfigError, ModelLoadError), match=message):
            LLM(str(folder), device="cpu", **options)


def test_memory_for_no_chat_where_only_the_model_tells(tmp_path: Path) -> None:
    """Layers with windows: the configuration alone does not say how much a token takes."""
    model = str(save_tiny_model(tmp_path / "gemma", "gemma2"))
    with pytest.raises(ConfigError, match="too few for any chat: give at least"):
        LLM(model, device="cpu", kv_cache_memory=100_000)
    LLM(model, device="cpu", kv_cache_memory=100_000, max_model_len=32)


def test_hints_for_names_of_other_engines() -> None:
    page = (ROOT / "docs" / "coming_from_vllm.md").read_text(encoding="utf-8")
    own = CliRunner().invoke(command_tree(), ["serve", "--help-all"], env={"COLUMNS": "250"}).output
    rows = re.findall(r"^\| (`-.*?) \|", page, re.MULTILINE)
    for flag in re.findall(r"`(--[\w-]+)", " ".join(rows)):
        name = flag.lstrip("-").replace("-", "_")  # of several, as `--hicache-*`, the beginning
        assert any(known.startswith(name) for known in ENGINE_NAMES) or f"{flag} " in own, (
            f"{flag} has neither a hint nor an option"
        )
    for name, hint in ENGINE_NAMES.items():
        for named in re.findall(r"(?<![\w-])--[\w-]+", as_flag(hint)):
            assert f"{named} " in own or f"/{named}" in own, f"the hint for {name} names {named}"
        for setting in re.findall(r"\{(\w+)", hint):
            assert setting in EngineConfig.__dataclass_fields__, f"the hint for {name} names {setting}"


def test_progress_that_was_shown_ends_at_100(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(load_progress.time, "monotonic", lambda: now[0])
    for seconds in (3.0, 0.0):
        with load_progress.progress_bar("Reading weights", 100, patience=2.0) as update:
            now[0] += seconds
            update(60)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["Reading weights ... 50 % (3 s)", "Reading weights ... 100 % (3 s)"]
