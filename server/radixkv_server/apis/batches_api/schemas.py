# SPDX-License-Identifier: Apache-2.0
"""The body of a batch."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import field_validator

from radixkv_server.apis.responses.schemas import Metadata
from radixkv_server.batches.lines import URLS
from radixkv_server.http.body import StrictModel
from radixkv_server.http.fields import Refused

_WINDOW = re.compile(r"([1-9][0-9]{0,3})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86400}
MAX_WINDOW_S = 14 * 86400


class BatchBody(StrictModel):
    """Body of POST /v1/batches.

    Args:
        input_file_id: a file of requests, one a line.
        endpoint: path that all its requests are for.
        completion_window: time after which requests without an answer are given up, as `24h`, `30m` or `7d`.
        metadata: returned with the batch.
    """

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: Annotated[Any, Refused("an end of the files of answers")] = None

    @field_validator("endpoint")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in URLS:
            raise ValueError(f"it must be one of {', '.join(URLS)}.")
        return value

    @field_validator("completion_window")
    @classmethod
    def _time(cls, value: str) -> str:
        if not 0 < _seconds(value) <= MAX_WINDOW_S:
            raise ValueError("it must be a number of minutes, hours or days, as 30m, 24h or 7d; at most 14d.")
        return value

    @property
    def window_s(self) -> float:
        return _seconds(self.completion_window)


def _seconds(window: str) -> int:
    found = _WINDOW.fullmatch(window)
    return int(found[1]) * _SECONDS[found[2]] if found else 0
