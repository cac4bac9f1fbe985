# SPDX-License-Identifier: Apache-2.0
"""SqliteStore: responses in a file, read and written in threads of its own, within bounded waits.

    event loop -- read --> reader's thread, its connection    continues while another process holds the lock
               -- write -> writer's thread, its connection    waits for that lock, at most `MAX_WAIT_S`

A call has `MAX_WAIT_S`, the wait for its turn included; work that has not begun by then is dropped. A file
that stays locked therefore costs each caller this time at most, however many callers there are.

`FILE-servers`, beside the file, holds the epoch: each server of the file keeps a shared lock on it, and a
server that can lock it alone is the first of a new epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from radixkv.errors import ConfigError
from radixkv_server.response_store import Change, MemoryStore, ResponseStore, StoreError, check_size

logger = logging.getLogger("radixkv.server")

T = TypeVar("T")

MAX_WAIT_S = 1.0
OPENING_WAIT_S = 10.0  # a server that is shutting down may still hold the lock
MAX_WAITING = 256

_TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    tenant TEXT NOT NULL, id TEXT NOT NULL, used INTEGER NOT NULL, size INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (tenant, id))
"""
_INDEX = "CREATE INDEX IF NOT EXISTS by_use ON responses (tenant, used, size)"
_NOW = "(SELECT IFNULL(MAX(used), 0) + 1 FROM responses WHERE tenant = :tenant)"
_GET = "SELECT data FROM responses WHERE tenant = :tenant AND id = :key"
_PUT = f"INSERT OR REPLACE INTO responses VALUES (:tenant, :key, {_NOW}, :size, :data)"
_USE = f"UPDATE responses SET used = {_NOW} WHERE tenant = :tenant AND id = :key"
_DELETE = "DELETE FROM responses WHERE tenant = :tenant AND id = :key"
# Deletes the entries beyond the bounds, the least recently used ones.
_TRIM = """
DELETE FROM responses WHERE tenant = :tenant AND id IN (
    SELECT id FROM (
        SELECT id, ROW_NUMBER() OVER latest AS number, SUM(size) OVER latest AS total
        FROM responses WHERE tenant = :tenant WINDOW latest AS (ORDER BY used DESC))
    WHERE number > :max_responses OR total > :max_bytes)
"""

_LOCKS = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_BUSY = "The store of responses is busy (another program may hold its file); try again."


class SqliteStore:
    """Responses in a file, which outlive the process.

    Args:
        path: path of the file; a missing one is made, readable by its owner alone.
        max_responses: most entries of one tenant.
        max_bytes: most bytes of one tenant.

    Raises:
        ConfigError: the file can't be made or opened, or is no store of responses.
    """

    def __init__(self, path: str, max_responses: int, max_bytes: int) -> None:
        self._bounds = {"max_responses": max_responses, "max_bytes": max_bytes}
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._writer = _Connection(path, "writes")
            self._reader = _Connection(path, "reads")
            self._servers, self.epoch = _join_servers(f"{path}-servers")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"--response-store {path}: {error}; give a file in a folder that can be written, new or made "
                "by this flag"
            ) from error

    async def put(self, tenant: str, key: str, data: bytes) -> None:
        values = {"tenant": tenant, "key": key, "size": len(data), "data": data, **self._bounds}
        await self._writer.run(lambda db: [db.execute(_PUT, values), db.execute(_TRIM, values)])

    async def get(self, tenant: str, key: str) -> bytes | None:
        values = {"tenant": tenant, "key": key}
        row = await self._reader.run(lambda db: db.execute(_GET, values).fetchone())
        if row is None:
            return None
        with contextlib.suppress(StoreError):  # reading works without the note of its use
            self._writer.submit(lambda db: db.execute(_USE, values))
        return bytes(row[0])

    async def update(self, tenant: str, key: str, change: Change) -> bytes | None:
        values = {"tenant": tenant, "key": key}

        def replace(db: sqlite3.Connection) -> bytes | None:
            row = db.execute(_GET, values).fetchone()
            if row is None:
                return None
            data = check_size(change(bytes(row[0])), self._bounds["max_bytes"])
            new = {**values, "size": len(data), "data": data, **self._bounds}
            db.execute(_PUT, new)
            db.execute(_TRIM, new)
            return data

        return await self._writer.run(lambda db: _in_transaction(db, replace))

    async def delete(self, tenant: str, key: str) -> bool:
        values = {"tenant": tenant, "key": key}
        return await self._writer.run(lambda db: db.execute(_DELETE, values).rowcount > 0)

    async def close(self) -> None:
        with contextlib.suppress(StoreError):
            await self._writer.run(lambda db: db.execute("PRAGMA wal_checkpoint(TRUNCATE)"))
        for connection in (self._reader, self._writer):
            await connection.close()
        os.close(self._servers)


