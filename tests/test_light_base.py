# SPDX-License-Identifier: Apache-2.0
"""The base install, without extras: small, quick to import, and clear about what serving needs."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest
from blocked_imports import without_extras
from packaging.requirements import Requirement
from running_proxy import running_proxy
from scripted_upstream import scripted_upstream
from source_graph import ROOT

from radixkv.entrypoints.extras import SERVING

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAX_INSTALLED_BYTES = 80_000_000

LIBRARY = """
import radixkv
from radixkv import PrefixCache
from radixkv.cache.eviction.registry import POLICIES

for policy in set(POLICIES) - {"adaptive"}:
    cache = PrefixCache(num_blocks=64, block_size=16, policy=policy)
    prompt = list(range(100))
    lease = cache.acquire(prompt, "ada")
    lease.commit(100)
    lease.append([1, 2, 3])
    lease.commit(103)
    assert lease.token_ids() == [*prompt, 1, 2, 3]
    assert len(set(lease.block_table.tolist())) == len(lease.block_table) == 7
    child = lease.fork()
    child.append([4])
    assert child.copies
    child.release()
    lease.release()
    assert cache.match(range(80), "ada").num_tokens == 80
    assert cache.explain([*range(60), 7, 8, 9], "ada").diverged_at == 60
    long = cache.acquire([*range(50), *range(1000, 1900)], "ada")
    assert long.num_cached_tokens == 50
    long.commit(950)
    long.release()
    assert cache.evict(3) == 3
    cache.check()
try:
    PrefixCache(num_blocks=4, block_size=4, policy="adaptive")
except radixkv.ConfigError as error:
    assert "numpy" in str(error)
else:
    raise AssertionError("adaptive eviction computes with numpy")
for name in ("LLM", "AsyncEngine", "Engine"):
    try:
        getattr(radixkv, name)
    except ImportError as error:
        assert "[cpu]" in str(error) and name in str(error), error
    else:
        raise AssertionError(f"{name} without torch")
print("the library works")
"""


def run(python: Path | str, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(python), *arguments], capture_output=True, text=True, timeout=120, cwd=folder)


def test_the_cache_is_a_library_without_numpy() -> None:
    done = run(sys.executable, "-c", without_extras(LIBRARY))
    assert done.stdout.strip() == "the library works", done.stderr


REFUSED = ("serve", "chat", "bench", "pull some/model", "explain {file}", "cache ls .", "replay {file}")
ALLOWED = ("--help", "serve --help", "key new ada", "audit --example")
#: Every command begins without a module of ours loaded, as in a process of its own.
COMMANDS = """
import contextlib, io, json
found = {}
for line in LINES:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("radixkv", "radixkv_server")]:
        del sys.modules[name]
    sys.argv = ["radixkv", *line.split()]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            from radixkv.cli.main import main
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
    found[line] = code, out.getvalue(), err.getvalue()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def commands() -> dict[str, tuple[int, str, str]]:
    """Status, output and errors of commands that run one after the other without the extras."""
    lines = [line.format(file=__file__) for line in (*REFUSED, *ALLOWED)]
    done = run(sys.executable, "-c", without_extras(f"LINES = {lines!r}\n{COMMANDS}"))
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str, str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("line", REFUSED)
def test_commands_say_what_to_install(line: str, commands: dict[str, tuple[int, str, str]]) -> None:
    code, _, errors = commands[line.format(file=__file__)]
    assert code == 2, errors
    assert len(errors.strip().splitlines()) == 1, errors
    assert errors.startswith("radixkv: "), errors
    assert f"pip install -e '{ROOT}[cpu]'" in errors, "no release is needed beside a checkout"


@pytest.mark.parametrize("line", ALLOWED)
def test_what_needs_no_model_works(line: str, commands: dict[str, tuple[int, str, str]]) -> None:
    code, output, errors = commands[line]
    assert code == 0, errors
    assert "'radixkv'" not in output, "the extra is named in the help, too"


def test_what_serving_needs_is_what_the_extras_bring() -> None:
    def names(requirements: list[str]) -> set[str]:
        return {Requirement(one).name.lower().replace("-", "_") for one in requirements}

    extras = PROJECT["optional-dependencies"]
    assert names(extras["serving"]) == SERVING
    assert not names(PROJECT["dependencies"]) & SERVING
    for extra in ("cpu", "gpu"):
        assert "radixkv[serving]" in extras[extra]


def test_the_import_is_quick() -> None:
    code = "import time; start = time.process_time(); import radixkv; print(time.process_time() - start)"
    assert min(float(run(sys.executable, "-c", code).stdout) for _ in range(3)) < 0.3


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel and what it requires, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    online = ["--retries", "0", "--timeout", "20"]
    steps = (
        [*pip, "wheel", *online, "--no-deps", "-w", str(folder), str(ROOT)],
        [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")],
    )
    python = folder / "venv" / "bin" / "python"
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, timeout=240)
        if done.returncode:
            pytest.skip(f"no registry to build a wheel with: {done.stderr.strip()[-300:]}")
    (wheel,) = folder.glob("*.whl")
    install = [*pip, "--python", str(python), "install", *online, "-c", str(ROOT / "constraints.txt")]
    done = subprocess.run([*install, str(wheel)], capture_output=True, text=True, timeout=240)
    if done.returncode:
        pytest.skip(f"no registry to install from: {done.stderr.strip()[-300:]}")
    return python


@pytest.mark.nightly
def test_the_wheel_alone_is_small_and_works(bare: Path, tmp_path: Path) -> None:
    (packages,) = (bare.parent.parent / "lib").glob("python*/site-packages")
    size = sum(file.stat().st_size for file in packages.rglob("*") if file.is_file())
    assert size < MAX_INSTALLED_BYTES, f"{size / 1e6:.0f} MB"
    for name in (*SERVING, "numba", "triton"):
        assert not (packages / name).exists(), f"{name} is in the base"
    done = run(bare, "-I", "-c", LIBRARY, folder=tmp_path)
    assert done.stdout.strip() == "the library works", done.stderr
    record = tmp_path / "record.jsonl"
    body = '{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'
    with scripted_upstream() as upstream:
        command = (str(bare), "-I", "-m", "radixkv", "proxy")
        address = f"http://127.0.0.1:{upstream.port}"
        with running_proxy(address, "--record", str(record), command=command) as proxy:
            answer = httpx.post(f"{proxy.url}/v1/chat/completions/length", content=body)
            assert answer.content == b"hello"
    assert "hello" in record.read_text()
    report = tmp_path / "report.json"
    for source in ("--example", str(record)):
        done = run(bare, "-I", "-m", "radixkv", "audit", source, "--json", str(report), folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(report.read_text())["requests"]
    done = run(bare, "-I", "-m", "radixkv", "serve", folder=tmp_path)
    assert done.returncode == 2
    (wheel,) = bare.parent.parent.parent.glob("*.whl")
    assert f"pip install 'radixkv[cpu] @ {wheel.as_uri()}'" in done.stderr
