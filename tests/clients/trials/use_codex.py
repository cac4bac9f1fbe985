"""Codex, OpenAI's coding agent, over the Responses API."""

import os
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


def main() -> None:
    report.version(agent.run(CODEX, "--version").split()[-1])
    work, where = agent.folder("project"), home("codex", report.URL)
    report.turn(ask("--json", report.FIRST, where=where, cwd=work)[0])
    report.turn(ask("resume", "--last", "--json", report.SECOND, where=where, cwd=work)[0])
    told = home("codex-scripted", report.SCRIPTED_URL)
    call = agent.script("exec_command", {"cmd": "cat weather.txt"})
    text, items = ask("--json", call, where=told, cwd=work)
    (run,) = [item for item in items if item["type"] == "command_execution"]
    if agent.SUNNY not in run["aggregated_output"] or text.strip() != agent.SUNNY:
        raise SystemExit(f"the tool's result did not come back: {run}, then {text!r}")
    report.called({"command": run["command"]})


os.umask(0o077)
main()
