# SPDX-License-Identifier: Apache-2.0
"""qwen-code, a coding agent, over chat completions."""

from pathlib import Path

import agent
import report
from settings import blocks

NODE = agent.binary("node-linux-*/bin/node")
QWEN = agent.binary("@qwen-code/qwen-code/cli-entry.js")
QUIET = ["--telemetry", "false", "--output-format", "text"]


def home(name: str, url: str) -> str:
    made = Path.cwd() / name
    (made / ".qwen").mkdir(parents=True)
    (settings,) = blocks("qwen-code", url)
    if url == report.SCRIPTED_URL:  # it counts bytes, and so many would be summed up after the call
        settings = settings.replace('"contextWindowSize": 65536', '"contextWindowSize": 655360')
    (made / ".qwen" / "settings.json").write_text(settings)
    return str(made)


def ask(prompt: str, *options: str, where: str, cwd: Path) -> str:
    return agent.run(NODE, QWEN, *QUIET, *options, "-p", prompt, cwd=cwd, HOME=where)


report.version(agent.run(NODE, QWEN, "--version").strip())
work, where = agent.folder("project"), home("qwen", report.URL)
report.turn(ask(report.FIRST, where=where, cwd=work))
report.turn(ask(report.SECOND, "--continue", where=where, cwd=work))
told = home("qwen-scripted", report.SCRIPTED_URL)
call = agent.script("run_shell_command", {"command": "cat weather.txt", "is_background": False})
text = ask(call, "--yolo", where=told, cwd=work)
if text.strip() != agent.SUNNY:
    raise SystemExit(f"the tool's result did not come back, but {text[:200]!r}")
report.called({"command": "cat weather.txt"})
