# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard and the alert rules ask for metrics that there are."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripted_engine import ScriptedEngine
from source_graph import ROOT

from radixkv_server.chats.image_loader import ImageLoader
from radixkv_server.metrics.image_collector import ImageCollector
from radixkv_server.metrics.request_metrics import ServerMetrics

FOLDER = ROOT / "server" / "radixkv_server" / "metrics" / "dashboards"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "radixkv.json").read_text())
RULES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]


def names_there_are() -> set[str]:
    """Every sample that /metrics can have."""
    loader = ImageLoader(max_images=1, max_bytes=1, max_pixels=1, max_kept_bytes=0)
    families = [
        *ServerMetrics(ScriptedEngine(), by_tenant=True).registry.collect(),
        *ImageCollector(ScriptedEngine(), loader).collect(),
    ]
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    return {family.name + suffix for family in families for suffix in suffixes.get(family.type, ())}


def names_asked_for(expression: str) -> set[str]:
    return set(re.findall(r"\bradixkv_\w+", expression))


def test_the_dashboard_is_the_one_that_its_script_writes() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "generate_dashboard.py"))["text"]()
    assert written == (FOLDER / "radixkv.json").read_text(), "run python docs/generate_dashboard.py"


def test_panels_ask_for_metrics_that_there_are() -> None:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert len(panels) == 25
    asked = {
        name for panel in panels for query in panel["targets"] for name in names_asked_for(query["expr"])
    }
    assert asked
    assert asked <= names_there_are()
    assert all(panel["description"] for panel in panels), "each says what it means"
    places = [tuple(panel["gridPos"].values()) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alerts_ask_for_metrics_that_there_are(rule: dict[str, Any]) -> None:
    asked = names_asked_for(rule["expr"])
    assert asked
    assert asked <= names_there_are()
    assert rule["annotations"]["summary"]


def test_promtool_accepts_the_rules() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run(
        ["promtool", "check", "rules", str(FOLDER / "alerts.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_command_writes_both_files_and_replaces_none_that_differs(tmp_path: Path) -> None:
    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "radixkv.cli.main", "dashboards", str(tmp_path / "new"), *options]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run().returncode == 0
    written = {file.name: file.read_bytes() for file in (tmp_path / "new").iterdir()}
    assert written == {file.name: file.read_bytes() for file in FOLDER.iterdir()}
    assert run().returncode == 0, "again: nothing to change"

    (tmp_path / "new" / "alerts.yml").write_text("groups: []  # mine")
    refused = run()
    assert refused.returncode == 2
    assert "alerts.yml is there and differs" in refused.stderr
    assert (tmp_path / "new" / "alerts.yml").read_text() == "groups: []  # mine"
    assert run("--force").returncode == 0
    assert (tmp_path / "new" / "alerts.yml").read_bytes() == written["alerts.yml"]
