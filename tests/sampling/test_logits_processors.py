# SPDX-License-Identifier: Apache-2.0
"""Logits processors: one conformance test for every kind, alone and many at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import tried

from radixkv.sampling import sampler
from radixkv.sampling.device_counts import DeviceCounts
from radixkv.sampling.logits_processors import (
    Counting,
    FedTokens,
    LogitsProcessor,
    TokenMask,
    apply_processors,
    by_kind,
    make_processors,
)
from radixkv.sampling.sampler import sample, sample_runs
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.sampling.sampling_state import RandomStream, SamplingState

VOCABULARY = 40
PROMPT = [1, 2, 3, 2, 1, 39]
ENDS = [0, 4, -1, VOCABULARY, 2**40]

#: What a request may ask for -> the same, plainly, from (logits, prompt, generated).
Reference = Callable[[list[float], list[int]], list[float]]


def biased(logits: list[float], generated: list[int]) -> list[float]:
    return [x + {5: 2.5, 0: -100.0, 39: 1.0}.get(token, 0.0) for token, x in enumerate(logits)]


def repetition(logits: list[float], generated: list[int]) -> list[float]:
    seen = {*PROMPT, *generated}
    return [x if t not in seen else x / 1.5 if x > 0 else x * 1.5 for t, x in enumerate(logits)]


def counted(logits: list[float], generated: list[int]) -> list[float]:
    return [x - 0.5 * generated.count(t) - 0.25 * (t in generated) for t, x in enumerate(logits)]


def held_open(logits: list[float], generated: list[int]) -> list[float]:
    return [float("-inf") if t in ENDS and len(generated) < 3 else x for t, x in enumerate(logits)]


BAD_WORDS = [[5], [3, 7], [7, 7, 7], [1, 2, 3, 4, 5, 6], [3, 9], [7, 3], [VOCABULARY + 3], [5]]


def without_bad_words(logits: list[float], generated: list[int]) -> list[float]:
    def completes(token: int) -> bool:
        return any([*generated, token][-len(word) :] == word for word in BAD_WORDS)

    return [float("-inf") if completes(t) else x for t, x in enumerate(logits)]


def allowed_only(logits: list[float], generated: list[int]) -> list[float]:
    return [x if t in (0, 3, 7, 39) else float("-inf") for t, x in enumerate(logits)]


KINDS: dict[str, tuple[SamplingParams, Reference]] = {
    "LogitBias": (SamplingParams(logit_bias={5: 2.5, 0: -100.0, 39: 1.0, VOCABULARY + 3: 9.0}), biased),
    "RepetitionPenalty": (SamplingParams(repetition_penalty=1.5), repetition),
    "CountPenalty": (SamplingParams(presence_penalty=0.25, frequency_penalty=0.5), counted),
    "MinTokens": (SamplingParams(min_tokens=3), held_open),
    "AllowedTokens": (SamplingParams(allowed_token_ids=[3, 0, 7, 39, 3, VOCABULARY + 3]), allowed_only),
    "BadWords": (SamplingParams(bad_words=BAD_WORDS), without_bad_words),
}
kinds = st.sampled_from(sorted(KINDS))
PENALTIES = (
    ("LogitBias", "logit_bias"),
    ("RepetitionPenalty", "repetition_penalty"),
    ("CountPenalty", "presence_penalty"),
    ("CountPenalty", "frequency_penalty"),
    ("MinTokens", "min_tokens"),
    ("AllowedTokens", "allowed_token_ids"),
    ("BadWords", "bad_words"),
)
tokens = st.integers(0, VOCABULARY - 1) | st.integers(1, 9)  # of which bad words are made
#: Tokens to accept, and (negative) how many to roll back.
histories = st.lists(tokens | st.integers(-4, -1), max_size=25)


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def made(kind: str) -> LogitsProcessor:
    (processor,) = make_processors(KINDS[kind][0], PROMPT, ENDS)
    return processor


def follow(processor: Any, history: list[int], generated: list[int]) -> None:
    """Let the processor (or state) and the plain list of tokens live through a history."""
    for event in history:
        if event >= 0:
            processor.accept(event)
            generated.append(event)
        else:
            count = min(-event, len(generated))
            processor.roll_back(count)
            del generated[len(generated) - count :]


def check(processor: LogitsProcessor, kind: str, generated: list[int]) -> None:
    logits = random_logits(1)
    expected = KINDS[kind][1](logits[0].tolist(), generated)
    apply_processors(logits, by_kind([[processor]]))
    torch.testing.assert_close(logits[0], torch.tensor(expected), rtol=1e-6, atol=1e-6)
    if not processor.is_active:
        assert torch.equal(logits, random_logits(1))


def test_every_kind_is_tested() -> None:
    # A grammar accepts only what it allows: see test_grammars.
    bases = (LogitsProcessor, Counting, TokenMask)
    kinds = {kind for base in bases for kind in base.__subclasses__()} - {*bases}
    assert {kind.__name__ for kind in kinds} - {"GrammarMask"} == set(KINDS)
    assert all(type(made(kind)).__name__ == kind for kind in KINDS)


@settings(max_examples=tried(300), deadline=None)
@given(kinds, histories)
def test_accepting_and_rolling_back_equals_computing_anew(kind: str, history: list[int]) -> None:
    processor, generated = made(kind), list[int]()
    follow(processor, history, generated)
    check(processor, kind, generated)
    fresh = made(kind)
    for token in generated:
        fresh.accept(token)
    logits, same = random_logits(1), random_logits(1)
    apply_processors(logits, by_kind([[processor]]))
    apply_processors(same, by_kind([[fresh]]))
    assert torch.equal(logits, same)


@settings(max_examples=tried(200), deadline=None)
@given(kinds, histories, histories, histories)
def test_a_fork_has_the_same_past_and_its_own_future(
    kind: str, past: list[int], ours: list[int], theirs: list[int]
) -> None:
    parent, generated = made(kind), list[int]()
    follow(parent, past, generated)
    child, of_child = parent.fork(), list(generated)
    follow(parent, ours, generated)
    follow(child, theirs, of_child)
    check(parent, kind, generated)
    check(child, kind, of_child)


@settings(max_examples=tried(100), deadline=None)
@given(st.lists(st.tuples(st.sets(kinds), histories), min_size=1, max_size=6))
def test_many_rows_at_once_equal_each_alone(rows: list[tuple[set[str], list[int]]]) -> None:
    batch = []
    for row, history in rows:
        own = [made(kind) for kind in sorted(row)]
        for processor in own:
            follow(processor, history, [])
        batch.append(own)
    logits = random_logits(len(rows))
    apply_processors(logits, by_kind(batch))
    for i, own in enumerate(batch):
        alone = random_logits(len(rows))[i : i + 1]
        apply_processors(alone, by_kind([own]))
        assert torch.equal(logits[i], alone[0])


def test_kinds_are_applied_in_their_order() -> None:
    """Bias, then the repetition penalty, then the others: as transformers does."""
    params = SamplingParams(
        logit_bias={5: 2.5, 0: -100.0, 39: 1.0},
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        min_tokens=3,
    )
    generated = [5, 39]
    for order in (1, -1):
        state = SamplingState(params, 0, PROMPT, ENDS)
        for token in generated:
            state.accept(token)
        logits = random_logits(1)
        expected = logits[0].tolist()
        for change in (biased, repetition, counted, held_open):
            expected = change(expected, generated)
        apply_processors(logits, by_kind([list(state.processors)[::order]]))
        torch.testing.assert_close(logits[0], torch.tensor(expected), rtol=1e-5, atol=1e-5)


@dataclass
class Row:
    params: SamplingParams
    seed: int = 0
    sampling_state: SamplingState = field(init=False)

    def __post_init__(self) -> None:
        self.sampling_state = SamplingState(self.params, self.seed, PROMPT, ENDS)


class TestSampler:
    @pytest.mark.parametrize("kind", KINDS)
    def test_rows_without_processors_are_as_if_alone(self, kind: str) -> None:
        plain = [
            Row(SamplingParams(temperature=t, logprobs=2), seed) for seed, t in enumerate((0.0, 1.0, 0.0))
        ]
        changed = Row(KINDS[kind][0])
        logits = random_logits(4)
        before = logits.clone()
        mixed = sample(logits, [0, 1, 2, 3], [plain[0], changed, plain[1], plain[2]])
        assert torch.equal(logits, before)
        alone = sample(logits, [0, 2, 3], plain)
        assert [mixed[0], *mixed[2:]] == alone

    def test_named_logprobs_are_told_beside_rows_with_other_wishes(self) -> None:
        wishes: list[dict[str, Any]] = [
            {"logprob_token_ids": [7, 2]},
            {},
            {"logprobs": 2, "logprob_token_ids": (5,)},
            {"logprobs": 3, "temperature": 1.0},
        ]
        rows = [Row(SamplingParams(**{"temperature": 0.0, **wish})) for wish in wishes]
        logits = torch.randn(len(rows), 32, generator=torch.Generator().manual_seed(1))
        expected = torch.log_softmax(logits, 1)
        for i, (token, wish) in enumerate(zip(sample(logits, range(4), rows), wishes, strict=True)):
            assert (token.logprobs is None) == (not wish)
            if token.logprobs is not None:
                named = {one: float(expected[i, one]) for one in wish.get("logprob_token_ids", ())}
                assert token.logprobs.named == pytest.approx(named)
                assert len(token.logprobs.top) == wish.get("logprobs", 0)

    def test_logprobs_are_the_models_own(self) -> None:
        row = Row(SamplingParams(temperature=0.0, logit_bias={7: 100.0}, logprobs=0))
        logits = random_logits(1)
        (token,) = sample(logits, [0], [row])
        assert token.token_id == 7
        assert token.logprobs is not None
        assert token.logprobs.chosen[1] == pytest.approx(float(torch.log_softmax(logits[0], 0)[7]), rel=1e-5)

    def test_drawing_sees_what_processors_did(self) -> None:
        for top_p in (1.0, 0.9):
            row = Row(SamplingParams(temperature=1.0, top_p=top_p, logit_bias={7: 100.0}))
            tokens = sample(random_logits(2), [0, 1, 1], [Row(SamplingParams(temperature=1.0)), row, row])
            assert [token.token_id for token in tokens[1:]] == [7, 7]

    def test_only_rows_with_active_processors_are_touched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        done, changed = Row(KINDS["MinTokens"][0]), Row(KINDS["LogitBias"][0])
        for token in (5, 6, 7):
            done.sampling_state.accept(token)
        touched: list[int] = []
        monkeypatch.setattr(sampler, "apply_processors", lambda logits, *_: touched.append(len(logits)))
        rows = [done, Row(SamplingParams()), changed, Row(SamplingParams(temperature=0.0))]
        sample(random_logits(4), [0, 1, 2, 3], rows)
        assert touched == [1]


class TestDrafts:
    @settings(max_examples=tried(60), deadline=None)
    @given(
        st.lists(
            st.tuples(st.sampled_from([*sorted(KINDS), "all", ""]), st.sampled_from([0.0, 1.0]), histories),
            min_size=1,
            max_size=4,
        ),
        st.integers(0, 5),
        st.randoms(use_true_random=False),
    )
    def test_runs_are_what_single_steps_choose(self, wanted, most, random) -> None:  # type: ignore[no-untyped-def]
        """Whatever the drafts say: each token is the one chosen when those before it have been accepted."""
        requests, drafts, expected, rows = [], [], [], []
        logits = random_logits(len(wanted) * (most + 1))
        for i, (kind, temperature, history) in enumerate(wanted):
            changes = {name: getattr(KINDS[own][0], name) for own, name in PENALTIES if kind in (own, "all")}
            params = SamplingParams(temperature=temperature, logprobs=1, top_p=0.9, **changes)
            request = Row(params, seed=i)
            for token in history:
                if token >= 0:
                    request.sampling_state.accept(token)
            alone = Row(params, seed=i)
            alone.sampling_state = copy.deepcopy(request.sampling_state)
            first = i * (most + 1)
            run = []
            for row in range(first, first + most + 1):
                (token,) = sample(logits, [row], [alone])
                run.append(token)
                alone.sampling_state.accept(token.token_id)
            right = random.randint(0, most)
            draft = [token.token_id for token in run[:right]]
            if right < most:
                draft.append((run[right].token_id + 1) % VOCABULARY)
            requests.append(request)
            drafts.append(draft)
            rows.append(first)
            expected.append(run[: right + 1])
        assert sample_runs(logits, rows, requests, drafts) == expected
        # Nothing of the requests has changed: the same again.
        assert sample_runs(logits, rows, requests, drafts) == expected

    def test_a_run_ends_before_a_row_that_is_no_number(self) -> None:
        logits = random_logits(4)
        logits[1] = float("nan")
        greedy = [Row(SamplingParams(temperature=0.0)), Row(SamplingParams(temperature=1.0))]
        first = int(logits[0].argmax())
        runs = sample_runs(logits, [0, 3], greedy, [[first, 5], []])
        assert [token.token_id for token in runs[0]] == [first]
        assert len(runs[1]) == 1
        assert runs[1][0].token_id >= 0
        # What the draft has wrong is not looked at.
        runs = sample_runs(logits, [0], greedy[:1], [[(first + 1) % VOCABULARY, 5]])
        assert [token.token_id for token in runs[0]] == [first]


class TestState:
    @settings(max_examples=tried(100), deadline=None)
    @given(histories)
    def test_draws_depend_on_the_place_alone(self, history: list[int]) -> None:
        state, generated = SamplingState(SamplingParams(), 5, PROMPT, ENDS), list[int]()
        stream = RandomStream(5)
        expected = [stream.at(i) for i in range(40)]
        for event in history:
            follow(state, [event], generated)
            assert state.draw() == state.draw() == expected[state.num_generated]

    def test_fork_draws_with_its_own_seed_from_there_on(self) -> None:
        state = SamplingState(SamplingParams(), 5, PROMPT, ENDS)
        for token in (1, 2, 3):
            state.accept(token)
        fork = state.fork(6)
        assert fork.draw() == RandomStream(6).at(3)
        fork.accept(1)
        assert (state.num_generated, fork.num_generated) == (3, 4)

    def test_streams_of_different_seeds_differ(self) -> None:
        assert len({RandomStream(seed).at(0) for seed in (0, 1, -1, 2**63 - 1)}) == 4

    def test_state_that_was_copied_whole_is_independent(self) -> None:
        state = SamplingState(KINDS["CountPenalty"][0], 5, PROMPT, ENDS)
        other = copy.deepcopy(state)
        other.accept(3)
        assert state.num_generated == 0


def test_rows_of_counts_are_used_again() -> None:
    """A wave of requests takes no more rows than the one before, which is gone."""
    memory = DeviceCounts()
    params = SamplingParams(repetition_penalty=1.5)
    taken = []
    for _ in range(4):
        members = [make_processors(params, PROMPT, ENDS) for _ in range(20)]
        apply_processors(random_logits(20), by_kind(members), memory)
        taken.append({own.counts.place for each in members for own in each if isinstance(own, Counting)})
        del members
    assert all(len(places) == 20 for places in taken)
    assert max(set.union(*taken)) < 32


@settings(max_examples=tried(60), deadline=None)
@given(st.data())
def test_counts_on_the_device_change_the_same_logits(data: st.DataObject) -> None:
    """Whatever is accepted, rolled back, forked, fed before it is known, or never told."""
    ids = st.integers(0, VOCABULARY - 1)
    memory = DeviceCounts()
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25)
    alive = [make_processors(params, PROMPT, ENDS) for _ in range(2)]
    for _ in range(data.draw(st.integers(1, 8))):
        for own in alive:
            for token in data.draw(st.lists(ids, max_size=3)):
                for processor in own:
                    processor.accept(token)
            count = data.draw(st.integers(0, 2))
            if all(len(p.counts.history) >= count for p in own):
                for processor in own:
                    processor.roll_back(count)
        if data.draw(st.booleans()) and len(alive) < 5:
            alive.append([processor.fork() for processor in alive[0]])
        logits = random_logits(len(alive))
        expected = logits.clone()
        apply_processors(expected, by_kind(alive))
        apply_processors(logits, by_kind(alive), memory)
        assert torch.equal(logits, expected)
        # A step ahead of the tokens of some.
        late = [i for i in range(len(alive)) if data.draw(st.booleans())]
        tokens = [data.draw(ids) for _ in late]
        told: list[int] = []
        places = [late.index(i) if i in late else -1 for i in range(len(alive))]
        logits, expected = random_logits(len(alive)), random_logits(len(alive))
        apply_processors(
            logits,
            by_kind(alive, places),
            memory,
            FedTokens(told, places, torch.tensor(tokens, dtype=torch.int64)),
        )
        ahead = [[processor.fork() for processor in own] for own in alive]
        for i, token in zip(late, tokens, strict=True):
            for processor in ahead[i]:
                processor.accept(token)
        apply_processors(expected, by_kind(ahead))
        assert torch.equal(logits, expected)
        if data.draw(st.booleans()):  # else the step failed, or nobody got its tokens
            told += tokens
        if told and data.draw(st.booleans()):
            for i, token in zip(late, tokens, strict=True):
                for processor in alive[i]:
                    processor.accept(token)
