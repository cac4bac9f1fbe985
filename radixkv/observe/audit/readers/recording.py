# SPDX-License-Identifier: Apache-2.0
"""Recording: the requests of several files in the order of their beginning, and unreadable records."""

from __future__ import annotations

import heapq
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from radixkv.observe.audit.body_limits import BodyLimits
from radixkv.observe.audit.grown import Grown
from radixkv.observe.audit.readers.json_objects import objects_in
from radixkv.observe.audit.readers.lines import READ_ERRORS, DamagedFile, damaged, numbered_lines, open_plain
from radixkv.observe.audit.readers.payloads import NotAModel, record_in
from radixkv.observe.audit.record import Block, Record, input_items
from radixkv.observe.audit.recorded_images import with_image_tokens
from radixkv.observe.audit.request_bodies import FIRST_ITEM, NextItem, NoRequest, response_items

MAX_NAMED = 20  # problems that are named one by one
_WINDOW = 64  # records that are waited for, so that logs written when answers end come in order
_SNIFFED = 4096
_POINTER_BYTES = 8
_BYTES_PER_PIECE = 16  # of an object: of shorter pieces its value takes many times its text
_HAR = re.compile(rb'\s*\{\s*"log"\s*:')


@dataclass(slots=True)
class Problems:
    """Unreadable records, counted by reason, with the places of the first ones."""

    count: int = 0
    by_reason: Counter[str] = field(default_factory=Counter)
    named: list[str] = field(default_factory=list)

    def add(self, place: str, why: str) -> None:
        """Count a problem; `why` quotes nothing of the log."""
        self.count += 1
        self.by_reason[re.sub(r"\d+", "N", why)] += 1
        if len(self.named) < MAX_NAMED:
            self.named.append(f"{place}: {why}")


