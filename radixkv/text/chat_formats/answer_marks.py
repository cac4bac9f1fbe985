# SPDX-License-Identifier: Apache-2.0
"""AnswerScope: the place of an answer in a model's text, outside of thoughts and of marks around it.

    text:    <think>\\nHm.\\n\\nSo be it.\\n</think>\\n\\nYes.\\n\\nMore
    answer:                                      ^^^^^^^^^^^^^

A client's stop strings end the answer alone: the two line breaks inside and after these thoughts end nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.text.chat_formats.format_parser import CALLS, REASONING, SPOKEN, marks_of


@dataclass(frozen=True, slots=True)
class AnswerMarks:
    """Marks of a format that tell answers from thoughts, as plain data.

    Args:
        opens, closes: marks that begin thoughts, and that end them.
        spoken: marks that begin content.
        calls: marks of calls that end thoughts.
        prefix: the end of the prompt, where it has begun the answer.
    """

    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    spoken: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    prefix: str = ""


class AnswerScope:
    """Finds the answer in one sample's growing text.

    Attributes:
        is_thinking: the text so far ends inside of thoughts.
        is_before_words: it ends in marks or in line breaks after them, which are no content.
    """

    def __init__(self, marks: AnswerMarks) -> None:
        speaks = dict.fromkeys(marks.spoken, SPOKEN)
        inside = {**dict.fromkeys(marks.calls, CALLS), **speaks, **dict.fromkeys(marks.closes, REASONING)}
        outside = {**speaks, **dict.fromkeys(marks.opens, REASONING)}
        self._inside = marks_of(tuple(inside.items()))
        self._outside = marks_of(tuple(outside.items()))
        self.is_thinking = self.is_before_words = False
        at = 0
        while at < len(marks.prefix):
            at = self.next_part(marks.prefix, at, ended=True)[2]

    def next_part(self, text: str, at: int, *, ended: bool) -> tuple[int, int, int]:
        """Return the next part of the answer as (start, end, where to go on).

        Args:
            at: where the call before said to go on, or less by a piece of the answer.
            ended: no more text comes.

        Returns:
            The text from `end` on is not decided yet where that is the place to go on.
        """
        if self.is_thinking:
            end, mark, kind = self._inside.find(text, at, ended=ended)
            if not mark:
                return end, end, end
            self.is_thinking = False
            at = end if kind == CALLS else end + len(mark)
            self.is_before_words = kind != CALLS
        if self.is_before_words:
            while text.startswith("\n", at):
                at += 1
            if at == len(text):
                return at, at, at
        end, mark, kind = self._outside.find(text, at, ended=ended)
        if end > at:
            self.is_before_words = False
        if not mark:
            return at, end, end
        self.is_thinking = kind == REASONING
        self.is_before_words = kind == SPOKEN or self.is_before_words
        return at, end, end + len(mark)
