# SPDX-License-Identifier: Apache-2.0
"""Asking opencode, a coding agent, over chat completions."""

import json
from pathlib import Path

import agent
import report

# The binary itself: the package opencode-ai only chooses one.
OPENCODE = agent.binary("opencode-*/bin/opencode", "opencode-*/bin/opencode.exe")
QUIET = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_SHARE": "1",
}


def version() -> str:
    home = Path.cwd() / "home"
    home.mkdir(exist_ok=True)
    return agent.run(OPENCODE, "--version", HOME=str(home), **QUIET).strip()


def config(folder: Path, url: str) -> None:
    model = {"name": report.MODEL, "tool_call": True, "limit": {"context": 120_000, "output": 2000}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "radixkv",
        "options": {"baseURL": url + "/v1", "apiKey": report.KEY},
        "models": {report.MODEL: model},
    }
    name = f"radixkv/{report.MODEL}"
    settings = {"provider": {"radixkv": provider}, "model": name, "small_model": name, "share": "disabled"}
    settings |= {"autoupdate": False, "permission": {"bash": "allow"}}
    (folder / "opencode.json").write_text(json.dumps(settings))


def ask(prompt: str, *options: str, cwd: Path) -> tuple[str, list]:
    """The text of the turn, and its parts."""
    own = str(Path.cwd() / "home")
    out = agent.run(OPENCODE, "run", "--format", "json", *options, cwd=cwd, text=prompt, HOME=own, **QUIET)
    found = agent.events(out)
    failed = [event for event in found if event["type"] == "error"]
    if failed:
        raise SystemExit(str(failed[-1])[:300])
    texts = [event["part"]["text"] for event in found if event["type"] == "text"]
    return "".join(texts), [event["part"] for event in found if event["type"] == "tool_use"]
