# SPDX-License-Identifier: Apache-2.0
"""Write the result table of a comparison into docs/lab/performance.md, between two marks.

    python -m benchmarks.readme_tables             # from benchmarks/results/compare.json
    python -m benchmarks.readme_tables --from benchmarks/results/other.json
    python -m benchmarks.readme_tables --check     # only says whether they are up to date

The figures come from `python -m benchmarks.compare --json benchmarks/results/compare.json`; nothing in the
table is written by hand. What could not be measured is in it with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

BEGIN = "<!-- comparison: written by benchmarks/writers/readme_tables.py -->"
END = "<!-- comparison: end -->"
ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "docs" / "lab" / "performance.md",)
RESULTS = ROOT / "benchmarks" / "results" / "compare.json"
BASELINE = "radixkv float32"
WORKLOADS = ("W1 cold", "W1 warm", "W2", "W3")


def comparison_table(result: dict[str, Any], source: str) -> str:
    """The Markdown table of a comparison, with a line on how it was made.

    Args:
        result: what `benchmarks.compare` wrote.
        source: the name of that file, for the reader.
    """
    header = [
        "",
        *WORKLOADS,
        "single, ms a token",
        "prompt tokens computed",
        "peak memory MB",
        "same answers",
    ]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    settings = result["medians"]
    order = [BASELINE, *(name for name in settings if name != BASELINE)]
    lines += ["| " + " | ".join(_row(name, settings[name])) + " |" for name in order if name in settings]
    for name, reason in result.get("failures", {}).items():
        if name not in settings:
            cells = [name, f"not measured: {' '.join(reason.split())[:120]}".replace("|", "/")]
            lines.append("| " + " | ".join([*cells, *[""] * (len(header) - len(cells))]) + " |")
    return "\n".join([*lines, "", _about(result, source)])


def _row(name: str, setting: dict[str, Any]) -> list[str]:
    cells = [f"**{name}**" if name == BASELINE else name]
    workloads = {key: figures for key, figures in setting["workloads"].items() if figures}
    for workload in WORKLOADS:
        figures = workloads.get(workload)
        if figures is None:
            cells.append("-")
            continue
        ratio = figures.get(f"{BASELINE} / this")
        cells.append(f"{figures['wall_s']:.1f}" + (f" ({ratio:.2f})" if ratio and name != BASELINE else ""))
    single = workloads.get("single")
    cells.append(f"{1000 * single['itl_p50_s']:.1f}" if single else "-")
    measured = [workloads[workload] for workload in WORKLOADS if workload in workloads]
    computed = sum(figures["computed_tokens"] for figures in measured)
    total = sum(figures["prompt_tokens"] for figures in measured)
    cells.append(f"{computed:,.0f} of {total:,.0f}" if measured else "-")
    cells.append(f"{setting['peak_bytes'] / 1e6:,.0f}")
    same = [f["same_answers"] for f in workloads.values() if f.get("same_answers") is not None]
    cells.append("" if name == BASELINE or not same else f"{sum(same) / len(same):.0%}")
    return cells


def _about(result: dict[str, Any], source: str) -> str:
    about, runs = result["machine"], result["runs"]
    rounds = max((run["round"] for run in runs), default=-1) + 1
    loads = [run["load_average_before"] for run in runs]
    versions = ", ".join(
        f"{name} {version}"
        for parts in result["versions"].values()
        for name, version in parts.items()
        if name not in ("torch", "transformers") or parts is result["versions"].get("radixkv")
    )
    return (
        f"{result['date']}, {about['processor']}, {about['cpus']} CPUs, {about['threads']} threads; medians "
        f"of {rounds} round{'s' if rounds != 1 else ''}; load average before a run {min(loads):.1f} to "
        f"{max(loads):.1f}; {versions}. Raw: [{source}](REPOSITORY/benchmarks/results/{source})."
    )


def replaced(page: str, table: str, path: Path) -> str:
    """The page with `table` between its marks.

    Raises:
        SystemExit: the marks are missing.
    """
    begin, end = page.find(BEGIN), page.find(END)
    if begin < 0 or end < begin:
        raise SystemExit(f"{path} has no lines {BEGIN} and {END}")
    to_root = (
        "/".join([".."] * len(path.relative_to(ROOT).parent.parts)) if path.is_relative_to(ROOT) else "."
    )
    table = table.replace("REPOSITORY/", f"{to_root}/" if to_root else "")
    return f"{page[:begin]}{BEGIN}\n{table}\n{page[end:]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="source", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--page", type=Path, action="append", help="a page to change (default: both)")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if a page is not up to date"
    )
    args = parser.parse_args()
    table = comparison_table(json.loads(args.source.read_text(encoding="utf-8")), args.source.name)
    stale = False
    for path in args.page or PAGES:
        old = path.read_text(encoding="utf-8")
        new = replaced(old, table, path.resolve())
        stale |= new != old
        if not args.check:
            path.write_text(new, encoding="utf-8")
        print(f"{path}: {'up to date' if new == old else 'not up to date' if args.check else 'written'}")
    sys.exit(1 if args.check and stale else 0)


if __name__ == "__main__":
    main()
