# SPDX-License-Identifier: Apache-2.0
"""Hardly enough blocks: guesses, copies, preemption, samples, tenants and cancels where they meet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pool_traffic
import pytest
from paged_language_model import VOCAB, make_engine, run_all
from pool_traffic import FREE, Outcome, Parrot

from radixkv import PrefixCache
from radixkv.engine.config import SchedulerConfig
from radixkv.entrypoints.beam_search import BeamSearchParams
from radixkv.entrypoints.llm import LLM
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.batch import Batch
from radixkv.scheduling.batch_check import check_batch
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.sequence import Sequence


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


class WrongGuesses:
    """Guesses for one request, in every step as many as it may."""

    def __init__(self, guessing: Sequence) -> None:
        self.guessing = guessing

    def begin(self, num_rows: int, num_samples: int) -> None: ...

    def granted(self, num_tokens: int) -> None: ...

    def draft(self, request: Sequence, most: int) -> list[int]:
        return [VOCAB - 1] * min(most, 20) if request is self.guessing else []


@pytest.mark.parametrize("num_older", range(6))
@pytest.mark.parametrize("namespace", ["", "bob"])
def test_a_block_that_a_step_copies_from_is_not_given_to_a_guess_in_it(
    namespace: str, num_older: int
) -> None:
    """The pool is full, and the oldest cached block is copied from in a step that gives blocks to guesses.

    entries   guessing (1 token) | copying: [.. 3 slots of the oldest block ..]
    guesses   guessing + 20: needs three blocks
    """
    cache = PrefixCache(num_blocks := 20, 8)
    model = Parrot(num_blocks, 8)
    guessing = Sequence(Request(prompt(2, 6), SamplingParams(), request_id="guessing"))
    shared = prompt(1, 12)
    texts = [*(prompt(50 + i, 8) for i in range(num_older)), shared, *(prompt(90 + i, 8) for i in range(30))]
    requests = [
        Sequence(Request(tokens, SamplingParams(), request_id=f"r{i}", namespace=namespace))
        for i, tokens in enumerate(texts)
    ]
    scheduler = Scheduler(cache, SchedulerConfig(max_num_batched_tokens=64), drafter=WrongGuesses(guessing))

    def step() -> Batch | None:
        batch = scheduler.schedule().batch
        assert batch is not None
        model.execute(batch)
        check_batch(batch, 8)
        scheduler.complete(batch)
        for entry in batch.entries:
            if entry.draft:
                scheduler.accept(entry, 0)
            if entry.samples:
                entry.request.append(1)
        cache.check()
        return batch

    for request in requests:
        if cache.stats.free_blocks:
            scheduler.add(request)
            step()
            scheduler.finish(request)
    scheduler.add(guessing)
    step()
    copying = Sequence(
        Request([*shared[:11], *prompt(4, 3)], SamplingParams(), request_id="copying", namespace=namespace)
    )
    scheduler.add(copying)
    batch = step()
    entries = {entry.request: entry for entry in batch.entries}
    if num_older >= 4:
        assert copying.num_cached_tokens == 11
        assert len(entries[copying].copies) == 1
        assert entries[guessing].draft
    for _ in range(10):
        step()


def test_copies_that_a_step_has_taken_keep_their_source_until_it_has_run() -> None:
    cache = PrefixCache(4, 8)
    first = cache.acquire(list(range(12)))
    first.commit(12)
    first.release()
    second = cache.acquire([*range(11), 50])
    [(source, _, slots)] = second.take_copies(until_done=True)
    assert slots == 3
    second.commit(12)
    assert cache.evict(4) == 0
    cache.check()
    second.copies_done()
    assert cache.evict(4) == 1
    second.release()
    # Copies that are made before the commit end with it.
    cache = PrefixCache(4, 8)
    first = cache.acquire(list(range(12)))
    first.commit(12)
    first.release()
    second = cache.acquire([*range(11), 50])
    assert second.copies == [(source, second.block_table[1], 3)]
    second.commit(12)
    assert cache.evict(4) == 1
    second.release()


def test_guesses_samples_tenants_and_cancels_in_small_pools() -> None:
    """A few hundred requests of what `tests/engine/fuzz_small_pools.py` runs thousands of."""
    total = Outcome()
    # In the last two, samples that draw the same token give up blocks that were to be copied to, and guesses
    # or others get them in the same step.
    for seed, num_requests in ((4, 30), (110, 44), (162, 24)):
        total.add(pool_traffic.run(seed, num_requests, check_every=4))
    assert total.preemptions > 3
    assert total.partial_hits > 10
    assert min(total.accepted, total.rejected) > 10
    assert total.evicted_blocks > 200
    assert total.aborted
    assert len(total.namespaces) == 3


def test_prewarms_breakpoints_and_what_may_stay_in_small_pools() -> None:
    total = Outcome()
    for seed in (3, 11):
        total.add(pool_traffic.run(seed, 40, controls=True, check_every=2))
    assert min(total.prewarmed, total.forgotten) > 20
    assert total.evicted_blocks > 100
    assert total.aborted


def test_conversations_that_go_on_and_end_while_long_prompts_wait_for_their_turn() -> None:
    total = Outcome()
    for seed in (4, 13):
        total.add(pool_traffic.run(seed, 40, agents=True, quotas=True, check_every=2))
    assert total.sessions_done > 10
    assert total.waits_for_turn
    assert total.evicted_blocks > 50


@pytest.mark.injects_faults
def test_the_same_with_failing_steps() -> None:
    pool_traffic.run(1000, 30, faults=True, check_every=4)


@pytest.mark.parametrize("seed", range(3))
def test_beams_with_guesses_equal_beams_without(seed: int) -> None:
    found = []
    for speculation, num_blocks in (("auto", 34), ("off", 400)):
        engine, model = make_engine(
            model=Parrot(num_blocks, 8),
            num_blocks=num_blocks,
            max_model_len=48,
            speculation=speculation,
            step_costs=FREE,
        )
        llm = LLM.from_engine(engine)
        prompts = [prompt(seed, 9) * 2, prompt(seed, 9) + prompt(seed + 9, 5), prompt(seed, 9) * 2]
        outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True))
        found.append([[beam.token_ids for beam in output.outputs] for output in outputs])
        assert not model.violations
    assert found[0] == found[1]


class Recorder(Parrot):
    """Keeps the batches that have guesses or copies."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.seen: list[Batch] = []

    def execute(self, batch: Batch) -> Any:
        frozen = [replace(entry) for entry in batch.entries]
        tables = [table.copy() for table in batch.block_tables]
        self.seen.append(replace(batch, entries=frozen, block_tables=tables))
        return super().execute(batch)


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    model = Recorder(60, 8)
    engine, _ = make_engine(model=model, num_blocks=60, step_costs=FREE)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for i in range(6):
        engine.add_request(prompt(1, 9) * 3 + prompt(i, i), params)
    run_all(engine)
    engine.add_request(prompt(1, 9) * 2 + prompt(9, 3), params)
    engine.add_request(prompt(1, 9) * 3, params)
    run_all(engine)
    return model.seen


