# SPDX-License-Identifier: Apache-2.0
"""Claude Code, Anthropic's coding agent, over the Messages API."""

import agent
import report
from claude_code import ask, version

report.version(version())
work = agent.folder("project")
report.turn(ask(report.FIRST, url=report.URL, cwd=work, home="claude"))
report.turn(ask("--continue", report.SECOND, url=report.URL, cwd=work, home="claude"))
call = agent.script("Bash", {"command": "cat weather.txt", "description": "Looks at the weather"})
told = {"url": report.SCRIPTED_URL, "cwd": work, "home": "claude-scripted"}
text = ask(call, "--allowedTools", "Bash", **told)
if text.strip() != agent.SUNNY:
    raise SystemExit(f"the tool's result did not come back, but {text[:200]!r}")
report.called({"command": "cat weather.txt"})