def _join_servers(path: str) -> tuple[int, str]:
    """Lock the epoch's file, as the first server of a new epoch or a further one of the present epoch.

    POSIX locks, unlike flock's, do not stay with child processes that outlive the server.

    Returns:
        The descriptor that holds the lock, and the epoch.
    """
    servers = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.lockf(servers, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(servers, uuid.uuid4().hex.encode(), 0)
        except BlockingIOError:
            pass
        fcntl.lockf(servers, fcntl.LOCK_SH)
        return servers, os.pread(servers, 64, 0).decode("ascii")
    except BaseException:
        os.close(servers)
        raise


class _Connection:
    """Connection to the file, with the thread that uses it.

    Args:
        name: purpose, for the thread's name.

    Raises:
        sqlite3.Error: the file can't be opened.
    """

    def __init__(self, path: str, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"radixkv-response-{name}")
        self._places = threading.BoundedSemaphore(MAX_WAITING)
        try:
            self._db = self._thread.submit(_open, path).result()
        except BaseException:
            self._thread.shutdown()
            raise

    def submit(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Queue `work` for the thread; the future may end with a `StoreError`.

        Raises:
            StoreError: the queue is full.
        """
        if not self._places.acquire(blocking=False):
            raise StoreError(_BUSY, may_pass=True)
        future = self._thread.submit(self._do, work, time.monotonic() + MAX_WAIT_S)
        future.add_done_callback(lambda _: self._places.release())
        return future

    def _do(self, work: Callable[[sqlite3.Connection], T], deadline: float) -> T:
        left = deadline - time.monotonic()
        if left <= 0:
            raise StoreError(_BUSY, may_pass=True)
        try:
            self._db.execute(f"PRAGMA busy_timeout = {max(1, int(left * 1000))}")
            return work(self._db)
        except sqlite3.Error as error:
            logger.error("the store of responses: %s", error)
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _LOCKS:
                raise StoreError(_BUSY, may_pass=True) from error
            raise StoreError(
                f"The store of responses fails: {error}. Its operator can repair or replace the file.",
                may_pass=False,
            ) from error

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do `work` in the thread and wait for its result.

        Raises:
            StoreError: the work failed, or took too long.
        """
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self.submit(work)), 2 * MAX_WAIT_S)
        except TimeoutError:  # the disk does not answer
            raise StoreError(_BUSY, may_pass=True) from None

    async def close(self) -> None:
        """Close the connection; give up if the disk does not answer."""
        closing = asyncio.wrap_future(self._thread.submit(self._db.close))
        await asyncio.wait([closing], timeout=MAX_WAIT_S)
        self._thread.shutdown(wait=False)


def _in_transaction(db: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
    db.execute("BEGIN IMMEDIATE")
    try:
        done = work(db)
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise
    return done


def _open(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, timeout=OPENING_WAIT_S)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(_TABLE)
        db.execute(_INDEX)
    except BaseException:
        db.close()
        raise
    return db


def make_store(path: str | None, max_responses: int, max_bytes: int) -> ResponseStore:
    """Make a store in memory, or in the file at `path`.

    Raises:
        ConfigError: see `SqliteStore`.
    """
    if path is None:
        return MemoryStore(max_responses, max_bytes)
    return SqliteStore(path, max_responses, max_bytes)