class TestTheProofOfAStep:
    """`check_batch` finds what is wrong with a plan: here plans of a real run, broken on purpose."""

    def with_copy(self, batches: list[Batch]) -> Batch:
        return next(batch for batch in batches if batch.copy_groups)

    def test_a_slot_written_twice(self, batches: list[Batch]) -> None:
        batch = next(batch for batch in batches if len(batch.write_slots) > 2)
        slots = batch.write_slots.copy()
        slots[0] = slots[1]
        with pytest.raises(AssertionError, match="written twice"):
            check_batch(replace(batch, write_slots=slots), 8)

    def test_a_row_written_where_nobody_asked_for_it(self, batches: list[Batch]) -> None:
        batch = batches[0]
        slots = batch.write_slots.copy()
        slots[0] = 10**6
        with pytest.raises(AssertionError, match="nobody asked"):
            check_batch(replace(batch, write_slots=slots), 8)

    def test_a_copy_whose_source_the_step_writes(self, batches: list[Batch]) -> None:
        batch = self.with_copy(batches)
        slots = batch.write_slots.copy()
        slots[-1] = batch.copy_groups[0][0][0] * 8
        with pytest.raises(AssertionError, match="while it is copied"):
            check_batch(replace(batch, write_slots=slots), 8)

    def test_a_copy_that_is_left_out(self, batches: list[Batch]) -> None:
        batch = self.with_copy(batches)
        with pytest.raises(AssertionError, match="does not get its copy"):
            check_batch(replace(batch, copy_groups=[]), 8)

    def test_a_copy_over_what_another_reads(self, batches: list[Batch]) -> None:
        batch = self.with_copy(batches)
        source, _, count = batch.copy_groups[0][0]
        groups = [*batch.copy_groups, [(40, source, count)]]
        with pytest.raises(AssertionError, match="overwritten before"):
            check_batch(replace(batch, copy_groups=groups), 8)

    def test_a_guess_in_somebody_elses_block(self, batches: list[Batch]) -> None:
        batch = next(b for b in batches if len(b.entries) > 1 and any(entry.draft for entry in b.entries))
        r = next(r for r, entry in enumerate(batch.entries) if entry.draft)
        entry, tables = batch.entries[r], [table.copy() for table in batch.block_tables]
        other = (r + 1) % len(tables)
        tables[other] = np.append(tables[other], tables[r][entry.end // 8]).astype(np.int32)
        with pytest.raises(AssertionError, match="a guess of"):
            check_batch(replace(batch, block_tables=tables), 8)
