# SPDX-License-Identifier: Apache-2.0
"""opencode, a coding agent, over chat completions."""

import agent
import report
from opencode import ask, config, version

report.version(version())
work = agent.folder("project")
config(work, report.URL)
report.turn(ask(report.FIRST, cwd=work)[0])
report.turn(ask(report.SECOND, "--continue", cwd=work)[0])
told = agent.folder("told")
config(told, report.SCRIPTED_URL)
call = agent.script("bash", {"command": "cat weather.txt", "description": "Looks at the weather"})
text, calls = ask(call, cwd=told)
if not calls or text.strip() != agent.SUNNY:
    raise SystemExit(f"the tool's result did not come back, but {text[:200]!r}")
report.called(calls[0]["state"]["input"])
