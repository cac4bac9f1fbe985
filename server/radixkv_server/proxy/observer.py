# SPDX-License-Identifier: Apache-2.0
"""The observer: a process beside the traffic that records requests and shows their cache hits.

It reads the records of `Feed` from its standard input, and ends with it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from radixkv.observe.audit.body_limits import BodyLimits
from radixkv.observe.audit.prices import Prices
from radixkv.observe.audit.record import Record
from radixkv.observe.audit.request_bodies import NoRequest
from radixkv.observe.audit.rule_sets import rule_set
from radixkv_server.proxy.feed import Seen, read_frames
from radixkv_server.proxy.fleet_state import UpstreamState
from radixkv_server.proxy.key_removal import record_without_keys
from radixkv_server.proxy.record_file import RecordFile
from radixkv_server.proxy.redaction import Redaction
from radixkv_server.proxy.watched import Watched

logger = logging.getLogger(__name__)

NICE = 5
MAX_PIECES = 1 << 20  # of the JSON of one body


@dataclass(frozen=True, slots=True)
class ObserverSettings:
    """Settings of an observer.

    Attributes:
        record: file to write requests to; None: none.
        redact: replace texts in the file by hashes.
        record_bytes, record_files: largest size of a file, and number of files to keep.
        redaction_key: key that gives equal texts equal hashes in all files of a proxy.
        rules: name of the rules that predict hits.
        console_port: port of the console on `host`; None: no console.
        memory_bytes: memory for the blocks of earlier prompts.
        prices: prices for the cost of prompts.
        max_body_bytes: longest body, unpacked, that is read.
    """

    record: Path | None
    redact: bool
    record_bytes: int
    record_files: int
    redaction_key: bytes
    rules: str
    host: str
    console_port: int | None
    memory_bytes: int
    prices: Prices | None = None
    max_body_bytes: int = 32 << 20

    @property
    def is_needed(self) -> bool:
        """True if these settings need an observer."""
        return self.record is not None or self.console_port is not None


class Observer:
    """Recorder and analyser of requests, one by one."""

    def __init__(self, settings: ObserverSettings) -> None:
        self._limits = BodyLimits(settings.max_body_bytes, MAX_PIECES)
        self._file: RecordFile | None = None
        self._num_unwritten = 0  # since the record could be written last
        if settings.record is not None:
            redaction = Redaction(settings.redaction_key) if settings.redact else None
            self._file = RecordFile(settings.record, settings.record_bytes, settings.record_files, redaction)
        self._watched: Watched | None = None
        if settings.console_port is not None:
            from radixkv_server.proxy.console import start_console  # FastAPI; a record does without

            self._watched = Watched(rule_set(settings.rules), settings.memory_bytes)
            start_console(self._watched, settings.prices, settings.host, settings.console_port)

    def take(self, seen: Seen) -> None:
        """Take in a request, begun or with its answer; ignore requests to other routes than a model's."""
        try:
            exchange, record = record_without_keys(seen.exchange, seen.secrets, self._limits)
        except NoRequest:
            return
        seen = replace(seen, exchange=exchange, secrets=())
        record = replace(record, conversation=seen.conversation or record.conversation)
        if self._file is not None and seen.has_ended:
            self._write(self._file, seen, record)
        if self._watched is not None and seen.has_ended:
            self._watched.take(seen, record)
        elif self._watched is not None:
            self._watched.begin(seen, record)

    def _write(self, file: RecordFile, seen: Seen, record: Record) -> None:
        """Append to the record; a fault is logged once, and the number of lost requests at its end."""
        try:
            file.write(seen, record)
        except OSError as error:
            if not self._num_unwritten:
                logger.warning("--record: %s; requests are not recorded", error.strerror or error)
            self._num_unwritten += 1
        else:
            if self._num_unwritten:
                logger.warning("--record: requests are recorded again, after %d lost", self._num_unwritten)
            self._num_unwritten = 0

    def take_states(self, states: list[UpstreamState]) -> None:
        """Take in the states of upstreams, if there are several."""
        if self._watched is not None:
            self._watched.take_states(states)

    def close(self) -> None:
        """Close the record after the last request."""
        if self._file is not None:
            self._file.close()


def main() -> None:
    """Run the observer until its standard input ends."""
    logging.basicConfig(level=logging.INFO, format="radixkv proxy: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the proxy says when to end
    if hasattr(os, "nice"):
        os.nice(NICE)  # the traffic goes first
    frames = read_frames(sys.stdin.buffer)
    observer = Observer(next(frames))
    for frame in frames:
        try:
            observer.take(frame) if isinstance(frame, Seen) else observer.take_states(frame)
        except Exception as error:  # one request's fault is no other's
            logger.warning("a request could not be looked at: %s", type(error).__name__)
    observer.close()


if __name__ == "__main__":
    main()
