# SPDX-License-Identifier: Apache-2.0
"""ChatSession: a conversation and the commands that change it; it knows no terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from radixkv.cli.terminal_chat.partners import Message, Partner, Turn
from radixkv.errors import RadixKVError

HELP = """\
/system [TEXT]   set the system prompt, or show it; without a text after `/system -` it is taken away
/explain         how much of the conversation is cached, and why the rest is not
/save FILE       write the conversation as JSON, for /load, `radixkv explain` and others
/load FILE       go on with a saved conversation
/retry           ask for the latest answer again
/undo            forget the latest turn
/clear           begin anew, with the same system prompt
/help            this text
/quit            end (or Ctrl-D)"""


class ChatSession:
    """A conversation.

    Args:
        partner: who answers.
        write: prints a piece of an answer, as it comes.
        note: prints a line that is about the conversation, not of it.

    Attributes:
        messages: all messages so far, the system prompt first.
        has_ended: the user has left.
    """

    def __init__(
        self,
        partner: Partner,
        *,
        write: Callable[[str], None],
        note: Callable[[str], None],
        system: str | None = None,
    ) -> None:
        self._partner = partner
        self._write = write
        self._note = note
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self.has_ended = False

    def take(self, text: str) -> None:
        """Handle a typed line: a command or a message. Problems are printed, none is raised."""
        text = text.strip()
        try:
            if text.startswith("/"):
                name, _, argument = text.partition(" ")
                self._command(name, argument.strip())
            elif text:
                self._ask(text)
        except RadixKVError as error:
            self._note(f"error: {error}")

    def _ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        try:
            self._answer()
        except RadixKVError:
            self.messages.pop()  # nothing was said: the next try does not repeat it
            raise

    def _answer(self) -> None:
        turn, answer = Turn(), ""
        interrupted = False
        with closing(self._partner.stream(self.messages, turn)) as pieces:  # type: ignore[type-var]
            try:
                for piece in pieces:
                    answer += piece
                    self._write(piece)
            except KeyboardInterrupt:
                interrupted = True
        self._write("\n")
        self.messages.append({"role": "assistant", "content": answer})
        self._note(summary(turn) + (", stopped" if interrupted else ""))

    def _command(self, name: str, argument: str) -> None:
        commands = {
            "/system": self._system,
            "/explain": lambda _: self._note(self._partner.explain(self.messages)),
            "/save": self._save,
            "/load": self._load,
            "/retry": lambda _: self._retry(),
            "/undo": lambda _: self._undo(),
            "/clear": lambda _: self._clear(),
            "/help": lambda _: self._note(HELP),
            "/quit": lambda _: self._quit(),
            "/exit": lambda _: self._quit(),
        }
        if name in commands:
            commands[name](argument)
        else:
            self._note(f"there is no {name}; /help lists the commands")

    def _quit(self) -> None:
        self.has_ended = True

    def _system(self, text: str) -> None:
        has_one = bool(self.messages) and self.messages[0]["role"] == "system"
        if not text:
            self._note(self.messages[0]["content"] if has_one else "there is no system prompt")
            return
        if has_one:
            del self.messages[0]
        if text != "-":
            self.messages.insert(0, {"role": "system", "content": text})
        self._note("the system prompt has changed: nothing after its first new token will be found cached")

    def _clear(self) -> None:
        self.messages = [message for message in self.messages[:1] if message["role"] == "system"]
        self._note("begun anew")

    def _undo(self) -> bool:
        """Forget the latest turn; False: there is none."""
        questions = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not questions:
            self._note("there is no turn yet")
            return False
        del self.messages[questions[-1] :]
        self._note("the latest turn is forgotten")
        return True

    def _retry(self) -> None:
        questions = [message["content"] for message in self.messages if message["role"] == "user"]
        if self._undo():
            self._ask(questions[-1])

    def _save(self, name: str) -> None:
        if not name:
            self._note("/save needs the name of a file")
            return
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2) + "\n"
        try:
            Path(name).expanduser().write_text(text, encoding="utf-8")
        except OSError as error:
            self._note(f"{name} can't be written: {error.strerror or error}")
        else:
            self._note(f"{len(self.messages)} messages written to {name}")

    def _load(self, name: str) -> None:
        try:
            found = json.loads(Path(name).expanduser().read_text(encoding="utf-8"))
            messages = found["messages"] if isinstance(found, dict) else found
            self.messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in messages]
        except (OSError, ValueError, LookupError, TypeError) as error:
            self._note(f"{name or 'nothing'} can't be loaded as a conversation: {error}")
        else:
            self._note(f"{len(self.messages)} messages loaded from {name}")


def summary(turn: Turn) -> str:
    """Return the cost of a turn, in one line."""
    words = []
    if turn.prompt_tokens:
        cached, share = turn.cached_tokens, turn.cached_tokens / turn.prompt_tokens
        words.append(f"{cached} of {turn.prompt_tokens} prompt tokens from the cache ({share:.0%})")
    if turn.ttft_s is not None:
        words.append(f"first token after {turn.ttft_s:.2f} s")
        decoding = turn.total_s - turn.ttft_s
        if turn.output_tokens > 1 and decoding > 0:
            words.append(f"{turn.output_tokens} tokens at {(turn.output_tokens - 1) / decoding:.0f}/s")
    if turn.finish_reason == "length":
        words.append("cut off at --max-tokens")
    return ", ".join(words) or "no answer"
