# SPDX-License-Identifier: Apache-2.0
"""Seeded traffic for engines with hardly enough blocks: what may go wrong where features meet.

Prompts come from a few families with shared beginnings that end inside blocks, in several namespaces, some of
them with a public prefix; some are repeated word for word, so that there is much to guess. Requests have
samples, seeds, priorities; some are beams, some are aborted, and the cache is reset, pinned and published
meanwhile. They may show pictures to a model that sees, whose tower fails now and then. Every answer is
compared with that of an engine that has room for all, caches and guesses nothing; those of tiny models over
interpreted kernels (`interpreted_models`) are greedy, and compared with transformers.

`tests/engine/fuzz_small_pools.py` runs it for as long as wanted.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from paged_language_model import END, VOCAB, make_engine, next_logits, run_all
from scripted_tier import SlowCopies, WildTier
from seeing_hash_model import (
    NUM_PICTURES,
    HashImages,
    SeesImages,
    check_nothing_is_left,
    encode_layer_by_layer,
)
from stateful_hash_model import StatefulHashModel

from radixkv.cache.accounts import Quota
from radixkv.cache.states.checkpoint import GRID
from radixkv.engine.engine import Engine
from radixkv.engine.runner import Runner
from radixkv.errors import ContextLengthExceededError, InvalidRequestError
from radixkv.model.step_limits import StepLimits
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.batch import Batch
from radixkv.scheduling.request import PrefixPin
from radixkv.speculation.step_costs import StepCosts
from radixkv.tiers.checkpoint_memory import bytes_per_checkpoint
from radixkv.tiers.disk.disk_tier import DiskTier
from radixkv.tiers.host_tier import HostTier
from radixkv.tiers.record import BlockKind
from radixkv.tiers.tier import TierStack

if TYPE_CHECKING:
    from interpreted_models import InterpretedModel

#: Rows cost nothing: as many guesses are made as there are.
FREE = StepCosts({1: 1.0, 2: 1.0})
NAMESPACES = ("", "ada", ("bob", "salt"))
POLICIES = ("prefix", "fcfs", "priority", "fair")
SLRU, S3FIFO = "benchmarks.classic_policies:SLRU", "benchmarks.s3fifo:S3FIFO"


class Parrot(SlowCopies):
    """Goes on, mostly, as its context did after the same two tokens: guesses are often right, not always."""

    def execute(self, batch: Batch) -> Any:
        logits = super().execute(batch)
        for i, row in enumerate(batch.logit_rows.tolist()):
            r = int(np.searchsorted(batch.query_starts, row, side="right")) - 1
            favour(logits[i], self._read(batch, r, int(batch.positions[row]) + 1))
        return logits


class StatefulParrot(StatefulHashModel, Parrot):
    """The same with states."""


class SeeingParrot(SeesImages, Parrot):
    """The same, which sees."""


class SeeingStatefulParrot(SeesImages, StatefulParrot):
    """The same with states, which sees."""


def favour(logits: Any, context: np.ndarray[Any, Any]) -> None:
    """Raise the logit of what followed the last two tokens before, in most contexts."""
    if len(context) < 3 or int(next_logits(context[-3:], salt=1).argmax()) % 5 == 0:
        return
    same = np.flatnonzero((context[:-2] == context[-2]) & (context[1:-1] == context[-1]))
    if len(same) and context[same[-1] + 2] < VOCAB:  # else an image goes on
        logits[int(context[same[-1] + 2])] += 12.0


@dataclass
class Ask:
    """One request of the traffic."""

    prompt: list[int]
    params: SamplingParams
    namespace: Any
    priority: int
    aborted_after: int | None = None
    pins: tuple[PrefixPin, ...] = ()
    keep_tokens: int | None = None
    session_done: bool = False


@dataclass
class Outcome:
    """What a run was like; tests assert that what they are about has happened."""

    requests: int = 0
    preemptions: int = 0
    accepted: int = 0
    rejected: int = 0
    partial_hits: int = 0
    resumed: int = 0
    evicted_blocks: int = 0
    aborted: int = 0
    num_samples: int = 0
    loaded_blocks: int = 0
    failed_loads: int = 0
    late_loads: int = 0
    saved_blocks: int = 0
    failed_saves: int = 0
    saved_states: int = 0
    loaded_states: int = 0
    evicted_states: int = 0
    prewarmed: int = 0
    forgotten: int = 0
    steps_ahead: int = 0
    sessions_done: int = 0
    waits_for_turn: int = 0
    images: int = 0
    encoded: int = 0
    broken: int = 0
    replayed: int = 0
    namespaces: set[Any] = field(default_factory=set)

    def add(self, other: Outcome) -> None:
        """Sum up another run."""
        for item in fields(self):
            if item.name != "namespaces":
                setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))
        self.namespaces |= other.namespaces


class Traffic:
    """The requests of one seed.

    Args:
        longest: most tokens of prompt and answer.
    """

    def __init__(self, seed: int, longest: int) -> None:
        self.random = random = np.random.default_rng(seed)
        self._longest = longest
        phrases = [random.integers(1, VOCAB, int(random.integers(3, 9))).tolist() for _ in range(6)]
        self._families = []
        for _ in range(int(random.integers(2, 6))):
            family: list[int] = []
            while len(family) < longest:
                family += phrases[int(random.integers(len(phrases)))]
            self._families.append(family)
        self._asked: list[Ask] = []

    def family(self) -> list[int]:
        """One of the shared texts."""
        return self._families[int(self.random.integers(len(self._families)))]

    def next(self) -> Ask:
        """Another request: a new one, or one asked before."""
        random = self.random
        if self._asked and random.random() < 0.3:
            before = self._asked[int(random.integers(len(self._asked)))]
            return Ask(before.prompt, before.params, self._namespace(), 0)
        tail = random.integers(1, VOCAB, int(random.integers(0, 6))).tolist()
        room = self._longest - len(tail) - 2
        prompt = self.family()[: int(random.integers(1, room))] + tail
        n = int(random.choice([1, 1, 1, 1, 2, 3]))
        sampled = random.random() < 0.3
        seed = int(random.integers(1 << 20)) if sampled else None
        max_tokens = int(random.integers(1, min(28, self._longest - len(prompt))))
        params = SamplingParams(
            temperature=0.7 if sampled else 0.0,
            seed=seed,
            n=n,
            max_tokens=max_tokens,
            frequency_penalty=0.6 if max_tokens % 7 == 0 else 0.0,
            ignore_eos=bool(random.random() < 0.5),
            repetition_penalty=1.2 if random.random() < 0.1 else 1.0,
            prompt_logprobs=1 if random.random() < 0.03 else None,
        )
        ask = Ask(prompt, params, self._namespace(), int(random.integers(0, 3)))
        if random.random() < 0.1:
            ask.aborted_after = int(random.integers(0, 12))
        else:
            self._asked.append(ask)
        return ask

    def _namespace(self) -> Any:
        return NAMESPACES[int(self.random.integers(len(NAMESPACES)))]


class Oracle:
    """Answers of an engine that has room for everything, and neither caches nor guesses."""

    def __init__(self, block_size: int, pictures: Pictures | None = None) -> None:
        model = Parrot(600, block_size)
        if pictures is not None:
            model = SeeingParrot(600, block_size)
            model.see(HashImages(*pictures.drawn), 10**6)
        self._pictures = pictures
        self._engine, _ = make_engine(
            model=model,
            num_blocks=600,
            block_size=block_size,
            budget=256,
            speculation="off",
            enable_prefix_caching=False,
            image_processor=pictures and pictures.shown,
        )
        self._known: dict[Any, Any] = {}

    def answer(self, ask: Ask) -> list[tuple[list[int], Any]]:
        """The tokens and logprobs of all samples."""
        key = (tuple(ask.prompt), ask.params)
        if key not in self._known:
            prompt, images = placed(ask, self._pictures)
            request_id = self._engine.add_request(prompt, ask.params, images=images)
            output = run_all(self._engine, check=False)[request_id]
            self._known[key] = [(sample.token_ids, sample.logprobs) for sample in output.outputs]
        return self._known[key]


class _Tier:
    """A tier below the pool of a run, and copies to it that end when they like; time passes at every step."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed + 2 * 10**6)
        self.wild = WildTier(self.random)
        self.now = 0.0

    def options(self, model: Runner) -> dict[str, Any]:
        """Of `make_engine`."""
        return {"tier": self.wild, "clock": lambda: self.now, "load_deadline_s": 0.1}

    def act(self, engine: Engine, model: SlowCopies) -> None:
        """What happens beside a step."""
        self.now += float(self.random.choice([0.0, 0.001, 0.01, 0.03]))
        self.wild.act()
        while model.copies and self.random.random() < 0.5:
            model.finish_copy(error=OSError("no memory") if self.random.random() < 0.05 else None)

    def end(self, engine: Engine, model: SlowCopies, outcome: Outcome) -> None:
        """Everything under way ends, or is given up; then nothing may be held."""
        _count_transfers(engine, outcome)
        for _ in range(1000):
            self.now += 1.0
            self.wild.is_open = False
            while model.copies:
                model.finish_copy()
            if not engine.has_work:
                return
            engine.step()
            engine.check()
        raise AssertionError("transfers do not come to an end")


