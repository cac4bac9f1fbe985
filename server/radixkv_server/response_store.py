"""ResponseStore: answers that may be asked for again, by tenant and id, within bounds.

What is stored is bytes; neither prompts' token ids nor K/V are. A tenant's least recently used answers make
room for its new ones, and never another tenant's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from radixkv.errors import ConfigError

logger = logging.getLogger("radixkv.server")

T = TypeVar("T")


class ResponseStore(Protocol):
    """Bytes by tenant and id."""

    async def put(self, tenant: str, key: str, data: bytes) -> None:
        """Keep `data`, the tenant's latest; what the bounds no longer allow is forgotten."""

    async def get(self, tenant: str, key: str) -> bytes | None:
        """What was put, used just now; None: nothing of this tenant's."""

    async def delete(self, tenant: str, key: str) -> bool:
        """Forget it; False: there was nothing of this tenant's."""

    async def close(self) -> None:
        """Write what is not written yet; the store is not used again."""


class MemoryStore:
    """Responses in this process, lost with it. Every call is O(1), amortised.

    Args:
        most: responses of one tenant.
        most_bytes: bytes of all of them.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._tenants: dict[str, OrderedDict[str, bytes]] = {}
        self._bytes: dict[str, int] = {}

    async def put(self, tenant: str, key: str, data: bytes) -> None:
        await self.delete(tenant, key)
        kept = self._tenants.setdefault(tenant, OrderedDict())
        kept[key] = data
        size = self._bytes.get(tenant, 0) + len(data)
        while len(kept) > self._most or size > self._most_bytes:
            size -= len(kept.popitem(last=False)[1])
        self._bytes[tenant] = size

    async def get(self, tenant: str, key: str) -> bytes | None:
        kept = self._tenants.get(tenant, OrderedDict())
        data = kept.get(key)
        if data is not None:
            kept.move_to_end(key)
        return data

    async def delete(self, tenant: str, key: str) -> bool:
        data = self._tenants.get(tenant, OrderedDict()).pop(key, None)
        if data is not None:
            self._bytes[tenant] -= len(data)
        return data is not None

    async def close(self) -> None:
        self._tenants.clear()


_TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    tenant TEXT NOT NULL, id TEXT NOT NULL, used INTEGER NOT NULL, size INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (tenant, id))
"""
_INDEX = "CREATE INDEX IF NOT EXISTS by_use ON responses (tenant, used, size)"
_NOW = "(SELECT IFNULL(MAX(used), 0) + 1 FROM responses WHERE tenant = :tenant)"
_PUT = f"INSERT OR REPLACE INTO responses VALUES (:tenant, :key, {_NOW}, :size, :data)"
_USE = f"UPDATE responses SET used = {_NOW} WHERE tenant = :tenant AND id = :key"
# What lies behind the bounds, counted from the latest used on.
_TRIM = """
DELETE FROM responses WHERE tenant = :tenant AND id IN (
    SELECT id FROM (
        SELECT id, ROW_NUMBER() OVER latest AS number, SUM(size) OVER latest AS total
        FROM responses WHERE tenant = :tenant WINDOW latest AS (ORDER BY used DESC))
    WHERE number > :most OR total > :most_bytes)
"""


class SqliteStore:
    """Responses in a file, which outlive the process. A thread of its own does the work.

    A response that can't be written (a full disk) is logged and lost, and its answer goes out all the same.

    Args:
        path: of the file; made, readable by its owner alone, if it is not there.
        most: responses of one tenant.
        most_bytes: bytes of all of them.

    Raises:
        ConfigError: the file can't be made or opened, or is no store of responses.
    """

    def __init__(self, path: str, most: int, most_bytes: int) -> None:
        self._bounds = {"most": most, "most_bytes": most_bytes}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="radixkv-responses")
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = self._thread.submit(_open, path).result()
        except (OSError, sqlite3.Error) as error:
            self._thread.shutdown()
            raise ConfigError(
                f"--response-store {path}: {error}; give a file in a folder that can be written, new or made "
                "by this flag"
            ) from error

    async def put(self, tenant: str, key: str, data: bytes) -> None:
        values = {"tenant": tenant, "key": key, "size": len(data), "data": data, **self._bounds}
        try:
            await self._run(lambda db: [db.execute(_PUT, values), db.execute(_TRIM, values)])
        except sqlite3.Error:
            logger.exception("a response could not be stored")

    async def get(self, tenant: str, key: str) -> bytes | None:
        values = {"tenant": tenant, "key": key}

        def read(db: sqlite3.Connection) -> bytes | None:
            row = db.execute("SELECT data FROM responses WHERE tenant = :tenant AND id = :key", values)
            found = row.fetchone()
            if found is not None:
                with contextlib.suppress(sqlite3.OperationalError):  # a full disk: it is read all the same
                    db.execute(_USE, values)
            return None if found is None else bytes(found[0])

        return await self._run(read)

    async def delete(self, tenant: str, key: str) -> bool:
        values = {"tenant": tenant, "key": key}
        statement = "DELETE FROM responses WHERE tenant = :tenant AND id = :key"
        return await self._run(lambda db: db.execute(statement, values).rowcount > 0)

    async def close(self) -> None:
        await self._run(lambda db: db.execute("PRAGMA wal_checkpoint(TRUNCATE)"))
        await asyncio.to_thread(self._thread.submit(self._db.close).result)
        self._thread.shutdown()

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._db)


def _open(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, timeout=10)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(_TABLE)
        db.execute(_INDEX)
    except BaseException:
        db.close()
        raise
    return db


def make_store(path: str | None, most: int, most_bytes: int) -> ResponseStore:
    """A store in memory, or in the file at `path`.

    Raises:
        ConfigError: see `SqliteStore`.
    """
    return MemoryStore(most, most_bytes) if path is None else SqliteStore(path, most, most_bytes)
