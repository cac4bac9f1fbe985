# SPDX-License-Identifier: Apache-2.0
"""Channels: whole messages or an error, whatever the other end does."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from multiprocessing import Pipe

import numpy as np
import pytest

from radixkv.channel import Channel, ChannelEnded, WrongKey, as_sent
from radixkv.errors import EngineStoppedError

#: Before a message of less than 2 GiB.
LENGTH = struct.Struct("!i")


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel that takes up to 1,000 bytes, and the bare socket at its other end."""
    ours, theirs = socket.socketpair()
    with theirs, Channel.over(ours, max_bytes=1000) as channel:
        yield channel, theirs


def test_messages_come_whole_and_in_order() -> None:
    ours, theirs = socket.socketpair()
    big = os.urandom(5_000_000)
    with Channel.over(ours) as one, Channel.over(theirs) as other:
        sending = threading.Thread(target=lambda: [one.send(each) for each in (b"", b"a", big)])
        sending.start()
        assert [other.receive() for _ in range(3)] == [b"", b"a", big]
        sending.join()
        other.send(np.arange(3).data)
        assert np.frombuffer(one.receive(), np.int64).tolist() == [0, 1, 2]
        assert not one.has_message(0.0)
        other.send_object({"a": (1, 2)})
        assert one.has_message(20.0)
        assert one.receive_object() == {"a": (1, 2)}


def test_pipes_are_channels_too() -> None:
    reader, writer = map(Channel, Pipe(duplex=False))
    with reader:
        with writer:
            writer.send_object("last")
        assert reader.receive_object() == "last"
        with pytest.raises(ChannelEnded):
            reader.receive()


def test_a_message_beyond_the_bound_ends_it(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(LENGTH.pack(1000) + bytes(1000))
    assert channel.receive() == bytes(1000)
    other.sendall(LENGTH.pack(1001))
    with pytest.raises(ChannelEnded):
        channel.receive()
    with pytest.raises(ChannelEnded):
        channel.receive()


@pytest.mark.parametrize("part", [b"", b"\0", LENGTH.pack(5), LENGTH.pack(5) + b"four"])
def test_a_peer_that_dies_ends_it_within_a_message_too(
    ends: tuple[Channel, socket.socket], part: bytes
) -> None:
    channel, other = ends
    other.sendall(part)
    other.close()
    with pytest.raises(ChannelEnded):
        channel.receive()


def test_nobody_sends_to_a_peer_that_has_died(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.close()
    with pytest.raises(ChannelEnded):
        channel.send(bytes(10))


def test_a_silent_peer_ends_it_where_words_are_expected(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    channel.expect_within(1)
    other.sendall(LENGTH.pack(2) + b"ok")
    assert channel.receive() == b"ok"
    other.sendall(LENGTH.pack(2) + b"o")  # half a message is silence, too
    with pytest.raises(ChannelEnded, match="nothing came"):
        channel.receive()


def test_who_waits_is_woken_by_the_end() -> None:
    ours, theirs = socket.socketpair()
    with Channel.over(ours) as one, Channel.over(theirs) as other:
        ended = []

        def wait(channel: Channel) -> None:
            with pytest.raises(ChannelEnded):
                channel.receive()
            ended.append(channel)

        waiting = [threading.Thread(target=wait, args=(channel,)) for channel in (one, other)]
        for thread in waiting:
            thread.start()
        one.shut_down()
        for thread in waiting:
            thread.join(20)
        assert set(ended) == {one, other}


def checked(keys: tuple[bytes, bytes]) -> list[type[Exception] | None]:
    """What became of two ends that check these keys with each other."""
    ours, theirs = socket.socketpair()
    found: list[type[Exception] | None] = [None, None]

    def check(end: int, channel: Channel) -> None:
        try:
            channel.check_key(keys[end], asks_first=end == 0, within_s=20.0)
        except ChannelEnded as error:
            found[end] = type(error)
            channel.shut_down()

    with Channel.over(ours) as one, Channel.over(theirs) as other:
        thread = threading.Thread(target=check, args=(1, other))
        thread.start()
        check(0, one)
        thread.join(20)
    return found


def test_both_ends_must_have_the_key() -> None:
    assert checked((b"key", b"key")) == [None, None]
    assert checked((b"key", b"another")) == [WrongKey, WrongKey]


def test_a_peer_that_takes_long_to_show_its_key_is_left(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    with pytest.raises(ChannelEnded):
        channel.check_key(b"key", asks_first=True, within_s=0.1)
    while other.recv(1000):  # the challenge, then the end
        pass


def test_nothing_that_comes_over_a_network_is_unpickled() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        with Channel.over(ours) as one, Channel.over(listening.accept()[0]) as other:
            assert not one.is_local
            one.send_object("anything")
            with pytest.raises(AssertionError, match="network"):
                other.receive_object()


class OddError(Exception):
    """One that can be pickled, but not read again: as those of many libraries are."""

    def __init__(self, what: str, *, status: int) -> None:
        super().__init__(f"{what}: {status}")


def test_an_error_that_no_other_process_can_read_is_described() -> None:
    error = EngineStoppedError("gone", retry_after_s=1.0)
    assert as_sent(error, EngineStoppedError) is error
    described = as_sent(OddError("full", status=7), EngineStoppedError)
    assert (type(described), str(described)) == (EngineStoppedError, "OddError: full: 7")
