# SPDX-License-Identifier: Apache-2.0
"""aider over chat completions. It offers no tools: the edit of a file stands for a call."""

from importlib.metadata import version
from pathlib import Path

import agent
import report
from settings import blocks

QUIET = [
    *("--yes-always", "--no-stream", "--no-check-update", "--analytics-disable", "--no-show-model-warnings"),
    *(
        "--no-auto-commits",
        "--no-gitignore",
        "--no-show-release-notes",
        "--no-fancy-input",
        "--no-suggest-shell-commands",
    ),
    *("--map-tokens", "0", "--edit-format", "diff"),
]
AIDER = str(Path(report.ENVIRONMENT) / "bin" / "aider")


def ask(*options: str, url: str, cwd: Path) -> None:
    config, metadata = blocks("aider", url)
    (cwd / ".aider.conf.yml").write_text(config)
    (cwd / ".aider.model.metadata.json").write_text(metadata)
    agent.run(AIDER, *QUIET, *options, cwd=cwd)


def answered(folder: Path, asked: str) -> str:
    """What the history says after a question."""
    history = (folder / ".aider.chat.history.md").read_text()
    return history.rpartition(f"#### {asked}")[2].strip()


report.version(version("aider-chat"))
work = agent.folder("project")
(work / "book.txt").write_text(report.SYSTEM)
ask("--message", report.FIRST, "--read", "book.txt", url=report.URL, cwd=work)
report.turn(answered(work, report.FIRST))
ask("--message", report.SECOND, "--read", "book.txt", "--restore-chat-history", url=report.URL, cwd=work)
report.turn(answered(work, report.SECOND))
edit = "weather.txt\n```\n<<<<<<< SEARCH\nIt rains.\n=======\nIt is sunny.\n>>>>>>> REPLACE\n```\n"
told = agent.folder("told")
(told / "weather.txt").write_text("It rains.\n")
(told / "prompt.txt").write_text(agent.told(edit))
ask("--message-file", "prompt.txt", "--file", "weather.txt", url=report.SCRIPTED_URL, cwd=told)
changed = (told / "weather.txt").read_text()
if changed != "It is sunny.\n":
    raise SystemExit(f"the file was not edited: {changed!r}")
report.called({"edited": "weather.txt"})
