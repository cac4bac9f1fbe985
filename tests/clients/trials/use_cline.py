# SPDX-License-Identifier: Apache-2.0
"""Cline, a coding agent, by its command line, over chat completions."""

import json
import shlex
from pathlib import Path

import agent
import report
from settings import blocks

CLINE = agent.binary("@cline/cli-linux-*/bin/cline")


def home(name: str, url: str) -> str:
    made = Path.cwd() / name
    made.mkdir()
    (command,) = blocks("Cline", url)
    program, *arguments = shlex.split(command)
    assert program == "cline"
    agent.run(CLINE, *arguments, HOME=str(made))
    return str(made)


def ask(prompt: str, *options: str, where: str, cwd: Path) -> str:
    """The last message."""
    found = agent.events(agent.run(CLINE, "--json", prompt, *options, cwd=cwd, HOME=where))
    (result,) = [event for event in found if event["type"] == "run_result"]
    return result["text"]


def last_session(where: str, cwd: Path) -> str:
    shown = agent.run(CLINE, "history", "--json", cwd=cwd, HOME=where)
    return json.loads(shown)[0]["sessionId"]


report.version(agent.run(CLINE, "--version").strip())
work, where = agent.folder("project"), home("cline", report.URL)
report.turn(ask(report.FIRST, where=where, cwd=work))
report.turn(ask(report.SECOND, "--id", last_session(where, work), where=where, cwd=work))
told = home("cline-scripted", report.SCRIPTED_URL)
text = ask(agent.script("run_commands", {"commands": ["cat weather.txt"]}), where=told, cwd=work)
if text.strip() != agent.SUNNY:
    raise SystemExit(f"the tool's result did not come back, but {text[:200]!r}")
report.called({"commands": ["cat weather.txt"]})
