# SPDX-License-Identifier: Apache-2.0
"""Running coding agents, which are programs of the command line, and scripting what their model says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import report

WORK = Path.cwd()
#: What a tool prints. Only the answer of the scripted server can hold it without the mark around it.
SUNNY = "It is sunny."


def run(*command: str, cwd: Path = WORK, check: bool = True, text: str = "", **variables: str) -> str:
    """What the agent prints when it is given a text.

    Its errors are ours; without `check` only if it prints nothing.
    """
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | variables,
        text=True,
        input=text,
        capture_output=True,
        timeout=100,
    )
    if done.returncode != 0 and (check or not done.stdout):
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
        told = [line for line in (done.stdout + done.stderr).splitlines() if "rror" in line] or ["it failed"]
        raise SystemExit(told[-1][:300])
    return done.stdout


def folder(name: str) -> Path:
    """A folder for the agent to work in, with a file to look at."""
    made = WORK / name
    made.mkdir()
    (made / "weather.txt").write_text(told(SUNNY))
    subprocess.run(["git", "init", "-q"], cwd=made, check=False)
    return made


def told(text: str) -> str:
    """What makes the scripted server answer so, wherever it stands in a prompt."""
    return "say{{" + text + "}}say"


def script(name: str, arguments: dict) -> str:
    """A prompt to which the scripted server answers with a call."""
    call = json.dumps({"name": name, "arguments": arguments})
    return told(f"<tool_call>\n{call}\n</tool_call>")


def events(text: str) -> list:
    """The lines of JSON in an output."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def binary(*patterns: str) -> str:
    """The program in a package for this machine; nothing of it was installed by a script."""
    modules = Path(report.ENVIRONMENT) / "node_modules"
    for pattern in patterns:
        for path in sorted(modules.glob(pattern)):
            if path.is_file():
                return str(path)
    raise SystemExit(f"none of {patterns} is in {modules}")
