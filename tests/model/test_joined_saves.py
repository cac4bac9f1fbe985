# SPDX-License-Identifier: Apache-2.0
"""Saves of a group of ranks are put together on rank 0, whichever thread is first at the last block."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from radixkv.channel import Channel
from radixkv.model.block_copy import BlockCopy
from radixkv.model.parallel.joined_saves import HEADER, JoinedSaves

RANK_BYTES = 8
SPANS = [(0, RANK_BYTES), (RANK_BYTES, 2 * RANK_BYTES)]


def own_copy(begun: threading.Event | None = None, goes_on: threading.Event | None = None) -> BlockCopy:
    """Rank 0's part of one block, whose copying waits where that is asked for."""
    rows = np.empty((1, RANK_BYTES), np.uint8)

    def fill(row: int) -> None:
        if begun is not None and goes_on is not None:
            begun.set()
            assert goes_on.wait(30)
        rows[row] = 1

    return BlockCopy(rows, fill)


@pytest.fixture
def rank_1() -> Iterator[tuple[JoinedSaves, Channel]]:
    """The saves of two ranks, and the connection on which the second one sends its blocks."""
    received, sent = map(Channel.over, socket.socketpair())
    group: Any = SimpleNamespace(workers=[SimpleNamespace(data=received)], waiting=contextlib.nullcontext)
    with contextlib.closing(received), contextlib.closing(sent):
        yield JoinedSaves(group), sent


def send_block(connection: Channel, save: int) -> None:
    connection.send(np.array((save, 0), HEADER).tobytes())
    connection.send(bytes([save]) * RANK_BYTES)


def test_a_save_that_all_ranks_have_sent_still_ends_on_the_thread_that_helps(
    rank_1: tuple[JoinedSaves, Channel],
) -> None:
    saves, connection = rank_1
    for save in (7, 8, 9):
        send_block(connection, save)
    first_begun, first_goes_on, second_begun, second_goes_on = (threading.Event() for _ in range(4))
    saves.start(7, own_copy(first_begun, first_goes_on), 1, SPANS)
    assert first_begun.wait(30)  # the receiver is busy with it
    second = saves.start(8, own_copy(second_begun, second_goes_on), 1, SPANS)
    helper = threading.Thread(target=second.run)
    helper.start()
    assert second_begun.wait(30)
    first_goes_on.set()
    saves.start(9, own_copy(), 1, SPANS).result(30)  # by now the receiver has all blocks of the second
    second_goes_on.set()
    helper.join(30)
    assert second.result(30).tolist() == [[1] * RANK_BYTES + [8] * RANK_BYTES]
