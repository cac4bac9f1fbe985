# SPDX-License-Identifier: Apache-2.0
"""Asking Codex, OpenAI's coding agent, over the Responses API."""

from pathlib import Path

import agent
import report
from settings import blocks

CODEX = agent.binary("@openai/codex-*/vendor/*/bin/codex", "@openai/codex-*/vendor/*/codex/codex")
#: Before the page's settings, which end with a table.
UNATTENDED = """
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
analytics.enabled = false
feedback.enabled = false
"""


def version() -> str:
    return agent.run(CODEX, "--version").split()[-1]


def home(name: str, url: str) -> str:
    made = Path.cwd() / name
    made.mkdir()
    (settings,) = blocks("Codex", url)
    (made / "config.toml").write_text(UNATTENDED + settings)
    return str(made)


def ask(*arguments: str, where: str, cwd: Path) -> tuple[str, list]:
    """The last message, and the items of the turn."""
    out = agent.run(
        CODEX, "exec", *arguments, cwd=cwd, check=False, CODEX_HOME=where, RADIXKV_API_KEY=report.KEY
    )
    found = agent.events(out)
    failed = [event for event in found if event["type"] in ("error", "turn.failed")]
    if failed:
        raise SystemExit(str(failed[-1])[:300])
    items = [event["item"] for event in found if event["type"] == "item.completed"]
    texts = [item["text"] for item in items if item["type"] == "agent_message"]
    return (texts or [""])[-1], items
