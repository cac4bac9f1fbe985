# SPDX-License-Identifier: Apache-2.0
"""Asking opencode, a coding agent, over chat completions."""

import json
from pathlib import Path

import agent
from settings import blocks

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
    (block,) = blocks("opencode", url)
    unattended = {"share": "disabled", "autoupdate": False, "permission": {"bash": "allow"}}
    (folder / "opencode.json").write_text(json.dumps(json.loads(block) | unattended))


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
