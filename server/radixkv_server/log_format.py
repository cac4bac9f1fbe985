# SPDX-License-Identifier: Apache-2.0
"""Formats of the server's log: lines of text, or of JSON for machines."""

from __future__ import annotations

import json
import logging
import time

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


class JsonFormatter(logging.Formatter):
    """Formatter of JSON lines: `time` (UTC), `level`, `logger`, `message`, and the access log's fields.

    The attribute `fields` of a log record, a mapping, is merged in; a traceback becomes `error`.
    """

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logging(log_format: str, level: str | None) -> None:
    """Set the format of all the process's logs, and the level of radixkv's.

    Args:
        log_format: one of `FORMATS`.
        level: one of `LEVELS`; None: as it is.
    """
    if log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())
    if level is not None:
        logging.getLogger("radixkv").setLevel(level.upper())
