# SPDX-License-Identifier: Apache-2.0
"""Codex, OpenAI's coding agent, over the Responses API."""

import os

import agent
import report
from codex import ask, home, version


def main() -> None:
    report.version(version())
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
