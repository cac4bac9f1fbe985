# SPDX-License-Identifier: Apache-2.0
"""Channel: whole messages between two processes of ours, on one machine or on two.

All of our processes that speak to each other in messages do so over channels:

    an engine and its clients         cluster/remote                  data            a pipe; TCP with a key
    a process with a model, and who   cluster/remote/fork_server.py   objects         a Unix socket
      wants an engine that is a copy
    rank 0 and the other ranks        model/parallel                  objects, then   inherited sockets
                                                                      plain bytes
    an engine and its grammars'       grammar/trial_process.py        objects there,  pipes
      trials                                                          JSON back

Objects are pickled, and a pickle can run code: they are received only from a process of the same user on the
same machine. What comes over a network is data (`cluster/remote/wire.py`).

Apart stay the feed of the proxy's observer, which asyncio writes in pieces so that large bodies hold up no
request, and what has a format of its own: HTTP, Redis, and block events over ZeroMQ.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from types import TracebackType
from typing import Any

from radixkv.errors import RadixKVError

_NETWORK = (socket.AF_INET, socket.AF_INET6)


class ChannelEnded(EOFError):
    """The other end has gone, was silent for too long, or has sent something that is no message."""


class WrongKey(ChannelEnded):
    """The other end does not have the key."""


class Channel:
    """One end of a connection; a message is sent or received by one thread at a time.

    Each message is its length and its bytes, as `multiprocessing.connection` frames them.

    Args:
        connection: this end, which the channel owns from now on.
        max_bytes: of a message that is received; None: the other end is trusted with any length.

    Attributes:
        max_bytes: see above.
        is_local: the other end is on this machine, and of this user.
    """

    def __init__(self, connection: Connection, *, max_bytes: int | None = None) -> None:
        self._connection = connection
        self.max_bytes = max_bytes
        self.is_local = True

    @classmethod
    def over(cls, sock: socket.socket, *, max_bytes: int | None = None) -> Channel:
        """Return the channel of a connected socket, which it takes over."""
        sock.setblocking(True)
        is_local = sock.family not in _NETWORK
        channel = cls(Connection(sock.detach()), max_bytes=max_bytes)
        channel.is_local = is_local
        return channel

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the file descriptor, for `select`."""
        return self._connection.fileno()

    # ------------------------------------------------------------------ messages

    def send(self, message: bytes | bytearray | memoryview) -> None:
        """Send a message; blocks while the other end takes none.

        Raises:
            ChannelEnded: the other end has gone.
        """
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise ChannelEnded(str(error)) from error

    def receive(self) -> bytes:
        """Wait for a message and return it.

        Raises:
            ChannelEnded: none comes: the other end has gone, if need be within a message; it was silent for
                longer than `expect_within` allows; or it sends more than `max_bytes`.
        """
        try:
            return self._connection.recv_bytes(self.max_bytes)
        except BlockingIOError as error:
            raise ChannelEnded("nothing came for too long") from error
        except (EOFError, OSError) as error:
            raise ChannelEnded(str(error)) from error

    def send_object(self, message: Any) -> None:
        """Send a pickled object. Raises what `send` and pickling raise."""
        self.send(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def receive_object(self) -> Any:
        """Wait for a pickled object and return it.

        Raises:
            ChannelEnded: see `receive`.
        """
        assert self.is_local, "nothing that comes over a network is unpickled"
        return pickle.loads(self.receive())

    def has_message(self, within_s: float) -> bool:
        """Wait until there is a message or the end, for so many seconds at most; False: there is neither.

        Raises:
            ChannelEnded: the other end has gone.
        """
        try:
            return self._connection.poll(within_s)
        except (EOFError, OSError) as error:
            raise ChannelEnded(str(error)) from error

    # ------------------------------------------------------------------ silence, keys, ends

    def expect_within(self, seconds: int) -> None:
        """Have `receive` end the channel where nothing comes for so long; of sockets."""
        with self._socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))

    def set_options(self, *options: tuple[int, int, int]) -> None:
        """Set options of the socket: level, name, value."""
        with self._socket() as sock:
            for option in options:
                sock.setsockopt(*option)

    def check_key(self, key: bytes, *, asks_first: bool, within_s: float) -> None:
        """Prove to each other that both ends have the key, without sending it.

        Args:
            asks_first: of the two ends, one does.

        Raises:
            WrongKey: the other end has another one.
            ChannelEnded: it has gone, or takes longer.
        """
        steps = (deliver_challenge, answer_challenge) if asks_first else (answer_challenge, deliver_challenge)
        with self._ended_after(within_s):
            try:
                for step in steps:
                    step(self._connection, key)
            except AuthenticationError as error:
                raise WrongKey(str(error)) from error
            except (EOFError, OSError) as error:
                raise ChannelEnded(str(error)) from error

    def shut_down(self) -> None:
        """End the connection of a socket: threads that wait for a message at either end wake; any thread."""
        with contextlib.suppress(OSError), self._socket() as sock:
            sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end; may be called again. Not while another thread uses it."""
        with contextlib.suppress(OSError):
            self._connection.close()

    @contextlib.contextmanager
    def _ended_after(self, seconds: float) -> Iterator[None]:
        """End the connection if the block takes longer."""
        timer = threading.Timer(seconds, self.shut_down)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _socket(self) -> socket.socket:
        return socket.socket(fileno=os.dup(self._connection.fileno()))


def as_sent(error: BaseException, stand_in: type[RadixKVError]) -> BaseException:
    """Return the error, or if it can't be pickled and read again, a `stand_in` that describes it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # of whatever object in it
        return stand_in(f"{type(error).__name__}: {error}")
    return error
