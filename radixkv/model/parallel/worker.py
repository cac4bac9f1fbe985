# SPDX-License-Identifier: Apache-2.0
"""A rank after the first: a process that loads its share of the model and carries out rank 0's commands.

`python -m radixkv.model.parallel.worker COMMANDS DATA`, two inherited sockets. It ends when rank 0 closes
them, and so with rank 0, however that ends. An error ends it, too: ranks that have not computed the
same can't go on together.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from radixkv.channel import Channel, ChannelEnded
from radixkv.model.block_copy import BlockCopy
from radixkv.model.loading.loader import load_model
from radixkv.model.make_runner import make_runner
from radixkv.model.parallel.commands import Command, Words, decode_batch, decode_copies
from radixkv.model.parallel.communicator import Communicator
from radixkv.model.parallel.joined_saves import HEADER
from radixkv.model.parallel.parallel_runner import block_sizes
from radixkv.model.parallel.shard_model import shard_model
from radixkv.model.parallel.shared_images import take_images
from radixkv.model.parallel.worker_group import Loaded, RankFailed, Start, threads_of_rank
from radixkv.model.runner import ModelRunner


class Rank:
    """Executor of rank 0's commands.

    Args:
        data: channel for saved blocks, each as two messages: a header (see `joined_saves`) and its bytes.
    """

    def __init__(self, runner: ModelRunner, communicator: Communicator, data: Channel) -> None:
        self._runner = runner
        self._communicator = communicator
        self._data = data
        self._sender = ThreadPoolExecutor(1, "radixkv-sender")

    def serve(self, commands: Channel) -> None:
        """Carry out commands until rank 0 closes the channel."""
        while True:
            try:
                words = np.frombuffer(bytearray(commands.receive()), np.int64)
                has_bytes = words[0] in (Command.LOAD, Command.STATES, Command.LOAD_WINDOWS)
                payload = commands.receive() if has_bytes else b""
            except ChannelEnded:
                return
            self._do(Command(int(words[0])), words[1:], payload)

    def _do(self, command: Command, words: Words, payload: bytes) -> None:
        runner = self._runner
        match command:
            case Command.EXECUTE:
                batch, is_fed, images = decode_batch(words)
                if is_fed:
                    tokens = torch.empty(batch.num_tokens, dtype=torch.int64, device=runner.device)
                    batch.fed_tokens = self._communicator.take_first(tokens)
                shown = take_images(images, batch.num_tokens, runner.dtype, self._communicator)
                runner.execute(batch, shown)
            case Command.COPY:
                runner.copy_blocks(decode_copies(words))
            case Command.SAVE:
                self._send(int(words[0]), runner.save(words[1:].tolist()), len(words) - 1)
            case Command.LOAD:
                runner.load(words.tolist(), _parts(payload, runner.bytes_per_block))
            case Command.STATES:
                assert runner.states is not None
                runner.states.load(words.tolist(), _parts(payload, runner.states.bytes_per_slot))
            case Command.SAVE_WINDOWS:
                assert runner.windows is not None
                self._send(int(words[0]), runner.windows.save(words[1:].tolist()), len(words) - 1)
            case Command.LOAD_WINDOWS:
                assert runner.windows is not None
                runner.windows.load(words.tolist(), _parts(payload, runner.windows.spec.block_bytes))
            case Command.WARM_UP:
                runner.warm_up(thorough=bool(words[0]))
                self._communicator.gather(0)

    def _send(self, number: int, copy: BlockCopy, num_blocks: int) -> None:
        def send() -> None:
            try:
                for row in range(num_blocks):
                    contents = np.ascontiguousarray(copy.row(row))
                    self._data.send(np.array((number, row), HEADER).tobytes())
                    self._data.send(contents.data)
            except ChannelEnded:  # rank 0 has closed it
                os._exit(0)
            except BaseException:
                logging.getLogger("radixkv").exception("blocks could not be saved")
                os._exit(1)

        self._sender.submit(send)


def _parts(payload: bytes, size: int) -> list[memoryview]:
    view = memoryview(payload)
    return [view[start : start + size] for start in range(0, len(payload), size)]


def main(commands: Channel, data: Channel) -> int:
    """Run a rank until rank 0 ends; return the exit status."""
    threading.Thread(target=_end_with_rank_0, args=(data.fileno(),), daemon=True).start()
    logging.getLogger("radixkv").setLevel(logging.ERROR)  # rank 0 says the same
    try:
        start: Start = commands.receive_object()
        config = start.config
        torch.set_num_threads(threads_of_rank(config))
        loaded = load_model(config, show_progress=False)
        commands.send_object(Loaded(loaded.fingerprint))
        meeting: Path = commands.receive_object()
        communicator = Communicator(
            meeting, start.rank, config.tensor_parallel, loaded.device, in_order=config.deterministic
        )
        runner, _ = make_runner(config, shard_model(loaded, communicator), communicator)
        block_sizes(runner, communicator)
        Rank(runner, communicator, data).serve(commands)
    except BaseException as error:
        logging.getLogger("radixkv").exception("a rank failed")
        commands.send_object(RankFailed(f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _end_with_rank_0(data: int) -> None:
    """Rank 0 writes nothing to this socket: there is something to read when it is closed, or has ended."""
    try:
        os.read(data, 1)
    finally:
        os._exit(0)


if __name__ == "__main__":
    status = main(*(Channel.over(socket.socket(fileno=int(end))) for end in sys.argv[1:]))
    os._exit(status)