class _Controls:
    """What clients say of the cache: prewarming, breakpoints, and how much of a request may stay."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed + 3 * 10**6)

    def add_to(self, ask: Ask) -> Ask:
        """The same request, with controls or without."""
        random, length = self.random, len(ask.prompt)
        if random.random() < 0.4:
            ask = replace(ask, params=replace(ask.params, max_tokens=0, n=1))
        if random.random() < 0.4:
            places = random.integers(1, length + 1, int(random.integers(1, 5)))
            times = random.choice([0.0005, 0.01, 0.2], len(places))
            ask.pins = tuple(PrefixPin(int(at), float(ttl)) for at, ttl in zip(places, times, strict=True))
        if random.random() < 0.4:
            ask.keep_tokens = max((pin.num_tokens for pin in ask.pins), default=0)
        return ask


class _Agents:
    """Conversations that go on from their earlier answers, until a request or somebody else ends them.

    Long prompts begin in turn: the budget, the threshold and the bound of the halving rule are drawn.
    """

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed + 6 * 10**6)
        self._talks: list[tuple[list[int], Any]] = []

    def options(self) -> dict[str, Any]:
        """Of `make_engine`."""
        longer, late, budget = (
            self.random.choice(some) for some in ([0, 1, 12, 40], [0, 2, 128], [8, 24, 64])
        )
        return {
            "long_prompt_tokens": int(longer) or None,
            "max_long_overtake": int(late),
            "budget": int(budget),
        }

    def add_to(self, ask: Ask) -> Ask:
        """The same request, or the next turn of a conversation."""
        random = self.random
        if self._talks and random.random() < 0.5:
            talk, namespace = self._talks[int(random.integers(len(self._talks)))]
            tail = random.integers(1, VOCAB, int(random.integers(1, 8))).tolist()
            # As long as the one before at most, so that it fits into what the traffic's prompts do.
            room = max(1, len(ask.prompt) - len(tail))
            ask = replace(ask, prompt=[*talk[:room], *tail][: len(ask.prompt)], namespace=namespace)
        ask.session_done = bool(random.random() < 0.3)
        return ask

    def ended(self, ask: Ask, output: Any) -> None:
        """Note a conversation that may go on."""
        if not ask.session_done and output.outputs:
            self._talks = [*self._talks[-7:], ([*ask.prompt, *output.outputs[0].token_ids], ask.namespace)]

    def act(self, engine: Engine) -> None:
        """Somebody else says that a conversation is over."""
        if self._talks and self.random.random() < 0.05:
            talk, namespace = self._talks[int(self.random.integers(len(self._talks)))]
            engine.cache.put_first(talk, namespace)


class Pictures:
    """Pictures in prompts, of which one can't be encoded at all, or once.

    The last tokens of the vocabulary stand for pictures in an `Ask`, so that shared texts share them.
    """

    def __init__(self, seed: int, longest: int) -> None:
        random = np.random.default_rng(seed + 8 * 10**6)
        self.drawn = int(random.integers(1 << 30)), bool(random.random() < 0.5)
        self.shown = HashImages(*self.drawn)
        self.max_bytes = int(random.choice([1, 400, 10**6]))
        self.in_pieces = bool(random.random() < 0.5)
        self._longest = longest
        bad = self.shown.pictures[int(random.integers(NUM_PICTURES))].digest
        (self.shown.broken if random.random() < 0.5 else self.shown.flaky).add(bad)

    def place(self, ask: Ask) -> tuple[list[int], list[Any]]:
        """The prompt with as many pictures as there is room for."""
        room = self._longest - ask.params.max_tokens - len(ask.prompt) - 1
        parts: list[Any] = []
        for token in ask.prompt:
            picture = self.shown.pictures[VOCAB - 1 - token] if token >= VOCAB - NUM_PICTURES else None
            length = 0 if picture is None else self.shown.num_tokens(picture.width, picture.height)
            is_shown = picture is not None and length <= room
            parts.append(picture if is_shown else token)
            room -= length if is_shown else 0
        return self.shown.place(parts)

    def is_broken(self, images: Any) -> bool:
        """Whether one of a prompt's pictures can't be encoded."""
        return any(image.image.digest in self.shown.broken for image in images)


def placed(ask: Ask, pictures: Pictures | None) -> tuple[list[int], list[Any]]:
    """Return the ids of a request's prompt, and its images."""
    return (ask.prompt, []) if pictures is None else pictures.place(ask)


