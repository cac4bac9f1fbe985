# SPDX-License-Identifier: Apache-2.0
"""The parts of `python -m benchmarks.gpu`, how long each may take, and how one runs in its own process."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Takes the fields of one line of results. A field `ok` that is false makes its part fail at the end.
Report = Callable[..., None]

#: Shapes of `gpu_layers.PUBLISHED`, which needs torch.
PUBLISHED_NAMES = ("Llama-3.1-8B", "Qwen3-30B-A3B", "Qwen3.5-35B-A3B", "gpt-oss-20b", "DeepSeek-V2-Lite")

TESTS = Path(__file__).resolve().parents[2] / "tests" / "kernels" / "interpreted"


@dataclasses.dataclass(frozen=True)
class Part:
    """One process, which is ended after its time.

    Attributes:
        function: `module:name` in this folder, called with `Sizes`, a `Report` and the arguments.
        seconds: most that it may take.
        expected: seconds that it should take on an H200: those of the run of 2026-11-27 where it was one of
            its parts, else estimated from its loads (three launches to warm up, 20 to time, 2 s to compile a
            kernel, 8 s to import and build a model).
        gigabytes: estimate of what its timed launches read and write, weights and K/V of each, and the 256 MB
            between them; 0: there is none.
    """

    name: str
    function: str
    seconds: float
    arguments: tuple[str, ...] = ()
    expected: float = 30.0
    gigabytes: float = 0.0


#: Runs of less than 10 minutes, for machines that are lent for no longer: each of stages that come one after
#: the other; the parts of a stage run at the same time. Numbers come before speed.
RUNS: dict[str, tuple[tuple[Part, ...], ...]] = {
    "numbers": (
        (Part("machine", "gpu_machine:machine", 20, expected=6, gigabytes=140),),
        (
            Part("numbers bfloat16", "gpu_numbers:numbers", 130, ("bfloat16",), expected=75),
            Part("numbers float16", "gpu_numbers:numbers", 130, ("float16",), expected=80),
            Part("numbers float32", "gpu_numbers:numbers", 130, ("float32",), expected=95),
            Part("edges", "gpu_edges:edges", 130, expected=25),
            Part("bit identity", "gpu_numbers:identity", 130, expected=16),
            Part("states", "gpu_states:states", 130, expected=30),
            Part("stored numbers", "gpu_products:numbers", 130, expected=90),
            Part("sampler numbers", "gpu_sampler:numbers", 130, expected=40),
            *(
                Part(
                    f"models {group} {i}/{count}",
                    "gpu_models:models",
                    130,
                    (group, f"{i}/{count}"),
                    expected=40,
                )
                for group, count in (("plain", 3), ("shapes", 5), ("states", 5))
                for i in range(1, count + 1)
            ),
            Part("models adapters", "gpu_models:models", 130, ("adapters",), expected=28),
        ),
        tuple(
            Part(f"models bfloat16 {i}/4", "gpu_models:models", 130, ("bfloat16", f"{i}/4"), expected=60)
            for i in range(1, 5)
        ),
        (Part("sanitizer", "gpu_edges:sanitized", 60, expected=40),),
        (Part("sampler", "gpu_sampler:sampler", 30, expected=15, gigabytes=15),),
        (Part("overlap", "gpu_overlap:overlap", 60, expected=30),),
        (Part("host", "gpu_host:host", 60, expected=25),),
    ),
    "speed": (
        (Part("kernels", "gpu_kernels:table", 95, expected=35, gigabytes=900),),
        (Part("state speed", "gpu_states:speed", 30, expected=15, gigabytes=150),),
        (Part("state layer", "gpu_states:real_layer", 30, expected=20, gigabytes=120),),
        *(
            (Part(f"layers {name}", "gpu_layers:layers", 55, (name,), expected=40, gigabytes=gigabytes),)
            for name, gigabytes in zip(PUBLISHED_NAMES, (1000, 1600, 2200, 2200, 1500), strict=True)
        ),
        (Part("steps", "gpu_steps:steps", 105, expected=45, gigabytes=3500),),
    ),
    "peers": (
        (Part("experts", "gpu_products:experts", 60, expected=40, gigabytes=800),),
        (Part("stored products", "gpu_products:products", 60, expected=45, gigabytes=1100),),
        (Part("fused layers", "gpu_fused:fused", 110, expected=80, gigabytes=900),),
        (Part("throughput radixkv", "gpu_throughput:throughput", 65, ("radixkv",), 26, 4500),),
        (Part("throughput generate", "gpu_throughput:generate", 150, expected=110),),
        (Part("throughput transformers", "gpu_throughput:throughput", 60, ("transformers",), 60),),
    ),
}
#: Most seconds of a run: a machine that is lent for ten minutes also starts and copies in them.
RUN_SECONDS = 550.0
STAGES: tuple[tuple[Part, ...], ...] = tuple(stage for run in RUNS.values() for stage in run)
#: Not in the list: what the sanitizer watches.
TOY = Part("toy", "gpu_edges:toy", 40)


class Skip(Exception):
    """A part can't run here; the message says why."""


def seconds_of(run: str, *, expected: bool = False) -> float:
    """Seconds of a run: most, or expected. The parts of a stage run at once."""
    return sum(max(p.expected if expected else p.seconds for p in stage) for stage in RUNS[run])


def find_part(name: str) -> Part:
    """The part of a name. Raises KeyError."""
    return {part.name: part for stage in (*STAGES, (TOY,)) for part in stage}[name]


def run_part(part: Part, small: bool, report: Report) -> None:
    """Run a part in this process.

    Raises:
        Skip: it can't run here.
        RuntimeError: checks failed; all of them were reported.
    """
    try:  # a part is skipped where a package is missing
        import torch

        from benchmarks.paged_bench import Sizes

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cpu" and not (small and os.environ.get("TRITON_INTERPRET") == "1"):
            raise Skip("there is no CUDA device")
        if device.type == "cpu" and "interpreter_repairs" not in sys.modules:
            # The interpreter's bfloat16 and its products need repairs first, as in the tests.
            sys.path.insert(0, str(TESTS))
            importlib.import_module("interpreter_repairs").install()
        module, name = part.function.split(":")
        function = getattr(importlib.import_module(f"benchmarks.{module}"), name)
        checks: list[bool] = []

        def count(**fields: Any) -> None:
            if "ok" in fields:
                checks.append(bool(fields["ok"]))
            report(**fields)

        with torch.no_grad():
            function(Sizes(small, device), count, *part.arguments)
    except ModuleNotFoundError as error:
        raise Skip(f"the package {error.name} is not installed") from error
    if not all(checks):
        raise RuntimeError(f"{checks.count(False)} of {len(checks)} checks failed")
