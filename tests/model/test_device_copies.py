# SPDX-License-Identifier: Apache-2.0
"""Saves and loads beside the steps: the same bytes, and no wait on the engine's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_configs import VOCAB_SIZE
from tiny_models import save_tiny_model

from radixkv import LLM, SamplingParams
from radixkv.cache.block_run import BlockRun
from radixkv.model.device_copies import DeviceCopies
from radixkv.model.host_copies import HostCopies
from radixkv.model.runner import ModelRunner
from radixkv.tiers.host_tier import HostTier
from radixkv_kernels import KVGroup, KVLayout, KVSpec, make_kv
from radixkv_kernels.states import PagedStates, StateShape, StateSpec


class FakeStreams:
    """A side stream whose work is done when somebody waits for it, or the steps' stream needs it."""

    def __init__(self) -> None:
        self.waits: list[str] = []  # the threads that waited
        self.saves = self.loads = 0
        self.handed_out: list[torch.Tensor] = []

    def pinned(self, *shape: int) -> torch.Tensor:
        self.handed_out.append(torch.zeros(shape, dtype=torch.uint8))
        return self.handed_out[-1]

    def is_pinned(self, memory: torch.Tensor) -> bool:
        return any(memory.data_ptr() == each.data_ptr() for each in self.handed_out)

    def beside(self, work: Callable[[], torch.Tensor], *, after_steps: bool) -> tuple[torch.Tensor, Any]:
        self.saves += after_steps
        self.loads += not after_steps
        done = FakeDone(self, work)
        # A load's tensor is needed at once; a save's bytes come later than all that the engine does.
        return (torch.zeros(0) if after_steps else done.finish()), done

    def join(self, tensor: torch.Tensor, done: Any) -> None:
        assert done.query()


class FakeDone:
    """The end of a piece of work."""

    def __init__(self, streams: FakeStreams, work: Callable[[], torch.Tensor]) -> None:
        self._streams, self._work = streams, work
        self._result: torch.Tensor | None = None
        self._lock = threading.Lock()

    def finish(self) -> torch.Tensor:
        """Do the work, once."""
        with self._lock:
            if self._result is None:
                self._result = self._work()
        return self._result

    def query(self) -> bool:
        return self._result is not None

    def synchronize(self) -> None:
        self._streams.waits.append(threading.current_thread().name)
        self.finish()


def memories() -> list[Any]:
    """Caches of one shape, 8-bit, and of two shapes."""
    device = torch.device("cpu")
    groups = (KVGroup((0, 2), 4, 2, 16, 16), KVGroup((1,), 4, 1, 32, 16))
    specs: list[Any] = [
        KVSpec(2, 9, 8, 2, 16, torch.float32, device),
        KVSpec(2, 9, 8, 2, 16, torch.float32, device, "int8"),
        KVLayout(9, 8, groups, torch.float32, device, None, {}),
    ]
    found = [make_kv(spec) for spec in specs]
    for kv in found:
        for tensor in kv.tensors():
            tensor.copy_(torch.randint(-9, 9, tensor.shape))
    return found


@pytest.mark.parametrize("index", range(3))
def test_blocks_are_gathered_and_scattered_as_they_are_saved_and_loaded(index: int) -> None:
    kv, streams = memories()[index], FakeStreams()
    copies = DeviceCopies(torch.device("cpu"), streams)
    blocks, others = [7, 0, 3], [1, 2, 8]
    expected = kv.save_blocks(blocks)
    copy = copies.save(kv.gather_blocks(blocks))
    for tensor in kv.tensors():  # a step writes to these blocks before the copy is over
        tensor.zero_()
    saved = copy.result()
    assert np.array_equal(saved, expected)
    assert set(streams.waits) == {"radixkv-saver_0"}
    size = expected.shape[1]
    copies.load(lambda rows: kv.scatter_blocks(others, rows), list(saved), 3, size, "these are")
    assert np.array_equal(kv.save_blocks(others), expected)
    with pytest.raises(ValueError, match="these are 3 times"):
        copies.load(lambda rows: kv.scatter_blocks(others, rows), list(saved[:2]), 3, size, "these are")
    assert set(streams.waits) == {"radixkv-saver_0"}


@pytest.mark.parametrize("is_pinned", [True, False])
def test_what_a_host_tier_keeps_in_pinned_memory_is_copied_from_there(is_pinned: bool) -> None:
    """Other memory goes through pinned memory."""
    kv, streams = memories()[0], FakeStreams()
    copies = DeviceCopies(torch.device("cpu"), streams)
    expected = kv.save_blocks([7, 0])
    tier = HostTier(1 << 20, (lambda size: streams.pinned(size).numpy()) if is_pinned else None)
    run = BlockRun(("",), False, np.arange(16, dtype=np.int32).tobytes(), 0, (b"one", b"two"))
    tier.save(run, copies.save(kv.gather_blocks([7, 0])).result())
    tier.flush(60)
    (found,) = tier.load(run).result()
    num_before = len(streams.handed_out)
    copies.load(lambda rows: kv.scatter_blocks([1, 2], rows), found.data, 2, expected.shape[1], "these are")
    assert np.array_equal(kv.save_blocks([1, 2]), expected)
    assert len(streams.handed_out) - num_before == (0 if is_pinned else 1)
    tier.close()


