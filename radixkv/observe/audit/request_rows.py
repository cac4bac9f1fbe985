# SPDX-License-Identifier: Apache-2.0
"""RequestRows: what is told of each request of a log, in the order read, however many there are."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from typing import Self

from radixkv.observe.audit.record import Json, Record


class RequestRows:
    """Rows on disk, in a file that nobody else sees and that goes when this is closed."""

    def __init__(self) -> None:
        self._rows = sqlite3.connect("", isolation_level=None)
        self._rows.execute("PRAGMA journal_mode = OFF")
        self._rows.execute("CREATE TABLE rows (file INTEGER, number INTEGER, row TEXT)")
        self._rows.execute("BEGIN")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._rows.close()

    def add(self, record: Record, row: Json) -> None:
        """One more, whose place among the others is the record's."""
        self._rows.execute("INSERT INTO rows VALUES (?, ?, ?)", (*record.order, json.dumps(row)))

    def texts(self) -> Iterator[str]:
        """The rows as JSON, in the order of the log's files and of what stands in them."""
        for (text,) in self._rows.execute("SELECT row FROM rows ORDER BY file, number, rowid"):
            yield text
