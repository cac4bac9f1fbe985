# SPDX-License-Identifier: Apache-2.0
"""The result table of the comparison comes from raw figures, whatever could or could not be measured."""

import copy
import json
from pathlib import Path

import pytest

from benchmarks.readme_tables import BEGIN, END, ROOT, comparison_table, replaced

RESULT = json.loads((ROOT / "benchmarks/results/compare.json").read_text(encoding="utf-8"))


def rows(table):
    lines = [line for line in table.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    return {row[0].strip("*"): dict(zip(cells[0], row, strict=True)) for row in cells[2:]}


def test_each_setting_has_a_row_with_its_figures_and_ratios():
    table = rows(comparison_table(RESULT, "compare.json"))
    assert next(iter(table)) == "radixkv float32"
    assert set(table) == set(RESULT["medians"])
    for name, setting in RESULT["medians"].items():
        figures = setting["workloads"]["W1 cold"]
        cell = table[name]["W1 cold"]
        assert cell.split()[0] == f"{figures['wall_s']:.1f}"
        assert ("(" in cell) == (name != "radixkv float32")
    vllm = RESULT["medians"]["vLLM float32"]
    assert table["vLLM float32"]["peak memory MB"] == f"{vllm['peak_bytes'] / 1e6:,.0f}"


def test_what_failed_says_why_and_what_is_missing_is_no_number():
    result = copy.deepcopy(RESULT)
    result["failures"]["transformers"] = "pip install: exit code 1: no such package"
    result["medians"]["vLLM float32"]["workloads"]["W2"] = None
    table = rows(comparison_table(result, "x.json"))
    assert "no such package" in " ".join(table["transformers"].values())
    assert table["vLLM float32"]["W2"] == "-"
    assert table["vLLM float32"]["W3"] != "-"


def test_only_what_is_between_the_marks_is_replaced():
    page = f"above\n{BEGIN}\nold\n{END}\nbelow\n"
    new = replaced(page, "| table |\nREPOSITORY/benchmarks", ROOT / "docs" / "page.md")
    assert new == f"above\n{BEGIN}\n| table |\n../benchmarks\n{END}\nbelow\n"
    assert replaced(new, "| table |\nREPOSITORY/benchmarks", ROOT / "docs" / "page.md") == new
    with pytest.raises(SystemExit, match="no lines"):
        replaced("nothing here", "table", Path("page.md"))


@pytest.mark.parametrize("name", ["docs/lab/performance.md"])
def test_the_pages_have_the_marks_and_links_that_lead_somewhere(name):
    page = (ROOT / name).read_text(encoding="utf-8")
    between = page[page.index(BEGIN) : page.index(END)]
    target = between[between.rindex("](") + 2 :].split(")")[0]
    assert ((ROOT / name).parent / target).exists()
