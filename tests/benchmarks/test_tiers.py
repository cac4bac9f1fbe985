# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.tiers` runs, and its engines agree."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tiny_models import save_tiny_model

from benchmarks import tiers


@pytest.mark.nightly
def test_quick(tmp_path: Path, capsys):
    model = save_tiny_model(tmp_path / "model", "llama")
    traces = tmp_path / "traces"
    traces.mkdir()
    turns = [list(range(20 + 5 * turn)) for turn in range(3)]
    turns += [[*range(20), *range(100 + 50 * chat, 120 + 50 * chat)] for chat in range(3)]
    with gzip.open(traces / tiers.TRACE, "wt") as file:
        for number, ids in enumerate(turns):
            line = {"timestamp": number, "input_length": 64 * len(ids), "output_length": 9, "hash_ids": ids}
            file.write(json.dumps(line) + "\n")
    options = {"--model": model, "--max-token": 90, "--traces": traces, "--json": tmp_path / "figures.json"}
    tiers.main(["--quick", *(str(word) for option in options.items() for word in option)])
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures["sizes"]) == {"1x", "3x"}
    assert {"none", "disk"} <= set(figures["sizes"]["3x"])
    assert figures["sizes"]["3x"]["none"]["hit_rate"] < 0.5
    (unshared,) = figures["nothing_shared"].values()
    assert unshared["disk"]["throughput_over_without"] > 0
    assert unshared["disk"]["offered_blocks"] == unshared["disk"]["saved_blocks"] == 0  # they are short
    assert figures["sizes"]["3x"]["disk"]["loaded_blocks"] > 0
    assert figures["trace"]["requests"] == 6
    assert 0.2 < figures["trace"]["engines"]["none"]["hit_rate"] < 1.0
    assert "nothing shared" in capsys.readouterr().out
