# SPDX-License-Identifier: Apache-2.0
"""pi, a coding agent, over chat completions."""

from pathlib import Path

import agent
import report
from settings import MODEL, blocks

NODE = agent.binary("node-linux-*/bin/node")
PI = agent.binary("@earendil-works/pi-coding-agent/dist/bundle/cli.js")
QUIET = {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"}


def home(name: str, url: str) -> str:
    made = Path.cwd() / name
    (made / ".pi" / "agent").mkdir(parents=True)
    (models,) = blocks("pi", url)
    (made / ".pi" / "agent" / "models.json").write_text(models)
    return str(made)


def ask(prompt: str, *options: str, where: str, cwd: Path) -> str:
    model = ["--provider", "radixkv", "--model", MODEL]
    return agent.run(NODE, PI, *model, *options, "-p", prompt, cwd=cwd, HOME=where, **QUIET)


report.version(agent.run(NODE, PI, "--version", **QUIET).strip())
work, where = agent.folder("project"), home("pi", report.URL)
report.turn(ask(report.FIRST, where=where, cwd=work))
report.turn(ask(report.SECOND, "--continue", where=where, cwd=work))
told = home("pi-scripted", report.SCRIPTED_URL)
text = ask(agent.script("bash", {"command": "cat weather.txt"}), where=told, cwd=work)
if text.strip() != agent.SUNNY:
    raise SystemExit(f"the tool's result did not come back, but {text[:200]!r}")
report.called({"command": "cat weather.txt"})
