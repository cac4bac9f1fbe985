# SPDX-License-Identifier: Apache-2.0
"""Asking Claude Code, Anthropic's coding agent, over the Messages API."""

import json
from pathlib import Path

import agent
from settings import blocks, variables

CLAUDE = agent.binary("@anthropic-ai/claude-code-*/claude")
QUIET = {
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CODE_MAX_RETRIES": "0",
    "IS_SANDBOX": "1",
}


def version() -> str:
    return agent.run(CLAUDE, "--version").split()[0]


def ask(*arguments: str, url: str, cwd: Path, home: str) -> str:
    """The last message."""
    made = Path.cwd() / home
    made.mkdir(exist_ok=True)
    (block,) = blocks("Claude Code", url)
    told = QUIET | variables(block) | {"HOME": str(made)}
    out = agent.run(CLAUDE, "-p", *arguments, "--output-format", "json", cwd=cwd, check=False, **told)
    found = json.loads(out.strip().splitlines()[-1])
    if found["is_error"]:
        raise SystemExit(found["result"][:300])
    return found["result"]
