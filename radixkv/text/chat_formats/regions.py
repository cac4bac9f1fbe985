"""Regions of an answer: which part of a model's text stands between which marks.

The work is done by the streaming parser of transformers' response templates. Around it: it is fed bounded
pieces and renewed now and then, because it keeps all it was fed and searches it again for every region, so
that any text takes linear time; and the marks themselves are reported, so that nothing of the text is lost.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

_PIECE = 512  # characters fed at once: each region that begins in a piece is looked for in the rest of it
_RENEWED = 8192  # characters after which a new parser goes on
_CONTENT = "content"


@dataclass(frozen=True, slots=True)
class Region:
    """A part of an answer between marks.

    Args:
        opens: texts of which each begins the region. Where one is the beginning of another, so are all texts
            between the two: the parser waits for the longer one only from one to the next.
        closes: texts of which each ends it; none: it goes on to the end of the answer.
    """

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RegionEvent:
    """Part of the text; all `text` together is the whole of it.

    Attributes:
        kind: the mark that opens a region, text inside of it, or the mark that closes it (empty at the end).
        region: its name; None: outside of all regions, always `text`.
    """

    kind: Literal["open", "text", "close"]
    region: str | None
    text: str


@functools.lru_cache(maxsize=64)
def _template(regions: tuple[Region, ...]) -> Any:
    """The regions as a response template of transformers."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    fields: dict[str, Any] = {_CONTENT: {"content": "text", "repeats": True}}
    for region in regions:
        assert region.name != _CONTENT
        fields[region.name] = {"open": list(region.opens), "content": "text", "repeats": True}
        if region.closes:
            fields[region.name]["close"] = list(region.closes)
    # What comes before the answer is not parsed here, so its anchor is never looked for.
    return load_response_template({"start_anchor": "\0", "fields": fields})


class RegionReader:
    """Divides one growing text into regions. O(text) altogether, however it is cut."""

    def __init__(self, regions: tuple[Region, ...]) -> None:
        self._regions = {region.name: region for region in regions}
        self._template = _template(regions)
        self._pending = ""  # fed; emitted up to `_emitted`
        self._emitted = 0
        self._fed = 0
        self._inside: Region | None = None
        self._parser = self._new_parser()
        self._reentering = False

    def push(self, text: str) -> Iterator[RegionEvent]:
        """What more text says."""
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            self._pending = self._pending[self._emitted :] + piece
            self._emitted = 0
            self._fed += len(piece)
            yield from self._events(self._parser.feed(piece))
            if self._fed >= _RENEWED:
                yield from self._renew()

    def finish(self) -> Iterator[RegionEvent]:
        """What was held back, once the text has ended."""
        yield from self._events(self._parser.finalize()[1])

    def _new_parser(self) -> Any:
        from transformers.utils.chat_parsing import ResponseParser

        return ResponseParser(self._template, prefix="")

    def _renew(self) -> Iterator[RegionEvent]:
        """Go on with a parser that has not seen the text so far, inside the same region."""
        held = self._pending[self._emitted :]
        self._pending, self._emitted, self._fed = held, 0, len(held)
        self._parser = self._new_parser()
        self._reentering = self._inside is not None
        mark = max(self._inside.opens, key=len) if self._inside is not None else ""
        yield from self._events(self._parser.feed(mark + held))

    def _events(self, events: list[dict[str, Any]]) -> Iterator[RegionEvent]:
        for event in events:
            name = event["field"]
            if event["type"] == "region_chunk":
                text = event["text"]
                self._emitted += len(text)
                yield RegionEvent("text", None if name == _CONTENT else name, text)
            elif name == _CONTENT:
                continue
            elif event["type"] == "region_open":
                if self._reentering:
                    self._reentering = False
                    continue
                self._inside = self._regions[name]
                yield RegionEvent("open", name, self._mark(self._inside.opens))
            else:
                self._inside = None
                yield RegionEvent("close", name, self._mark(self._regions[name].closes))

    def _mark(self, marks: tuple[str, ...]) -> str:
        """The longest of the marks that stands where what has been emitted ends; none at the text's end."""
        found = [mark for mark in marks if self._pending.startswith(mark, self._emitted)]
        mark = max(found, key=len, default="")
        self._emitted += len(mark)
        return mark
