# SPDX-License-Identifier: Apache-2.0
"""Settings for the whole suite."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

pytest_plugins = ["missing_programs"]

# Two threads that share two cores with a server under test only wait for each other.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Processes that share the cores compute on their part of them: threads that wait for each other's turn on a
# core take many times as long as one alone. Set before torch is imported; servers under test inherit it.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _workers > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _workers)))

# Every step of every engine, those of servers in other processes included, is proven before it runs.
os.environ.setdefault("RADIXKV_CHECK_STEPS", "1")

# A quarter of hypothesis' examples by day, all of them by night.
_examples = 100 if "RADIXKV_NIGHTLY" in os.environ else 25
settings.register_profile("default", deadline=None, max_examples=_examples)
settings.register_profile("soak", deadline=None, max_examples=5000)
settings.load_profile("default")


#: Files with the longest tests come first: processes that share the files then end together. Each took
#: ten seconds or more of one core on 2026-11-29, compiling included; the first four are long by night.
LONGEST = (
    "clients/test_client_libraries.py",
    "clients/test_client_trials.py",
    "engine/test_tensor_parallel_embedded.py",
    "engine/test_tensor_parallel_faults.py",
    "kernels/test_attention_interpreter.py",
    "lora/test_adapters.py",
    "kernels/test_checkpoint_rows.py",
    "kernels/test_instruction_sets.py",
    "engine/test_weight_updates.py",
    "engine/test_embedded_answers.py",
    "tiers/test_warm_restart.py",
    "kernels/test_attention_contract.py",
    "cli/test_run_batch.py",
    "clients/test_sdks_with_a_model.py",
    "model/test_vision_families.py",
    "cli/test_replay_in_engine.py",
    "engine/test_async_scheduling.py",
    "server/test_weights_over_http.py",
    "kernels/test_block_product.py",
    "server/test_real_model.py",
    "console/test_console.py",
    "kernels/test_state_kernels.py",
    "proxy/test_recording.py",
    "model/test_stored_panels.py",
    "model/test_embedded_model.py",
    "server/test_serve.py",
    "console/test_tree.py",
    "engine/test_fork_server.py",
    "proxy/test_routing.py",
    "server/test_soak.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--server-process", action="store_true", help="run each server in another process than its engine"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--server-process"):
        import live_server

        live_server.ALWAYS_ELSEWHERE = True


#: What is asked for by tests that look at, or change, the process that their server runs in.
IN_PROCESS = {"caplog", "capsys", "monkeypatch"}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests stay to the end: the garbage collector need not look at them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # What tests leave is large: to look through it less often halves the collector's time.
        gc.set_threshold(5_000, 20, 20)
        gc.enable()
        atexit.register(gc.unfreeze)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first; all others stay in their order. What is for the night is skipped by day."""
    if "RADIXKV_NIGHTLY" not in os.environ:
        for item in items:
            if item.get_closest_marker("nightly") is not None:
                item.add_marker(pytest.mark.skip("nightly: set RADIXKV_NIGHTLY=1, or run make test-all"))
    if config.getoption("--server-process"):
        for item in items:
            if IN_PROCESS & set(getattr(item, "fixturenames", ())):
                item.add_marker(pytest.mark.skip("it looks at the process that its server runs in"))
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get("/".join(item.path.parts[-2:]), len(LONGEST)))


@pytest.fixture(scope="session")
def trial_processes() -> list[object]:
    """The processes in which grammars are tried out: starting one takes half a second."""
    return []


@pytest.fixture(autouse=True)
def trial_processes_are_kept(trial_processes: list[object]) -> Iterator[None]:
    """Until the last test, where the next one would only start the same again."""
    yield
    module = sys.modules.get("radixkv.grammar.trial_process")
    if module is not None:
        trial_processes += [one for one in module.SHARED.values() if one not in trial_processes]


@pytest.fixture
def trapped_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with files that bear the names of modules; none of them may be run."""
    folder, mark = tmp_path / "working_folder", tmp_path / "mark"
    folder.mkdir()
    for name in ("json", "pickle", "socket", "random", "llguidance", "xxhash", "numpy", "torch"):
        code = f"open({str(mark)!r}, 'a').write('{name} ')\nraise SystemExit(7)\n"
        (folder / f"{name}.py").write_text(code)
    monkeypatch.chdir(folder)
    yield folder
    assert not mark.exists(), f"run from the working folder: {mark.read_text()}"


@pytest.fixture(autouse=True)
def nothing_was_rebuilt(request: pytest.FixtureRequest) -> Iterator[None]:
    """No engine that a test made may have rebuilt its cache, unless the test injects faults."""
    yield
    support = sys.modules.get("paged_language_model")  # loads torch: only what uses it pays for that
    if support is None:
        return
    made = list(support.MADE)
    support.MADE.clear()
    if request.node.get_closest_marker("injects_faults") is None:
        assert [engine.stats().num_rebuilds for engine in made] == [0] * len(made), "an invariant was broken"
    for engine in made:
        assert getattr(engine.runner, "violations", []) == [], "a step read what was not its own"
