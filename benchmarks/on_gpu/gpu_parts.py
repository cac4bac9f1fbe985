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
    """One process: `function` is `module:name` in this folder, called with `Sizes`, a `Report` and the
    arguments; after `seconds` it is ended."""

    name: str
    function: str
    seconds: float
    arguments: tuple[str, ...] = ()


#: Runs of less than 10 minutes, for machines that are lent for no longer: each of stages that come one after
#: the other; the parts of a stage run at the same time. Numbers come before speed.
RUNS: dict[str, tuple[tuple[Part, ...], ...]] = {
    "numbers": (
        (Part("machine", "gpu_machine:machine", 20),),
        (
            Part("numbers bfloat16", "gpu_numbers:numbers", 130, ("bfloat16",)),
            Part("numbers float16", "gpu_numbers:numbers", 130, ("float16",)),
            Part("numbers float32", "gpu_numbers:numbers", 130, ("float32",)),
            Part("edges", "gpu_edges:edges", 130),
            Part("bit identity", "gpu_numbers:identity", 130),
            Part("states", "gpu_states:states", 130),
            *(
                Part(f"models {group} {i}/{count}", "gpu_models:models", 130, (group, f"{i}/{count}"))
                for group, count in (("plain", 3), ("shapes", 5), ("states", 5))
                for i in range(1, count + 1)
            ),
            Part("models adapters", "gpu_models:models", 130, ("adapters",)),
        ),
        tuple(
            Part(f"models bfloat16 {i}/4", "gpu_models:models", 130, ("bfloat16", f"{i}/4"))
            for i in range(1, 5)
        ),
        (Part("sampler", "gpu_sampler:sampler", 30),),
        (Part("overlap", "gpu_overlap:overlap", 60),),
        (Part("sanitizer", "gpu_edges:sanitized", 60),),
        (Part("host", "gpu_host:host", 60),),
    ),
    "speed": (
        (Part("kernels", "gpu_kernels:table", 95),),
        (Part("state speed", "gpu_states:speed", 25),),
        (Part("state layer", "gpu_states:real_layer", 25),),
        (Part("experts", "gpu_products:experts", 40),),
        (Part("stored products", "gpu_products:products", 20),),
        *((Part(f"layers {name}", "gpu_layers:layers", 55, (name,)),) for name in PUBLISHED_NAMES),
        (Part("steps", "gpu_steps:steps", 105),),
    ),
    "peers": (
        (Part("throughput radixkv", "gpu_throughput:throughput", 65, ("radixkv",)),),
        (Part("throughput generate", "gpu_throughput:generate", 150),),
        (Part("throughput transformers", "gpu_throughput:throughput", 60, ("transformers",)),),
    ),
}
STAGES: tuple[tuple[Part, ...], ...] = tuple(stage for run in RUNS.values() for stage in run)
#: Not in the list: what the sanitizer watches.
TOY = Part("toy", "gpu_edges:toy", 40)


class Skip(Exception):
    """A part can't run here; the message says why."""


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
