# SPDX-License-Identifier: Apache-2.0
"""Try the clients that people use, and write what works into docs/clients.md.

    python tests/support/try_clients.py [-k NAME] [--no-table]

Environments are made in build/clients when they are first needed (some are 400 MB large). A client that
can't be installed is skipped, with the reason. Rows of clients that were not tried stay as they are.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from client_trials import CLIENTS, Trial, serving, try_client

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
HEAD = """\
# Clients

Popular programs and libraries, each installed from its registry and run against this server by
`make clients` (`ARGS="-k codex"` for some of them), which writes this table. The model is a random one with
a long context, made for the trial: its answers are noise, and everything around them is tried.

- **Two turns**: a question, and a second one after the answer to the first. The table has prompt and cached
  tokens of the second turn, as the server counted them.
- **A tool's call**: the client forces a call, reads its arguments, and (where it runs tools itself) sends
  back a result. Agents can't force calls: for them a second server's model calls the tool that the prompt
  names, the agent runs it, and the answer to its result is what counts.

| client | API | version | two turns | a tool's call | prompt of turn 2 | of it cached | tried |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
TAIL = """
The trials' programs are in `tests/clients/trials`; all installed packages are pinned in
`tests/clients/environments`.
"""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("-k", default="", help="only clients whose name or API has this text; | for several")
    options.add_argument("--no-table", action="store_true", help="leave docs/clients.md as it is")
    asked = options.parse_args()
    chosen = [client for client in CLIENTS if re.search(asked.k, str(client), re.IGNORECASE)]
    if not chosen:
        options.error(f"no client matches {asked.k!r}; there are {', '.join(map(str, CLIENTS))}")
    trials = []
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), chosen) as servers:
        for client in chosen:
            trial = try_client(client, servers)
            trials.append(trial)
            print(_told(trial), flush=True)
    if not asked.no_table:
        PAGE.write_text(page(trials), encoding="utf-8")
    return 0 if all(trial.works or trial.skipped for trial in trials) else 1


def _told(trial: Trial) -> str:
    if trial.skipped:
        return f"{trial.client}: skipped: {trial.skipped}"
    found = f"{trial.cached_tokens} of {trial.prompt_tokens} tokens of turn 2 cached"
    result = "works" if trial.works else "FAILED"
    return (
        f"{trial.client} {trial.version}: {result}, {len(trial.turns)} turns, "
        f"{len(trial.called)} calls, {found}"
        + (f"\n    {trial.error}" if trial.error else "")
        + "".join(f"\n    {note}" for note in trial.notes)
    )


def page(trials: Sequence[Trial]) -> str:
    """docs/clients.md with new rows for these trials."""
    rows = _known_rows()
    for trial in trials:
        if not trial.skipped or str(trial.client) not in rows:
            rows[str(trial.client)] = _row(trial)
    ordered = [rows.get(str(client)) or _row(Trial(client, skipped="not yet")) for client in CLIENTS]
    return HEAD + "".join(f"{row}\n" for row in ordered) + TAIL


def _known_rows() -> dict[str, str]:
    if not PAGE.exists():
        return {}
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {f"{cell[0]} ({cell[1]})": row for cell, row in zip(cells, rows, strict=True)}


def _row(trial: Trial) -> str:
    client = trial.client
    turns = "yes" if len(trial.turns) >= 2 else "no" if client.converses else "none"
    call = "yes" if trial.called else "no" if client.calls else "none"
    if trial.skipped:
        turns = call = "not tried"
    if trial.notes:
        call = "; ".join(trial.notes)
    if trial.error:
        reason = f" ({trial.error[:150]})"
        turns, call = (turns + reason, call) if turns == "no" else (turns, call + reason)
    tokens = [
        "" if number is None else f"{number:,}" for number in (trial.prompt_tokens, trial.cached_tokens)
    ]
    day = "" if trial.skipped else f"{datetime.date.today():%Y-%m-%d}, Python {platform.python_version()}"
    cells = [client.name, client.api, trial.version, turns, call, *tokens, day]
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
