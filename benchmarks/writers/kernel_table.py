# SPDX-License-Identifier: Apache-2.0
"""Write the table of compiled kernels into docs/lab/kernel_table.md, between its two markers.

    python -m benchmarks.kernel_table [--check]

Compiles every configuration of the shipped tile table ahead of time for sm_80, sm_90 and gfx942, and the
kernels of state layers for sm_90 (some minutes the first time; triton caches the results). `--check` writes
nothing, and exits with 1 if the page would change.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import triton

import benchmarks.ahead_of_time as aot
from benchmarks.state_compilation import STATE_KERNELS
from radixkv_kernels.triton.merge import AT_ONCE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "lab" / "kernel_table.md"
START, END = "<!-- kernel table: begin -->", "<!-- kernel table: end -->"


def table() -> str:
    lines = [
        f"Compiled with triton {triton.__version__}.",
        "",
        "| configuration | target | rows x keys | warps, stages | registers | spills (bytes) | shared memory "
        "| matrix instruction | programs per SM |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for c in aot.CONFIGURATIONS:
        for target in aot.TABLE_TARGETS:
            if not aot.supported(c, target):
                continue
            tile = c.tiles(target)[1]
            report = aot.inspect_kernel(aot.compile_attention(c, target), target)
            print(f"{c.name}, {target}", file=sys.stderr)
            lines.append(
                f"| {c.name} | {target} | {tile.rows} x {tile.keys} | {tile.warps}, {tile.stages} "
                f"| {report.registers} | {report.spill_bytes} | {report.shared_bytes / 1024:.1f} KiB "
                f"| {report.matrix_instruction or 'none'} | {report.programs_per_sm or '-'} |"
            )
    return "\n".join(lines)


def state_table() -> str:
    lines = [
        "Kernels of [layers with a state](../kernels.md#13-states-on-a-gpu), for sm_90; inputs are bfloat16, "
        "or float32 where they always are.",
        "",
        "| kernel | warps | registers | spills (bytes) | shared memory | programs per SM |",
        "|---|---|---|---|---|---|",
    ]
    for name, compiled in STATE_KERNELS.items():
        kernel = compiled("sm_90")
        report = aot.inspect_kernel(kernel, "sm_90")
        print(f"{name}, sm_90", file=sys.stderr)
        lines.append(
            f"| {name} | {kernel.metadata.num_warps} | {report.registers} | {report.spill_bytes} "
            f"| {report.shared_bytes / 1024:.1f} KiB | {report.programs_per_sm} |"
        )
    return "\n".join(lines)


def merge_table() -> str:
    lines = [
        f"The merge of partials of 32 heads, {AT_ONCE} of which are loaded ahead.",
        "",
        "| head size | target | warps | registers | spills (bytes) | programs per SM |",
        "|---|---|---|---|---|---|",
    ]
    for head_size in (64, 128, 256, 512):
        for target in ("sm_80", "sm_90"):
            kernel = aot.compile_merge(32, head_size, target)
            report = aot.inspect_kernel(kernel, target)
            lines.append(
                f"| {head_size} | {target} | {kernel.metadata.num_warps} | {report.registers} "
                f"| {report.spill_bytes} | {report.programs_per_sm} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only compare")
    args = parser.parse_args()
    page = PAGE.read_text()
    before, rest = page.split(START)
    after = rest.split(END)[1]
    new = f"{before}{START}\n{table()}\n\n{merge_table()}\n\n{state_table()}\n{END}{after}"
    if args.check:
        sys.exit(f"{PAGE.name} is out of date" if new != page else 0)
    PAGE.write_text(new)


if __name__ == "__main__":
    main()
