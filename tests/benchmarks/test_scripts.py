# SPDX-License-Identifier: Apache-2.0
"""Every benchmark can still be loaded, explains itself, and those without a model run in a small size.

A benchmark takes minutes and a quiet machine, so nobody runs all of them after a change: this tells when one
no longer fits the code that it measures. `make lint` checks their types.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from benchmarks import attention, scheduling, speculation_workloads, tenant_fairness

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
PACKAGES = ("peers", "cluster_simulator")  # imported by their full names
MODULES = sorted(path.stem for path in FOLDER.glob("*/*.py") if path.parent.name not in PACKAGES)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_loads_and_its_help_tells_all_that_its_text_does(name: str) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    parsers = [
        node
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "ArgumentParser"
    ]
    for parser in parsers:
        described = {keyword.arg: ast.unparse(keyword.value) for keyword in parser.keywords}
        assert described["description"] == "__doc__"
        assert described["formatter_class"] == "argparse.RawDescriptionHelpFormatter"


@pytest.mark.parametrize("policy", scheduling.POLICIES)
def test_scheduling(policy: str) -> None:
    found = scheduling.order(policy, scheduling.SCENARIOS[0], steps=60, max_overtake=8)
    assert found["admitted"] > 20
    assert found["hit_rate"] > 0.5
    times = scheduling.ordering_time(policy, "no block", waiting=20, steps=5)
    assert 0 < times["median_ms"] <= times["p99_ms"]


def test_tenant_fairness() -> None:
    found = tenant_fairness.waits("fair", tenant_fairness.SCENARIOS[0])
    assert 0 < found["first_wait_steps"] <= found["worst_wait_steps"] < found["steps"]


def test_attention() -> None:
    work = attention.make_workload(4, 1, 64, 32, 2)
    runs = {"radixkv": work.attend(), "gather": work.gather_and_sdpa(), "one": work.contiguous_sdpa()}
    assert set(attention.interleaved_medians(runs, layers=2, rounds=1)) == set(runs)
    assert work.error(work.attend()(0)) < 1e-5
    assert attention.planning(2, 16) > 0


@pytest.mark.parametrize("workload", speculation_workloads.WORKLOADS)
def test_prompts_of_speculation(workload: str) -> None:
    class Texts:
        def encode(self, text: str) -> str:
            return text

        def apply_chat_template(self, messages: list[dict[str, str]]) -> str:
            return messages[0]["content"]

    editions = [speculation_workloads.prompts(Texts(), workload, edition) for edition in range(3)]
    assert [len(set(prompts)) for prompts in editions] == [8, 8, 8]
    assert len({prompt for prompts in editions for prompt in prompts}) == 24