class Recording:
    """Files of recorded requests.

    Args:
        memory_bytes: memory for records waiting for their turn, and answers that later requests name by id.

    Attributes:
        problems: unreadable records so far.
        skipped: number of requests in HAR files that were not to a model.
        unread: files so far of which nothing could be read, each with a reason.
    """

    def __init__(self, paths: Sequence[Path], memory_bytes: int = 128 * 1024 * 1024) -> None:
        self.problems = Problems()
        self.skipped = 0
        self.unread: list[str] = []
        self.num_bytes = 0  # read so far
        self._paths = paths
        self._memory = memory_bytes
        self._max_object = max(1 << 20, memory_bytes // 4)
        self._limits = BodyLimits(self._max_object, self._max_object // _BYTES_PER_PIECE)

    def __iter__(self) -> Iterator[Record]:
        """Yield the records in the order of their times, or, without times, of the files.

        Raises:
            DamagedFile: no file could be read at all.
        """
        streams = [self._in_order(self._of_file(path, number)) for number, path in enumerate(self._paths)]
        threads = _Threads(self._memory // 4)
        for _, record in heapq.merge(*streams, key=lambda timed: timed[0]):
            try:
                yield threads.whole(record)
            except NoRequest as error:
                self.problems.add(record.place, str(error))

    def _in_order(self, records: Iterable[Record]) -> Iterator[tuple[float, Record]]:
        waiting: list[tuple[float, int, Record]] = []
        latest, held = 0.0, 0
        for number, record in enumerate(records):
            latest = latest if record.time is None else record.time
            heapq.heappush(waiting, (latest, number, record))
            held += record.num_bytes
            while len(waiting) > _WINDOW or (held > self._memory // 4 and len(waiting) > 1):
                at, _, first = heapq.heappop(waiting)
                held -= first.num_bytes
                yield at, first
        while waiting:
            at, _, first = heapq.heappop(waiting)
            yield at, first

    def _of_file(self, path: Path, file_number: int) -> Iterator[Record]:
        name, why, any_read = path.name, "", False
        try:
            for number, text in self._pieces(path):
                self.num_bytes += len(text)
                place = f"{name}:{number}"
                try:
                    if len(text) > self._max_object:
                        raise NoRequest(f"longer than {self._max_object >> 20} MiB; give it more --memory")
                    record = record_in(self._limits.parsed(text), place, len(text), self._limits)
                    any_read = True
                    yield replace(record, order=(file_number, number))
                except NotAModel:
                    any_read = True
                    self.skipped += 1
                except NoRequest as error:
                    why = why or str(error)
                    self.problems.add(place, str(error))
                except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
                    why = why or "its fields are not of the kinds that logs have"
                    self.problems.add(place, "its fields are not of the kinds that logs have")
        except DamagedFile as error:
            place = f"{name}:{error.line}" if error.line else name
            why = why or error.why
            self.problems.add(place, error.why)
        if why and not any_read:
            self.unread.append(f"{path}: {why}")

    def _pieces(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """Yield the objects of a file as text, with their numbers: lines, or entries of a document."""
        with open_plain(path) as stream:
            try:
                head = stream.read(_SNIFFED)
            except READ_ERRORS as error:
                raise damaged(path, 0, error) from None
        head = head.removeprefix(b"\xef\xbb\xbf")
        if _HAR.match(head):
            return objects_in(path, 3, self._max_object)
        if head.lstrip()[:1] == b"[":
            return objects_in(path, 1, self._max_object)
        first = head.lstrip().partition(b"\n")[0].strip()
        if first in (b"{", b"") or (first[:1] == b"{" and first[-1:] == b","):
            return objects_in(path, 0, self._max_object)  # objects over several lines
        return numbered_lines(path, self._max_object)


class _Thread(NamedTuple):
    """Stored answer with everything before it, for requests that continue it.

    Attributes:
        items: of the Responses API.
        blocks: the same, rendered, after the instructions of its last request.
        num_first: blocks of these instructions, which the next request need not repeat.
        after: where the next item goes.
        num_bytes: that it takes.
    """

    items: Grown[Any]
    blocks: Grown[Block]
    num_first: int
    after: NextItem
    num_bytes: int


_NOTHING = _Thread(Grown([]), Grown([]), 0, FIRST_ITEM, 0)


class _Threads:
    """Completion of requests that continue an earlier answer by its id, from stored conversations.

    Only the new items of each request are rendered.
    """

    def __init__(self, max_bytes: int) -> None:
        self._known: OrderedDict[str, _Thread] = OrderedDict()
        self._max_bytes = max_bytes
        self._bytes = 0

    def whole(self, record: Record) -> Record:
        """Return the record with its whole prompt. O(new items), if it repeats the instructions.

        Raises:
            NoRequest: the log lacks the answer that it continues, so that its prompt is not known.
        """
        if record.dialect != "responses":
            return record
        before, known = record.body.get("previous_response_id"), _NOTHING
        added = input_items(record.body.get("input"))
        if before:
            found = self._known.get(str(before))
            if found is None:
                raise NoRequest("it goes on after an answer that is not in the log; its prompt is not known")
            known = found
        more, after = response_items(added, known.after)  # the same objects in this prompt and in later ones
        more = [with_image_tokens(block, record.model, "responses") for block in more]
        first = [block for block in record.blocks if block.message < FIRST_ITEM.message]
        blocks = known.blocks
        if not before or first != blocks[: known.num_first]:
            blocks = Grown([*first, *blocks[known.num_first :]])
        blocks = blocks.grown(more)
        record = replace(record, blocks=blocks, earlier=known.items)
        if record.response_id:
            said, after = response_items(record.output, after)
            beginning = known.items if before else Grown[Any]([])  # the one of no conversation stays empty
            items = beginning.grown([*added, *record.output])
            size = record.num_bytes + _POINTER_BYTES * (len(items) + len(blocks))
            self._keep(record.response_id, _Thread(items, blocks.grown(said), len(first), after, size))
        return record

    def _keep(self, response_id: str, thread: _Thread) -> None:
        self._bytes += thread.num_bytes - self._known.pop(response_id, _NOTHING).num_bytes
        self._known[response_id] = thread
        while self._bytes > self._max_bytes and len(self._known) > 1:
            self._bytes -= self._known.popitem(last=False)[1].num_bytes
