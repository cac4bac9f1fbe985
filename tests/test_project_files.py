# SPDX-License-Identifier: Apache-2.0
"""Files around the code: workflows, hooks, templates, containers and metadata agree with each other."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib

import pytest
import yaml
from licence_lines import has_line, sources
from source_graph import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CONTAINERFILE = (ROOT / "Containerfile").read_text(encoding="utf-8")


def targets() -> set[str]:
    return set(
        re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )


def make_targets_in(text: str) -> set[str]:
    return set(re.findall(r"\bmake ([a-z][a-z-]*)", text))


def test_workflows_run_what_exists_on_every_supported_python() -> None:
    known = {name for line in targets() for name in line.split()}
    jobs = {
        name: job
        for path in WORKFLOWS
        for name, job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].items()
    }
    assert {"lint", "test", "fuzz", "coverage"} <= set(jobs)
    for job in jobs.values():
        assert job["timeout-minutes"] <= 180
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step["uses"]), "pin the commit"
            assert make_targets_in(step.get("run", "")) <= known
    supported = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert jobs["test"]["strategy"]["matrix"]["python"] == supported


def test_continuous_integration_lints_and_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.findall(r"make (\w+)", script.read_text(encoding="utf-8")) == ["lint", "test"]


def test_hooks_use_the_pinned_linter() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if re.match(r"\w.*==", line)
    )
    (ruff,) = [repo["rev"] for repo in hooks if repo["repo"].endswith("ruff-pre-commit")]
    assert ruff == f"v{pins['ruff']}"


def test_the_hook_of_subjects_refuses_long_ones() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    (entry,) = [hook["entry"] for repo in hooks for hook in repo["hooks"] if hook["id"] == "subject"]
    for length, status in ((72, 0), (73, 1)):
        done = subprocess.run(
            ["sh", "-c", entry], input="x" * length + "\n\nbody\n", text=True, capture_output=True
        )
        assert done.returncode == status


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_forms_ask_for_something(name: str) -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(form)
    ids = [part["id"] for part in form["body"]]
    assert len(ids) == len(set(ids))
    assert any(part.get("validations", {}).get("required") for part in form["body"])


def instructions() -> list[tuple[str, str]]:
    """Instructions of the Containerfile and their arguments, continued lines joined."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", CONTAINERFILE, flags=re.MULTILINE))
    pairs = (line.split(maxsplit=1) for line in joined.splitlines() if line.strip())
    return [(word, rest) for word, rest in pairs]


def test_the_container_keeps_to_the_rules_of_hadolint() -> None:
    lines = instructions()
    words = [word for word, _ in lines]
    assert words[0] == "FROM"
    assert all(word.isupper() for word in words)
    for word, rest in lines:
        if word == "FROM":  # DL3006, DL3007: a fixed tag
            assert re.match(r"\S+:(?!latest)[\w.-]+@sha256:[0-9a-f]{64}( |$)", rest), "pin the digest"
        elif word == "RUN":
            if "apt-get install" in rest:  # DL3008, DL3009, DL3014, DL3015
                assert "--no-install-recommends" in rest
                assert " -y " in rest
                assert "rm -rf /var/lib/apt/lists/*" in rest
                packages = rest.split("--no-install-recommends")[1].split("&&")[0].split()
                assert all("=" in package for package in packages)
            if "pip install" in rest:  # DL3013, DL3042
                assert "--no-cache-dir" in rest
                assert "-c constraints.txt" in rest
            assert "sudo" not in rest  # DL3004
            assert "|" not in rest.replace("||", "")  # DL4006
        elif word == "WORKDIR":  # DL3000
            assert rest.startswith("/")
        elif word in ("CMD", "ENTRYPOINT"):  # DL3025
            assert isinstance(json.loads(rest), list)
        assert word not in ("ADD", "MAINTAINER")  # DL3020, DL4000
    last = max(i for i, (word, _) in enumerate(lines) if word == "FROM")
    users = [rest for word, rest in lines[last:] if word == "USER"]
    assert users[-1:] not in ([], ["root"])  # DL3002
    assert words.count("CMD") == words.count("ENTRYPOINT") == words.count("HEALTHCHECK") == 1


def test_the_container_installs_extras_that_exist() -> None:
    extras = set(PROJECT["project"]["optional-dependencies"])
    (listed,) = re.findall(r'"\.\[(\$\{EXTRA\}[\w,]*)\]"', CONTAINERFILE)
    assert set(listed.replace("${EXTRA}", "cpu").split(",")) <= extras
    assert re.search(r"^ARG EXTRA=cpu$", CONTAINERFILE, re.MULTILINE)
    version = re.search(r"python:(3\.\d+)", CONTAINERFILE)
    assert version
    assert f"Programming Language :: Python :: {version[1]}" in PROJECT["project"]["classifiers"]


def test_the_development_container_makes_the_environment() -> None:
    made = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert make_targets_in(made["postCreateCommand"]) == {"install-lint"}
    assert made["forwardPorts"] == [8000]


def test_each_source_file_names_its_licence() -> None:
    lacking = [path for path in sources() if not has_line(path.read_text(encoding="utf-8"))]
    assert not lacking, "run `python tests/support/licence_lines.py`"


def test_the_version_is_one() -> None:
    version = PROJECT["project"]["version"]
    assert f'__version__ = "{version}"' in (ROOT / "radixkv" / "__init__.py").read_text(encoding="utf-8")
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert {"Homepage", "Documentation", "Changelog", "Issues"} == set(PROJECT["project"]["urls"])
    assert PROJECT["tool"]["coverage"]["report"]["fail_under"] >= 90
