# SPDX-License-Identifier: Apache-2.0
"""RequestRows: rows of any number of requests, in the order of the log."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from typing import Self

from radixkv.observe.audit.record import Json, Record


class RequestRows:
    """Rows in a private temporary file, which is deleted on closing."""

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
        """Add a row, ordered by its record's place."""
        self._rows.execute("INSERT INTO rows VALUES (?, ?, ?)", (*record.order, json.dumps(row)))

    def texts(self) -> Iterator[str]:
        """Yield the rows as JSON, in the order of the log's files and their records."""
        for (text,) in self._rows.execute("SELECT row FROM rows ORDER BY file, number, rowid"):
            yield text
