# SPDX-License-Identifier: Apache-2.0
"""Continue, a coding agent, by its command line, over chat completions."""

from pathlib import Path

import agent
import report
from settings import blocks

CONTINUE = str(Path(report.ENVIRONMENT) / "node_modules" / ".bin" / "cn")
QUIET = {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_CLI_ENABLE_TELEMETRY": "0"}


def home(name: str, url: str) -> str:
    made = Path.cwd() / name
    (made / ".continue").mkdir(parents=True)
    (config,) = blocks("Continue", url)
    (made / ".continue" / "config.yaml").write_text(config)
    return str(made)


def ask(prompt: str, *options: str, where: str, cwd: Path) -> str:
    config = str(Path(where) / ".continue" / "config.yaml")
    return agent.run(CONTINUE, "--config", config, *options, "-p", prompt, cwd=cwd, HOME=where, **QUIET)


report.version(agent.run(CONTINUE, "--version", **QUIET).strip())
work, where = agent.folder("project"), home("continue", report.URL)
report.turn(ask(report.FIRST, where=where, cwd=work))
report.turn(ask(report.SECOND, "--resume", where=where, cwd=work))
told = home("continue-scripted", report.SCRIPTED_URL)
text = ask(agent.script("Bash", {"command": "cat weather.txt"}), "--auto", where=told, cwd=work)
if text.strip() != agent.SUNNY:
    raise SystemExit(f"the tool's result did not come back, but {text[:200]!r}")
report.called({"command": "cat weather.txt"})
