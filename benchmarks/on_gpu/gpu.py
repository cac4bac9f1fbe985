# SPDX-License-Identifier: Apache-2.0
"""Numbers, kernels, layers, steps, sampling and throughput on a GPU, part by part, in three runs.

    python -m benchmarks.gpu [--small] [--run RUN ...] [--only PART ...] [--lines FILE] [--plan]

Each run, also by its number from 1 to 3, takes less than 550 seconds; without `--run` all three follow one
another. `--plan` only says what would run, how long each part may and should take, and what it moves. Each
part is a process with a time limit of its own, and appends its results to FILE (build/gpu.jsonl), a line of
JSON for each, as it goes: a run that is cut short leaves its figures. A part that fails, or takes too long,
or needs what is not installed, says so in its last line, and the next one runs.

numbers:
1. machine: versions; bytes a second of a large copy and of a large sum, which only reads; operations a
   second of a large matrix product.
2. numbers, a process for each type, with edges and bit identity beside them: attention against float64 by
   head sizes, groups of heads, features, images, K/V types, split chunks, shared prefixes; states; experts
   and products of stored weights; the sampler's tokens beside those of the CPU's code; caches of more than
   2^31 elements, copied blocks, slot -1, replayed steps against eager ones; deterministic mode bit by bit.
3. models: tiny models of every family, through the whole engine, beside transformers' tokens; those with
   experts or states in bfloat16, too.
4. sanitizer: compute-sanitizer over a toy. sampler: milliseconds for 1, 32 and 256 rows, over one reading of
   the logits. overlap: steps one by one and launched ahead. host: the engine's own work at 256 requests.

speed:
5. kernels: decode, prefill, a chunk on a long context, a shared prefix, fp8, an image, the merge, beside
   torch's SDPA and, where it is installed, vLLM's Triton kernel. Targets: decode 1.05 times SDPA's time on
   contiguous tensors, prefill 70 % of the product's speed, a shared prefix 1.7 times as fast as without
   sharing. State layers: a prompt, decodes.
6. layers: what a layer of five published models takes, eager and replayed.
7. steps: decode and prompt steps of Llama-3.1-8B's shape through the engine's model runner, drafts, and the
   15 kernels that take the most time.

peers:
8. experts beside `grouped_mm`, products of stored weights (FP8, INT8, 4-bit groups, MXFP4, blocks of GGUF)
   beside bfloat16 and torch's scaled products; layers of five families, fused and as transformers wrote them.
9. throughput: the whole engine, transformers' `generate` in static batches, and its continuous batching, each
   alone. Targets: 3 times as fast with a shared prefix, 1.5 times without.

It needs no network, and no installation where torch, triton, transformers, pydantic and llguidance are there:
`PYTHONPATH=.:kernels:server python3 -m benchmarks.gpu`. `--small` runs all parts at toy sizes, without a GPU
under Triton's interpreter: its times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import RUN_SECONDS, RUNS, STAGES, Part, Skip, find_part, run_part, seconds_of

ROOT = Path(__file__).resolve().parents[2]
#: A toy is interpreted on a CPU that may be busy: limits are so many times as long.
_TOY_PATIENCE = 20.0
#: Characters of what a part that failed wrote on its standard error.
_TRACE = 3000


class Lines:
    """Results, one JSON object a line, appended to a file as they come; may be used by several threads."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._lock = path, threading.Lock()
        self._started = time.monotonic()
        self.rows: list[dict[str, Any]] = []

    def add(self, part: str, **fields: Any) -> None:
        row = {"part": part, "at": round(time.monotonic() - self._started, 1), **fields}
        with self._lock:
            self.rows.append(row)
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            shown = "  ".join(
                f"{key} {_short(value)}" for key, value in fields.items() if key not in ("trace", "checksums")
            )
            print(f"[{row['at']:5.0f} s] {part}: {shown}", flush=True)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_stages(
    stages: Sequence[Sequence[Part]],
    lines: Lines,
    command: Sequence[str],
    seconds: float = RUN_SECONDS,
    patience: float = 1.0,
) -> None:
    """Run the parts, each with `command` and its name as a process, within `seconds` in all.

    Args:
        patience: what a part's limit is multiplied by.
    """
    end = time.monotonic() + seconds
    for stage in stages:
        with ThreadPoolExecutor(len(stage)) as pool:
            # So that parts which run at once do not take the processors from one another.
            threads = max(1, (os.cpu_count() or 1) // len(stage))
            for done in [
                pool.submit(_run, part, lines, [*command, part.name], end, threads, part.seconds * patience)
                for part in stage
            ]:
                done.result()


def _run(part: Part, lines: Lines, command: Sequence[str], end: float, threads: int, seconds: float) -> None:
    limit = min(seconds, end - time.monotonic())
    if limit <= 0:
        lines.add(part.name, status="not run", error="the time for all parts is over")
        return
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        with _process(command, errors, threads) as process:
            reader = threading.Thread(target=_read, args=(process, part, lines))
            reader.start()
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
        # The process is gone, and with it the other end of the pipe.
        reader.join()
        errors.seek(0)
        trace = errors.read().strip()
    seconds = round(time.monotonic() - started, 1)
    if code == 0:
        lines.add(part.name, status="ok", seconds=seconds)
        return
    last = trace.splitlines()[-1] if trace else ""
    if code == SKIPPED:
        lines.add(part.name, status="skipped", seconds=seconds, error=last)
    elif code is None:
        error = f"ended after its {limit:.0f} s"
        lines.add(part.name, status="out of time", seconds=seconds, error=error, trace=trace[-_TRACE:])
    else:
        error = last or f"the process ended with {code}"
        lines.add(part.name, status="failed", seconds=seconds, error=error, trace=trace[-_TRACE:])


#: Exit status of a part that can't run here.
SKIPPED = 75


@contextlib.contextmanager
def _process(command: Sequence[str], errors: Any, threads: int) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, which is gone with all of its children at the end."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        cwd=ROOT,
        env={"OMP_NUM_THREADS": str(threads), **os.environ},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(process: subprocess.Popen[str], part: Part, lines: Lines) -> None:
    """Hand on the lines that a part reports; what libraries print besides is left out."""
    assert process.stdout is not None
    with process.stdout as output:
        for line in output:
            try:
                fields = json.loads(line)
            except ValueError:
                continue
            if isinstance(fields, dict):
                lines.add(part.name, **fields)


def summarize(lines: Lines) -> None:
    """What follows from several parts: how many times as fast the engine is, and which targets were met."""
    ours, theirs = (
        {row["load"]: row for row in lines.rows if row["part"] == f"throughput {name}" and "load" in row}
        for name in ("radixkv", "transformers")
    )
    for load in ours.keys() & theirs.keys():
        a, b = ours[load], theirs[load]
        ratio = a["tokens/s"] / b["tokens/s"]
        equal = [x == y for x, y in zip(a["checksums"], b["checksums"], strict=True)]
        lines.add(
            "throughput",
            **{"load": load, "times as fast": ratio, "equal answers": sum(equal) / len(equal)},
            target=a["target"],
            met=ratio >= a["target"],
        )
    for row in [row for row in lines.rows if "static batch" in row and row["load"] in ours]:
        ratio = ours[row["load"]]["tokens/s"] / row["tokens/s"]
        beside = f"generate in batches of {row['static batch']}"
        lines.add("throughput", **{"load": row["load"], "beside": beside, "times as fast": ratio})
    for row in [row for row in lines.rows if "met" in row]:
        lines.add("targets", of=row["part"], load=row["load"], met=row["met"])
    status = {row["part"]: row["status"] for row in lines.rows if "status" in row}
    lines.add("summary", **status)


def child(name: str, small: bool) -> int:
    """Run one part here, reporting on the standard output. Returns the exit status."""

    def report(**fields: Any) -> None:
        print(json.dumps(fields), flush=True)

    try:
        run_part(find_part(name), small, report)
    except Skip as reason:
        print(reason, file=sys.stderr)
        return SKIPPED
    return 0


def run_name(text: str) -> str:
    """Return the name of a run that is given by name or number.

    Raises:
        argparse.ArgumentTypeError: there is none.
    """
    numbered = {str(i): name for i, name in enumerate(RUNS, 1)}
    name = numbered.get(text, text)
    if name not in RUNS:
        raise argparse.ArgumentTypeError(f"{text!r} is no run: take {', '.join(RUNS)}, or 1 to {len(RUNS)}")
    return name


def plan(runs: Sequence[str], only: Sequence[str]) -> list[str]:
    """Return a line for each part: its limit, its expected seconds, and the gigabytes that it moves."""
    found = []
    for run in runs:
        total, limit = seconds_of(run, expected=True), seconds_of(run)
        found.append(f"{run}: {total:.0f} s expected, {limit:.0f} s at most")
        for number, stage in enumerate(RUNS[run], 1):
            for part in stage:
                if part.name in only:
                    moved = f", {part.gigabytes:,.0f} GB" if part.gigabytes else ""
                    times = f"{part.expected:.0f} s expected, {part.seconds:.0f} s at most"
                    found.append(f"  {number}. {part.name}: {times}{moved}")
    return found


def main() -> None:
    names = [part.name for stage in STAGES for part in stage]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="toy sizes; times mean nothing")
    parser.add_argument(
        "--run", nargs="+", type=run_name, default=list(RUNS), help=f"of {', '.join(RUNS)}, or 1 to 3; all"
    )
    parser.add_argument("--plan", action="store_true", help="only say what would run")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=str(names))
    parser.add_argument("--lines", type=Path, default=ROOT / "build" / "gpu.jsonl", help="file to append to")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plan:
        print("\n".join(plan(args.run, args.only)))
        return
    if args.part:
        sys.exit(child(args.part, args.small))
    import torch  # slow, and parts import it in processes of their own

    if not torch.cuda.is_available():
        if not args.small:
            sys.exit("no CUDA device; to try all parts on a CPU: python -m benchmarks.gpu --small")
        os.environ["TRITON_INTERPRET"] = "1"
    # So that a caller with a time limit of its own leaves no process running.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    lines = Lines(args.lines)
    size = ["--small"] if args.small else []
    command = [sys.executable, "-m", "benchmarks.gpu", *size, "--part"]
    for run in args.run:
        seconds, patience = (RUN_SECONDS * _TOY_PATIENCE, _TOY_PATIENCE) if args.small else (RUN_SECONDS, 1.0)
        stages = [[part for part in stage if part.name in args.only] for stage in RUNS[run]]
        run_stages([stage for stage in stages if stage], lines, command, seconds, patience)
    summarize(lines)
    status = [row["status"] for row in lines.rows if "seconds" in row and "status" in row]
    sys.exit(0 if all(s in ("ok", "skipped") for s in status) else 1)


if __name__ == "__main__":
    main()