class _Quotas:
    """Floors and ceilings of the namespaces, given anew now and then while requests run."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed + 5 * 10**6)

    def act(self, engine: Engine, *, at_start: bool = False) -> None:
        """Other quotas, or none; the names stay, since a name gets its quota before its first block."""
        random, num_blocks = self.random, engine.cache.num_blocks
        if not at_start and random.random() > 0.01:
            return
        quotas: dict[Any, Quota] = {}
        for name in ("ada", "bob"):
            floor = int(random.choice([0, 0, num_blocks // 4]))
            ceiling = int(random.integers(max(floor, 2), num_blocks)) if random.random() < 0.6 else None
            quotas[name] = Quota(floor, ceiling)
        engine.cache.set_quotas(quotas)


class _PlainDecodes:
    """Requests that steps can be launched ahead for, mostly, with many ways to end."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed + 4 * 10**6)

    def add_to(self, ask: Ask) -> Ask:
        """The same request, rather plain."""
        random, params = self.random, ask.params
        if random.random() < 0.9:
            params = replace(params, n=1, repetition_penalty=1.0)
        if random.random() < 0.4:
            params = replace(params, stop_token_ids=tuple(random.integers(1, VOCAB, 6).tolist()))
        if random.random() < 0.3:
            params = replace(params, logprobs=2)
        if not params.is_greedy and random.random() < 0.5:
            params = replace(params, top_p=0.9, top_k=int(random.integers(0, 9)))
        return replace(ask, params=params)


