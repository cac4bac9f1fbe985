# SPDX-License-Identifier: Apache-2.0
"""DiskTier: blocks in a folder, which outlive the process.

    engine's thread     lookup, wants: the index in memory        save: to the queue
    the writer          append ... append, sync when a second has passed or nothing is left to write
    the reader          read, verify

The first error of a disk turns the tier off: it has nothing and wants nothing any more, and the engine goes
on without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from radixkv.cache.block_run import BlockRun
from radixkv.cache.keys import TOKEN_BYTES
from radixkv.errors import ConfigError
from radixkv.text.thread_priority import yield_to_steps
from radixkv.tiers.disk.folder import FolderLock
from radixkv.tiers.disk.segments import DiskCounts, SegmentStore
from radixkv.tiers.queued_bytes import QueuedBytes
from radixkv.tiers.record import HEADER_BYTES, BlockKind, BlockName, BlockNames
from radixkv.tiers.selection import Selection
from radixkv.tiers.tier import BlocksBeforeDamage, Bytes, OpenTier, TierBlocks, TierState

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

logger = logging.getLogger("radixkv")

# Seconds after which written records are synced, also while more are being written.
_SYNC_S = 1.0
# Longest that the end of the tier waits for queued writes.
_CLOSE_S = 30.0
_SEGMENTS = 32  # at the cap, if they are not larger than that
_MAX_SEGMENT_BYTES = 256 << 20
_MIN_RECORDS = 64  # that the cap must have room for,
_MIN_STATES = 4  # or so many of states


class _QueuedSave(NamedTuple):
    """Blocks to write: their names, the tokens and data of each, and their times of use."""

    names: Sequence[BlockName] = ()
    tokens: Sequence[bytes] = ()
    data: Sequence[Bytes] = ()
    uses: Sequence[int] = ()


class DiskTier(OpenTier):
    """Tier of blocks in the files of a folder; see the module.

    Args:
        folder: made if it is missing.
        max_bytes: limit of the size of its files.
        kind: the blocks' kind.
        states: the kind of the states kept beside them; None: the model has none.
        selection: blocks to save; None: see `Selection`.
        system: see `SegmentStore`.

    Attributes:
        failure: the reason why it is off; None: it is on.
        failures: call -> number of its failures on the disk.

    Raises:
        ConfigError: another process has the folder, it can't be used, or the cap is too small for the model.
    """

    name = "disk"

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        kind: BlockKind,
        *,
        states: BlockKind | None = None,
        selection: Selection | None = None,
        system: Any = os,
    ) -> None:
        self.selection = selection or Selection()
        self.keeps_states = states is not None
        record = _record_bytes(kind)
        largest = record if states is None else max(record, _record_bytes(states))
        least = max(_MIN_RECORDS * record, _MIN_STATES * largest)
        if max_bytes < least:
            what = "blocks" if least == _MIN_RECORDS * record else "states"
            count, each = (_MIN_RECORDS, record) if what == "blocks" else (_MIN_STATES, largest)
            raise ConfigError(
                f"the K/V tier disk:{folder} has a cap of {max_bytes:,} bytes, and the model's {what} take "
                f"{each:,} each: give it room for {count} at least, max={least}"
            )
        self.folder = folder
        self._kinds = kind, kind if states is None else states  # by whether a run is one of states
        self._namers = tuple([BlockNames(each) for each in self._kinds])
        self._lock = FolderLock(folder)
        try:
            segment_bytes = max(min(max_bytes // _SEGMENTS, _MAX_SEGMENT_BYTES), 2 * largest)
            about = f"{kind.model_name}\n{kind.model}\n".encode() if kind.model_name else b""
            self._store = SegmentStore(folder, max_bytes, segment_bytes, about=about, system=system)
        except OSError as error:
            self._lock.release()
            raise ConfigError(f"the K/V tier's folder {folder}: {error.strerror or error}") from error
        if self._store.foreign_bytes:
            logger.info(
                "the K/V tier's folder %s has %d bytes of another version of the format: they are not read, "
                "and stay until their room is needed; `radixkv cache clear` removes them",
                folder,
                self._store.foreign_bytes,
            )
        self.failure: BaseException | None = None
        self.failures: Counter[str] = Counter()
        self._coming: set[bytes] = set()  # keys of what is queued
        self._queued = QueuedBytes()
        self._queue: queue.SimpleQueue[_QueuedSave | None] = queue.SimpleQueue()
        self._reader = ThreadPoolExecutor(1, "radixkv-disk-reader")
        self._writer = threading.Thread(target=self._write_all, name="radixkv-disk-writer", daemon=True)
        self._writer.start()
        # Also without a call of `close`: queued saves are written before the interpreter ends.
        self._end = weakref.finalize(self, _end, self._queue, self._writer)

    def __repr__(self) -> str:
        if self.failure is not None:
            return f"DiskTier({self.folder}, off: {self.failure})"
        return f"DiskTier({self.folder}, {len(self._store)} blocks, {self._store.num_bytes / 2**20:.0f} MiB)"

    @property
    def counts(self) -> DiskCounts:
        """Counts of its records."""
        return self._store.counts

    @property
    def num_bytes(self) -> int:
        """Bytes of its files."""
        return self._store.num_bytes

    @property
    def is_up(self) -> bool:
        """True unless it is off."""
        return self.failure is None

    @property
    def dropped_blocks(self) -> int:
        """Blocks that it lacked, when the queue had no room."""
        return self._queued.dropped_blocks

    # ------------------------------------------------------------------ on the engine's thread

    def lookup(self, run: BlockRun) -> tuple[TierState, int]:
        """See `Tier`. O(tokens)."""
        count = 0
        if self.failure is None and len(self._store):
            for name in self._names_of(run):
                if name.key not in self._store:
                    break
                count += 1
        return (TierState.HIT, count) if count else (TierState.MISS, 0)

    def last(self, run: BlockRun) -> int:
        """See `Tier`. O(tokens)."""
        if self.failure is not None or not len(self._store):
            return -1
        kept = [index for index, name in enumerate(self._names_of(run)) if name.key in self._store]
        return max(kept, default=-1)

    def load(self, run: BlockRun) -> Future[Sequence[TierBlocks]]:
        """See `Tier`."""
        future: Future[Sequence[TierBlocks]] = Future()
        self._reader.submit(self._read, run, future)
        return future

    def wants(self, run: BlockRun) -> range:
        """See `Tier`: the missing blocks, as far as the queue has room."""
        if self.failure is not None:
            return range(0)
        missing = [index for index, name in enumerate(self._names_of(run)) if self._lacks(name)]
        return self._queued.wanted(missing, self._kinds[run.is_state].block_bytes)

    def save(self, run: BlockRun, data: npt.NDArray[np.uint8]) -> None:
        """See `Tier`."""
        if self.failure is not None:
            return
        missing = [(index, name) for index, name in enumerate(self._names_of(run)) if self._lacks(name)]
        if missing:
            tokens = [run.tokens_of(index) for index, _ in missing]
            names, rows = [name for _, name in missing], [data[index] for index, _ in missing]
            save = _QueuedSave(names, tokens, rows, self._store.next_uses(len(missing)))
            self._coming.update(name.key for name in save.names)
            self._queued.add(len(missing) * self._kinds[run.is_state].block_bytes)
            self._queue.put(save)

    def touch(self, run: BlockRun) -> None:
        """See `Tier`; soon written down, so that it survives. O(tokens)."""
        self._use([name.key for name in self._names_of(run)])

    def _use(self, keys: Sequence[bytes]) -> None:
        if self._store.use(keys):
            self._queue.put(_QueuedSave())

    def flush(self, timeout: float) -> None:
        """See `OpenTier`: written blocks are kept."""
        self._queued.wait(timeout, or_until=lambda: self.failure is not None)

    def close(self) -> None:
        """Write the queued saves, sync, and release the folder. May be called again."""
        self._end()
        self._reader.shutdown(wait=False, cancel_futures=True)
        if not self._writer.is_alive():
            self._lock.release()

    def _names_of(self, run: BlockRun) -> Iterator[BlockName]:
        """The names of a run's blocks or states, in order. O(tokens)."""
        return self._namers[run.is_state].of(run)

    def _lacks(self, name: BlockName) -> bool:
        return name.key not in self._store and name.key not in self._coming

    # ------------------------------------------------------------------ on the reader's thread

    def _read(self, run: BlockRun, future: Future[Sequence[TierBlocks]]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        blocks: list[Bytes] = []
        damaged = self._store.counts.damaged  # only this thread finds more while it reads
        try:
            keys = []
            for index, name in enumerate(self._names_of(run)):
                block = None if self.failure is not None else self._store.read(name, run.tokens_of(index))
                if block is None:
                    break
                blocks.append(block)
                keys.append(name.key)
            self._use(keys)
        except OSError as error:
            self._turn_off("load", error)
        except BaseException as error:
            future.set_exception(error)
            return
        kind = BlocksBeforeDamage if self._store.counts.damaged > damaged else TierBlocks
        future.set_result([kind(run.part(0, len(blocks)), blocks)])

    # ------------------------------------------------------------------ on the writer's thread

    def _write_all(self) -> None:
        """Write queued saves until the end, or the first error."""
        yield_to_steps()
        try:
            self._write_until_end()
            self._store.close()
        except BaseException as error:
            self._turn_off("save", error)
            self._store.abandon()
            self._queued.add(0)  # wakes `flush`
            with contextlib.suppress(queue.Empty):
                while True:
                    self._queue.get_nowait()

    def _write_until_end(self) -> None:
        sync_at: float | None = None  # None: all is synced
        while True:
            timeout = None if sync_at is None else max(0.0, sync_at - time.monotonic())
            try:
                save = self._queue.get(timeout=timeout)
            except queue.Empty:
                self._store.sync()
                sync_at = None
                continue
            if save is None:
                return
            sync_at = sync_at or time.monotonic() + _SYNC_S
            for name, tokens, block, use in zip(*save, strict=True):
                if name.key not in self._store:
                    self._store.append(name, tokens, block, use)
                self._coming.discard(name.key)
                self._queued.add(-len(block))
                if time.monotonic() >= sync_at:
                    self._store.sync()
                    sync_at = time.monotonic() + _SYNC_S

    def _turn_off(self, what: str, error: BaseException) -> None:
        self.failures[what] += 1
        if self.failure is None:
            self.failure = error
            logger.warning(
                "the K/V tier in %s is off from now on, and prompts are computed instead: %s: %s",
                self.folder,
                type(error).__name__,
                error,
            )


def _record_bytes(kind: BlockKind) -> int:
    return HEADER_BYTES + kind.block_size * TOKEN_BYTES + kind.block_bytes


def _end(saves: queue.SimpleQueue[_QueuedSave | None], writer: threading.Thread) -> None:
    """Write all saved blocks, and end the writer."""
    saves.put(None)
    writer.join(_CLOSE_S)
