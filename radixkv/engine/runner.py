# SPDX-License-Identifier: Apache-2.0
"""Interface of the model side that every runner implements.

`radixkv.model.runner.ModelRunner` is one: weights and K/V in this process. The tests' model without weights
is another. `tests/engine/test_runner_interface.py` checks both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from radixkv.cache.pending_copies import Copy
    from radixkv.cache.states.window_pool import WindowSpec
    from radixkv.engine.image_encoding import Encoder
    from radixkv.errors import EngineStoppedError
    from radixkv.model.block_copy import BlockCopy
    from radixkv.scheduling.batch import Batch
    from radixkv_kernels import Bytes


class StateSlots(Protocol):
    """Memory of a model's states (recurrent or convolutional layers), in slots.

    Attributes:
        num_slots: states that it holds.
        bytes_per_slot: all state layers together.
        num_bytes: of all slots, and of the latest inputs of running requests.
    """

    @property
    def num_slots(self) -> int: ...

    @property
    def bytes_per_slot(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    def save(self, slots: Sequence[int]) -> BlockCopy:
        """Copy the contents of slots out, like `Runner.save` for blocks: `bytes_per_slot` bytes each.

        They are copied as they are now: later steps and loads may write to them at once.
        """

    def load(self, slots: Sequence[int], data: Sequence[Bytes]) -> None:
        """Fill slots with saved data, as `Runner.load` does blocks.

        Raises:
            ValueError: they are not as many or not as long as they should be; nothing was written.
        """


class WindowBlocks(Protocol):
    """Memory of layers with a sliding window, apart from the other layers' blocks.

    Attributes:
        spec: its sizes.
    """

    @property
    def spec(self) -> WindowSpec: ...

    def save(self, blocks: Sequence[int]) -> BlockCopy:
        """Copy the contents of blocks out, like `Runner.save`: `spec.block_bytes` bytes each.

        They are copied as they are now: later steps and loads may write to them at once.
        """

    def load(self, blocks: Sequence[int], data: Sequence[Bytes]) -> None:
        """Fill blocks with saved data, as `Runner.load` does others, with its errors."""


class Runner(Protocol):
    """Computes batches over K/V memory of its own. Not thread-safe.

    Attributes:
        num_blocks, block_size: its K/V memory: number of blocks, and tokens of each.
        bytes_per_block: of all layers together.
        states: memory of layers with states; None: the model has none.
        windows: memory of layers with a sliding window; None: it is not apart.
        images: encodes images; None: the model sees none.
        backend_name, dtype_name, device_name: for people to read.
        failure: why it can compute nothing any more; None: it can.
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def bytes_per_block(self) -> int: ...

    @property
    def states(self) -> StateSlots | None: ...

    @property
    def windows(self) -> WindowBlocks | None: ...

    @property
    def images(self) -> Encoder | None: ...

    @property
    def backend_name(self) -> str: ...

    @property
    def dtype_name(self) -> str: ...

    @property
    def device_name(self) -> str: ...

    @property
    def failure(self) -> EngineStoppedError | None: ...

    def on_failure(self, call: Callable[[], None]) -> None:
        """Call a function, on any thread, when `failure` is set; at once if it is."""

    def close(self) -> None:
        """End what belongs to it besides memory, such as processes; it is not used any more."""

    def warm_up(self, *, thorough: bool = True) -> None:
        """Compile, record and touch memory now, instead of in the first steps.

        Called once, before anything is in the K/V memory, whose contents are undefined afterwards.

        Args:
            thorough: for all steps that may come; else for one small one.
        """

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy K/V between blocks, all layers: for each (source, target, n), the first n slots.

        No block is the target of two of them, or target of one and source of another. `execute` makes the
        copies of its batch by this method, before anything else.
        """

    def save(self, blocks: Sequence[int]) -> BlockCopy:
        """Copy the contents of blocks out, after the steps that were launched before.

        Called between steps. If the copy `reads_pool`, these blocks must not be written until it is done;
        others may be.

        Returns:
            The future of a uint8 array [len(blocks), bytes_per_block], or fewer rows where it was stopped: of
            each block, K/V (and scales) of all layers and heads, in an order that does not depend on the
            block's id: `load` puts it back bit by bit, into any block of a runner of the same model and
            settings.
        """

    def load(self, blocks: Sequence[int], data: Sequence[Bytes]) -> None:
        """Fill blocks with saved data: after all steps launched so far, before those from now on.

        Called between steps. A launched step may still run on the device, and write to these blocks for a
        request that has ended, without the host waiting for it. `data` is no longer needed on return.

        Args:
            data: `bytes_per_block` bytes of each block, as returned by `save`.

        Raises:
            ValueError: their number or length is wrong; nothing was written.
        """

    def execute(self, batch: Batch) -> torch.Tensor:
        """Run one step: the batch's copies, group after group; then write its K/V and attend, layer by layer.

        Returns:
            Logits [S, V] of `batch.logit_rows`; they depend on each row's own context only.

        Raises:
            EngineStoppedError: `failure` is set.
            OutOfDeviceMemoryError: for a batch of this size.
            BaseException: whatever else went wrong. Slots that the batch names may have been written; the
                caller rolls them back.
        """


@runtime_checkable
class GivesMemoryBack(Protocol):
    """A runner whose memory can be given back for a while. Called between steps."""

    def release(self, *, weights: bool) -> None:
        """Give back the memory of K/V and states, whose contents are lost.

        Args:
            weights: give up the weights, too. Else a GPU's are moved to the CPU's memory.
        """

    def restore(self, *, weights: bool, kv: bool) -> None:
        """Take memory again that was given back, for weights or K/V; nothing happens where it was not.

        Weights that were given up have memory then, and no contents before they are read.
        """
