"""`benchmarks.tiers` runs, and its engines agree."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_models import save_tiny_model

from benchmarks import tiers


def test_quick(tmp_path: Path, capsys):
    model = save_tiny_model(tmp_path / "model", "llama")
    tiers.main(
        ["--quick", "--model", str(model), "--max-token", "90", "--json", str(tmp_path / "figures.json")]
    )
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures["sizes"]) == {"1x", "3x"}
    assert {"none", "disk"} <= set(figures["sizes"]["3x"])
    assert figures["sizes"]["3x"]["none"]["hit_rate"] < 0.5
    assert figures["nothing_shared"]["disk"]["throughput_over_none"] > 0
    assert "nothing shared" in capsys.readouterr().out
