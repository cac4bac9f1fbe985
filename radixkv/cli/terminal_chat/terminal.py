# SPDX-License-Identifier: Apache-2.0
"""Reading lines in a terminal: editing, history over sessions, several lines, completion of commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

COMMANDS = (
    "/system",
    "/explain",
    "/save",
    "/load",
    "/retry",
    "/undo",
    "/clear",
    "/help",
    "/quit",
)


def history_file() -> Path:
    """Path of the history of typed lines: `$XDG_STATE_HOME/radixkv/chat_history`."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "radixkv" / "chat_history"


def typed_messages() -> Iterator[str]:
    """Yield typed lines until Ctrl-D. Ctrl-C drops the line.

    In a terminal: arrow keys and Ctrl-R walk through the history, Alt-Enter (or a backslash at the end of a
    line) begins another line of the same message, Tab completes commands. Otherwise: one message a line.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    read = prompt_reader()
    while True:
        try:
            yield read()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def prompt_reader() -> Callable[[], str]:
    """A function that reads one message from the terminal; lines are remembered in `history_file()`."""
    from prompt_toolkit import PromptSession  # optional, and slow to import
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.shortcuts import CompleteStyle

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    path = history_file()
    typed: History
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        typed = FileHistory(str(path))
    except OSError:
        typed = InMemoryHistory()
    session: PromptSession[str] = PromptSession(
        "> ",
        history=typed,
        multiline=True,
        key_bindings=keys,
        completer=WordCompleter(list(COMMANDS), sentence=True),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        prompt_continuation="  ",
    )
    return session.prompt
