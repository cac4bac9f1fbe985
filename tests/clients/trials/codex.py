# SPDX-License-Identifier: Apache-2.0
"""Asking Codex, OpenAI's coding agent, over the Responses API."""

from pathlib import Path

import agent
import report

CODEX = agent.binary("@openai/codex-*/vendor/*/bin/codex", "@openai/codex-*/vendor/*/codex/codex")
CONFIG = """
model = "{model}"
model_provider = "radixkv"
model_context_window = 120000
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[analytics]
enabled = false
[feedback]
enabled = false
[model_providers.radixkv]
name = "radixkv"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "KEY"
request_max_retries = 0
stream_max_retries = 0
"""


def version() -> str:
    return agent.run(CODEX, "--version").split()[-1]


def home(name: str, url: str) -> str:
    made = Path.cwd() / name
    made.mkdir()
    (made / "config.toml").write_text(CONFIG.format(model=report.MODEL, url=url))
    return str(made)


def ask(*arguments: str, where: str, cwd: Path) -> tuple[str, list]:
    """The last message, and the items of the turn."""
    out = agent.run(CODEX, "exec", *arguments, cwd=cwd, check=False, CODEX_HOME=where)
    found = agent.events(out)
    failed = [event for event in found if event["type"] in ("error", "turn.failed")]
    if failed:
        raise SystemExit(str(failed[-1])[:300])
    items = [event["item"] for event in found if event["type"] == "item.completed"]
    texts = [item["text"] for item in items if item["type"] == "agent_message"]
    return (texts or [""])[-1], items
