# SPDX-License-Identifier: Apache-2.0
"""The table of architectures lists what the installed transformers has, and marks as tested what is."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
from tiny_configs import FAMILIES, HYBRID_FAMILIES, SHAPES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

DOCS = Path(__file__).parents[2] / "docs"


def rows() -> dict[str, list[str]]:
    """model_type -> cells of its row."""
    lines = (DOCS / "reference" / "architectures.md").read_text(encoding="utf-8").splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")
    ]
    return {row[0].strip("`"): row for row in cells if len(row) == 5 and row[0] != "`model_type`"}


def test_every_causal_architecture_has_a_row() -> None:
    pins = (DOCS.parent / "constraints.txt").read_text(encoding="utf-8")
    if f"transformers=={metadata.version('transformers')}" not in pins.splitlines():
        pytest.skip("the table is that of the pinned transformers")
    missing = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(rows())
    assert not missing, "run docs/survey_architectures.py, then docs/generate_reference.py"


def test_what_the_suite_computes_is_served_and_marked() -> None:
    listed = rows()
    tested = {model_type for model_type, _ in (*FAMILIES.values(), *SHAPES.values())} | set(HYBRID_FAMILIES)
    for name in tested & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        assert listed[name][2:4] == ["served", "tests"], name


def test_what_is_not_served_has_a_reason() -> None:
    found = json.loads((DOCS / "architectures.json").read_text(encoding="utf-8"))
    for name, each in found.items():
        assert each["status"] in ("served", "as text", "refused", "not tried"), name
        assert (each["status"] == "served") == (not each["reason"]), name