def test_states_are_gathered_and_scattered_as_they_are_read_and_loaded() -> None:
    spec = StateSpec((StateShape(0, "lru", (24,)), StateShape(1, "lru", (40,))), 6, 2)
    memory = PagedStates(spec, torch.device("cpu"))
    for part in memory.layers():
        part.slots.copy_(torch.randn(part.slots.shape))
    rows = np.empty((2, spec.bytes_per_slot), np.uint8)
    for row, slot in enumerate((4, 1)):
        memory.read(slot, rows[row])
    gathered = memory.gather_slots([4, 1])
    assert np.array_equal(gathered.numpy(), rows)
    memory.scatter_slots([0, 5], gathered)
    for row, slot in enumerate((0, 5)):
        found = np.empty(spec.bytes_per_slot, np.uint8)
        memory.read(slot, found)
        assert np.array_equal(found, rows[row])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_engine_with_a_host_tier_waits_for_no_save(family: str, tmp_path: Path) -> None:
    """Prompts that push one another out of a small pool, saved by fake streams.

    gemma3's windows are freed: a kept one is waited for.
    """
    frees = family == "gemma3"
    folder = save_tiny_model(tmp_path / family, family, **({"sliding_window": 20} if frees else {}))
    more: dict[str, Any] = {"window_memory": 1 << 21, "max_num_batched_tokens": 48} if frees else {}
    prompts = [np.random.default_rng(i % 3).integers(3, VOCAB_SIZE, 100).tolist() for i in range(9)]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    answers = []
    streams = FakeStreams()
    for is_beside in (False, True):
        more |= {"kv_tier": "host:64MiB", "warm_up": "off", "num_blocks": 34, "block_size": 8}
        llm = LLM(str(folder), device="cpu", **more)
        runner = llm.engine.runner
        assert isinstance(runner, ModelRunner)
        if is_beside:
            runner.copies = DeviceCopies(runner.device, streams)
            if frees:
                assert runner.windows is not None
                runner.windows.copies = runner.copies
        found = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
        answers.append([list(tokens) for tokens in found])
        waits = set(streams.waits)
        llm.close()  # waits for what is saved last
    assert answers[0] == answers[1]
    assert streams.saves > 1
    assert waits == {"radixkv-saver_0"}


def test_states_and_a_small_pool_make_no_step_wait(tmp_path: Path) -> None:
    """A model with states, whose blocks and slots are wanted while they are saved: only the saver waits."""
    folder = save_tiny_model(tmp_path / "lfm2", "lfm2")
    prompts = [np.random.default_rng(i % 3).integers(3, VOCAB_SIZE, 150).tolist() for i in range(9)]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    streams, answers = FakeStreams(), []
    for is_beside in (False, True):
        llm = LLM(
            str(folder),
            device="cpu",
            num_blocks=22,
            block_size=8,
            kv_tier=("host:64MiB",),
            max_num_seqs=1,
            warm_up="off",
        )
        runner = llm.engine.runner
        assert isinstance(runner, ModelRunner)
        assert runner.states is not None
        if is_beside:
            runner.copies = runner.states.copies = DeviceCopies(runner.device, streams)
        found = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
        answers.append([list(tokens) for tokens in found])
        waits = set(streams.waits)
        transfers = llm.engine.stats().transfers
        llm.close()  # waits for what is saved last
    assert answers[0] == answers[1]
    assert streams.saves > 4
    assert transfers is not None
    assert not transfers.stopped_saves
    assert waits == {"radixkv-saver_0"}


def test_a_slot_is_copied_as_it_was_when_its_copy_was_asked_for() -> None:
    """On a CPU a thread copies; who writes completes the copy, and only of what it writes."""
    memory, copies, go_on = np.arange(12).reshape(4, 3).astype(np.uint8), HostCopies(), threading.Event()
    threads = []

    def read(place: int, row: np.ndarray[Any, Any]) -> None:
        threads.append(threading.current_thread().name)
        if threading.current_thread() is not threading.main_thread():
            go_on.wait()
        row[:] = memory[place]

    first, second = copies.save([0], 3, read), copies.save([3, 1], 3, read)
    copies.before_writing([2])
    memory[2] = 7
    assert not second.done()
    assert "MainThread" not in threads
    copies.before_writing([1])  # the saver is held up by the first copy
    memory[1] = 9
    assert second.result().tolist() == [[9, 10, 11], [3, 4, 5]]
    go_on.set()
    assert first.result().tolist() == [[0, 1, 2]]
