# SPDX-License-Identifier: Apache-2.0
"""Cline, a coding agent, by its command line, over chat completions."""

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


def ask(prompt: str, where: str, cwd: Path) -> str:
    """The last message."""
    found = agent.events(agent.run(CLINE, "--json", prompt, cwd=cwd, HOME=where))
    (result,) = [event for event in found if event["type"] == "run_result"]
    return result["text"]


report.version(agent.run(CLINE, "--version").strip())
work, where = agent.folder("project"), home("cline", report.URL)
# A session goes on in a terminal alone: the second turn is a session of its own in the same folder.
report.turn(ask(report.FIRST, where, work))
report.turn(ask(report.SECOND, where, work))
told = home("cline-scripted", report.SCRIPTED_URL)
text = ask(agent.script("run_commands", {"commands": ["cat weather.txt"]}), told, work)
if text.strip() != agent.SUNNY:
    raise SystemExit(f"the tool's result did not come back, but {text[:200]!r}")
report.called({"commands": ["cat weather.txt"]})