class _DiskAndHost:
    """A host tier over a disk tier, both with hardly any room; the folder is as the last run left it.

    Sometimes a bit of it has flipped since, and sometimes the run ends as if it were killed.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = np.random.default_rng(seed + 3 * 10**6)
        self.folder = folder
        files = sorted(folder.glob("*.seg"))
        if files and self.random.random() < 0.5:
            path = files[int(self.random.integers(len(files)))]
            data = bytearray(path.read_bytes())
            data[int(self.random.integers(len(data)))] ^= 1 << int(self.random.integers(8))
            path.write_bytes(data)

    def options(self, model: Runner) -> dict[str, Any]:
        """Of `make_engine`."""
        size, of_a_state = model.bytes_per_block, bytes_per_checkpoint(model)
        kind = BlockKind("paged-hash", "", model.block_size, size)
        of_states = None
        max_bytes = int(self.random.integers(70, 400)) * (size + 4 * model.block_size + 200)
        host_bytes = int(self.random.integers(5, 40)) * size
        if of_a_state:
            of_states = replace(kind, kv_format="states", block_size=GRID, block_bytes=of_a_state)
            max_bytes, host_bytes = max_bytes + 16 * of_a_state, host_bytes + 4 * of_a_state
        disk = DiskTier(self.folder, max_bytes, kind, states=of_states)
        return {"tier": TierStack([HostTier(host_bytes), disk]), "load_deadline_s": 5.0}

    def act(self, engine: Engine, model: SlowCopies) -> None:
        """What happens beside a step."""
        while model.copies and self.random.random() < 0.7:
            model.finish_copy()
        if not model.copies:
            engine.wait()

    def end(self, engine: Engine, model: SlowCopies, outcome: Outcome) -> None:
        """The run is over."""
        while engine.has_work or model.copies:
            self.act(engine, model)
            engine.step()
        _count_transfers(engine, outcome)
        model.copies_at_once = True
        engine.close(save=self.random.random() < 0.5)


def _count_transfers(engine: Engine, outcome: Outcome) -> None:
    counts = engine.stats().transfers
    assert counts is not None
    for name in ("loaded_blocks", "failed_loads", "late_loads", "saved_blocks", "failed_saves"):
        setattr(outcome, name, getattr(counts, name))
    for tier in engine.stats().tiers:
        outcome.saved_states += tier.saved_states
        outcome.loaded_states += tier.loaded_states


def run(
    seed: int,
    num_requests: int,
    *,
    check_every: int = 1,
    faults: bool = False,
    tier: bool = False,
    controls: bool = False,
    ahead: bool = False,
    quotas: bool = False,
    agents: bool = False,
    states: bool = False,
    images: bool = False,
    folder: Path | None = None,
    interpreted: InterpretedModel | None = None,
) -> Outcome:
    """Serve one seed's traffic with few blocks; raises AssertionError where something is wrong.

    Args:
        tier: there is a tier below the pool, of which everything is to be expected.
        controls: requests prewarm, pin what leads to their breakpoints, and leave no more than they want.
        ahead: steps are launched ahead, mostly without guesses, which need the tokens first.
        quotas: namespaces have quotas, which change.
        agents: conversations go on and end, and long prompts begin in turn, by settings that are drawn.
        states: the model has states, and slots for hardly more than the running requests'.
        images: prompts show pictures; the encodings of some, or of hardly one, are kept.
        folder: there are a host tier and a disk tier with this folder.
        interpreted: the model, over the Triton kernels; None: a scripted one.
    """
    setup = np.random.default_rng(seed + 10**6)
    below = _DiskAndHost(seed, folder) if folder is not None else _Tier(seed) if tier else None
    wishes = [kind(seed) for kind, wanted in ((_PlainDecodes, ahead), (_Controls, controls)) if wanted]
    talks = _Agents(seed) if agents else None
    options = {} if talks is None else talks.options()
    wishes = wishes if talks is None else [talks, *wishes]
    if states:
        options["num_slots"] = int(np.random.default_rng(seed + 7 * 10**6).choice([6, 9, 16, 40]))
    engine, model, pictures = _small_engine(
        setup,
        below,
        faults=faults,
        ahead=ahead,
        sees=seed if images else None,
        interpreted=interpreted,
        **options,
    )
    limits = _Quotas(seed) if quotas else None
    if limits is not None:
        limits.act(engine, at_start=True)
    block_size, has_states = engine.cache.block_size, engine.cache.states is not None
    traffic, oracle = Traffic(seed, engine.limits.max_model_len), Oracle(block_size, pictures)
    at_once = int(setup.choice([2, 6, 16]))
    outcome, running, step = Outcome(), {}, 0
    while outcome.requests < num_requests or engine.has_work:
        while outcome.requests < num_requests and len(running) < at_once:
            ask = traffic.next()
            for wish in wishes:
                ask = wish.add_to(ask)
            if interpreted is not None:
                ask = replace(ask, params=_greedy(ask.params))
            prompt, shown = placed(ask, pictures)
            outcome.images += len(shown)
            try:
                request_id = engine.add_request(
                    prompt,
                    ask.params,
                    images=shown,
                    namespace=ask.namespace,
                    priority=ask.priority,
                    pins=ask.pins,
                    keep_tokens=ask.keep_tokens,
                    session_done=ask.session_done,
                )
            except ContextLengthExceededError:
                assert quotas, "only a ceiling refuses these"
                outcome.requests += 1
                continue
            outcome.prewarmed += ask.params.samples_nothing
            outcome.forgotten += ask.keep_tokens is not None
            outcome.sessions_done += ask.session_done
            running[request_id] = [ask, 0, pictures is not None and pictures.is_broken(shown)]
            outcome.requests += 1
            outcome.namespaces.add(ask.namespace)
            outcome.num_samples += ask.params.n
        _disturb(engine, traffic, setup)
        if limits is not None:
            limits.act(engine)
        if talks is not None:
            talks.act(engine)
            outcome.waits_for_turn += engine.stats().prompts_waiting_for_turn
        if below is not None:
            below.act(engine, model)
        result = engine.step()
        step += 1
        if step % check_every == 0:
            engine.check()
            if isinstance(model, StatefulParrot):
                model.check_checkpoints(engine)
        for output in result.finished:
            ask, _, is_broken = running.pop(output.request_id)
            outcome.partial_hits += bool(output.num_cached_tokens % block_size)
            outcome.resumed += has_states and output.num_cached_tokens > 0
            outcome.accepted += output.accepted_draft_tokens
            outcome.rejected += output.rejected_draft_tokens
            if is_broken:
                assert not output.num_generated_tokens, f"seed {seed}: a broken picture was shown: {output}"
                outcome.broken += 1
                continue
            if _has_failed(seed, output, may_fail=faults, may_be_short=quotas):
                pass
            elif interpreted is None:
                _compare(seed, ask, output, oracle, may_be_short=quotas)
            else:
                _compare_with_transformers(seed, ask, output, interpreted)
            if talks is not None:
                talks.ended(ask, output)
        for request_id, entry in list(running.items()):
            entry[1] += 1
            if entry[0].aborted_after is not None and entry[1] > entry[0].aborted_after:
                engine.abort(request_id)
                outcome.aborted += 1
                entry[0].aborted_after = None
        most = (400 if pictures is None else 8000) * num_requests + 1000
        assert step < most, f"seed {seed}: the engine does not come to an end"
    if below is not None:
        below.end(engine, model, outcome)
    stats = engine.stats()
    outcome.preemptions = stats.num_preemptions
    outcome.evicted_blocks = stats.cache.evicted_blocks
    outcome.evicted_states = stats.cache.evicted_checkpoints
    outcome.steps_ahead = stats.steps_ahead
    if interpreted is not None:
        outcome.replayed = model.num_replayed
    _check_end(seed, engine, model)
    if pictures is not None:
        counts = stats.images
        assert counts is not None
        outcome.encoded = counts.encoded
        check_nothing_is_left(engine, pictures.max_bytes)
    return outcome


def _small_engine(
    setup: np.random.Generator,
    below: _Tier | _DiskAndHost | None,
    *,
    faults: bool,
    ahead: bool,
    sees: int | None,
    num_slots: int = 0,
    interpreted: InterpretedModel | None = None,
    **options: Any,
) -> tuple[Engine, Any, Pictures | None]:
    """An engine of few blocks, with settings that are drawn.

    Args:
        sees: seed of its pictures; None: it sees none.
        num_slots: states of the model; 0: it has none.
        interpreted: the model; None: a scripted one.
    """
    block_size = int(setup.choice([8, 16]))
    num_blocks = int(setup.integers(30, 81)) if block_size == 8 else int(setup.integers(20, 50))
    longest = int(min(num_blocks * block_size // setup.choice([1, 2, 3]), 400 if num_slots else 240))
    failing = iter(setup.random(10**5) < 0.01)
    fails: dict[str, Any] = {"fail_if": lambda batch: faults and bool(next(failing))}
    pictures = None if sees is None else Pictures(sees, longest)
    model: Any = None
    if interpreted is not None:
        longest = min(longest, interpreted.longest)
        num_blocks = -(-longest // block_size) + int(setup.choice([0, 1, 2, 8]))
    elif num_slots:
        kind = StatefulParrot if pictures is None else SeeingStatefulParrot
        model = kind(num_blocks, block_size, num_slots, **fails)
    else:
        model = (Parrot if pictures is None else SeeingParrot)(num_blocks, block_size, **fails)
    if pictures is not None:
        assert isinstance(model, SeesImages)
        model.see(pictures.shown, pictures.max_bytes)
        options["image_processor"] = pictures.shown
    settings: dict[str, Any] = dict(
        model=model,
        num_blocks=num_blocks,
        block_size=block_size,
        budget=int(setup.choice([8, 24, 64, 200])),
        max_model_len=longest,
        max_num_seqs=int(setup.choice([3, 8, 32])),
        max_tokens_per_request=int(setup.choice([5, 40])) if setup.random() < 0.4 else None,
        scheduling_policy=str(setup.choice(POLICIES)),
        max_overtake=int(setup.choice([0, 2, 32])),
        eviction_policy=str(setup.choice(["lru", SLRU, "adaptive", S3FIFO])),
        max_draft_tokens=int(setup.choice([4, 16])),
        step_costs=FREE if setup.random() < 0.7 else None,
        **({"async_scheduling": True, "speculation": setup.choice(["off", "off", "auto"])} if ahead else {}),
    )
    settings |= options
    if interpreted is not None:
        limits = StepLimits(settings["budget"], settings["max_num_seqs"], longest)
        settings["model"] = interpreted.runner(setup, num_blocks, block_size, limits, **fails)
    if below is not None:
        settings |= below.options(settings["model"])
    engine, _ = make_engine(**settings)
    if pictures is not None and pictures.in_pieces:
        encode_layer_by_layer(engine)
    return engine, settings["model"], pictures


def _check_end(seed: int, engine: Engine, model: Any) -> None:
    """Nothing runs any more: nothing is held, and nothing was broken."""
    engine.check()
    stats = engine.stats()
    # A pin of the last steps may not have expired.
    held = stats.cache.held_blocks - stats.cache.pinned_blocks
    assert (held, stats.cache.num_leases) == (0, 0), f"seed {seed}: blocks are held when nothing runs"
    assert stats.num_rebuilds == 0, f"seed {seed}: an invariant was broken"
    assert not model.violations, f"seed {seed}: {model.violations}"


def _disturb(engine: Engine, traffic: Traffic, random: np.random.Generator) -> None:
    """Now and then what administrators and other clients do."""
    chance = random.random()
    namespace = NAMESPACES[int(random.integers(len(NAMESPACES)))]
    text = traffic.family()[: int(random.integers(1, 40))]
    if chance < 0.003:
        engine.cache.reset()
    elif chance < 0.01:
        engine.cache.publish(text)
    elif chance < 0.014:
        engine.cache.unpublish(text)
    elif chance < 0.03:
        with suppress(InvalidRequestError):
            engine.cache.pin(text, namespace, ttl=0.001)
    elif chance < 0.04:
        engine.cache.evict(int(random.integers(1, 10)))
    elif chance < 0.06:
        engine.cache.explain(text, namespace)


def _has_failed(seed: int, output: Any, *, may_fail: bool, may_be_short: bool) -> bool:
    """Return True for an output without answers, and assert that it may be one.

    Args:
        may_be_short: a ceiling may leave no room for it.
    """
    if all(sample.finish_reason != "error" for sample in output.outputs):
        return False
    no_room = output.error_code in ("out_of_kv_blocks", "context_length_exceeded")
    assert may_fail or (may_be_short and no_room), f"seed {seed}: {output}"
    return True


def _greedy(params: SamplingParams) -> SamplingParams:
    """The same without what makes the most likely token another one."""
    return replace(
        params, temperature=0.0, seed=None, frequency_penalty=0.0, repetition_penalty=1.0, top_p=1.0, top_k=0
    )


def _compare_with_transformers(seed: int, ask: Ask, output: Any, model: InterpretedModel) -> None:
    """Assert that an output is what transformers says."""
    for sample in output.outputs:
        try:
            is_end = sample.finish_reason == "stop" and not ask.params.stop_token_ids
            model.check(ask.prompt, list(sample.token_ids), ended=is_end)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {output.request_id} in {ask.namespace!r}: {error}") from error


def _compare(seed: int, ask: Ask, output: Any, oracle: Oracle, *, may_be_short: bool) -> None:
    """Assert that an output is the oracle's.

    Args:
        may_be_short: a ceiling may end it early.
    """
    reasons = {sample.finish_reason for sample in output.outputs}
    expected = oracle.answer(ask)
    for sample, (tokens, logprobs) in zip(output.outputs, expected, strict="abort" not in reasons):
        if sample.finish_reason == "abort" or (may_be_short and sample.finish_reason == "length"):
            tokens = tokens[: len(sample.token_ids)]
        else:
            assert sample.logprobs == logprobs, f"seed {seed}: other logprobs of {output.request_id}"
        assert sample.token_ids == tokens, (
            f"seed {seed}: {output.request_id} in {ask.namespace!r} with {ask.params}: "
            f"{sample.token_ids} instead of {tokens}"
        )
    assert END not in [token for sample in output.outputs for token in sample.token_ids[:-1]] or (
        ask.params.ignore_eos
    )
