# SPDX-License-Identifier: Apache-2.0
"""Two sessions of a coding agent, of three turns with calls of tools each: `hold_sessions.py CLIENT`.

The server answers what a prompt tells it to. Each turn is reported when it has ended.
"""

import sys
from pathlib import Path

import agent
import report

CLIENT = sys.argv[1]
SESSIONS = (1, 2)


def turns(session: int, tool: str, argument: str, **more: str) -> list[str]:
    """What is asked: two turns that call a tool, and one that is told what to say."""
    calls = [agent.script(tool, {argument: f"cat weather-{n}.txt", **more}) for n in (1, 2)]
    first = ("What will the weather be?", "Tell me, please, about the weather.")[session - 1]
    return [f"{first} {calls[0]}", f"And on the next day? {calls[1]}", agent.told("Good-bye.")]


def folder() -> Path:
    """Where all sessions work."""
    if (Path.cwd() / "project").exists():
        return Path.cwd() / "project"
    made = agent.folder("project")
    for number in (1, 2):
        days = ", ".join(f"day {day} has {day % 7} hours of sun" for day in range(8 * number))
        (made / f"weather-{number}.txt").write_text(f"{days}. {agent.told(f'It is sunny on day {number}.')}")
    return made


def check(turn: int, text: str) -> None:
    wanted = (f"It is sunny on day {turn}.", f"It is sunny on day {turn}.", "Good-bye.")[turn - 1]
    if wanted not in text:
        raise SystemExit(f"turn {turn} ended with {text[:200]!r}")
    report.turn(text)


def claude_code(session: int) -> None:
    import claude_code as client

    work = folder()
    asked = turns(session, "Bash", "command", description="Looks at the weather")
    for turn, prompt in enumerate(asked, 1):
        goes_on = ["--continue"] if turn > 1 else []
        where = {"url": report.URL, "cwd": work, "home": "claude"}
        check(turn, client.ask(*goes_on, prompt, "--allowedTools", "Bash", **where))


def codex(session: int) -> None:
    import codex as client

    work = folder()
    where = str(Path.cwd() / "codex") if session > 1 else client.home("codex", report.URL)
    for turn, prompt in enumerate(turns(session, "exec_command", "cmd"), 1):
        goes_on = ["resume", "--last"] if turn > 1 else []
        check(turn, client.ask(*goes_on, "--json", prompt, where=where, cwd=work)[0])


def opencode(session: int) -> None:
    import opencode as client

    work = folder()
    client.config(work, report.URL)
    (Path.cwd() / "home").mkdir(exist_ok=True)
    asked = turns(session, "bash", "command", description="Looks at the weather")
    for turn, prompt in enumerate(asked, 1):
        check(turn, client.ask(prompt, *(["--continue"] if turn > 1 else []), cwd=work)[0])


hold = {"claude-code": claude_code, "codex": codex, "opencode": opencode}[CLIENT]
for number in SESSIONS:
    hold(number)
