# SPDX-License-Identifier: Apache-2.0
"""Speculation changes how many steps an answer takes, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_language_model import (
    END,
    VOCAB,
    LetterTokenizer,
    PagedHashModel,
    greedy_reference,
    make_engine,
    run_all,
)
from told_deltas import collect_outputs

from radixkv.engine.engine import Engine
from radixkv.grammar.vocabulary import PlainTokens
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.batch import Batch
from radixkv.speculation.step_costs import StepCosts

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
#: Rows cost nothing: as many guesses are made as there are.
FREE = StepCosts({1: 1.0, 2: 1.0})


class Parrot(PagedHashModel):
    """Repeats a phrase of its prompt, mostly: the next token is what followed the last two before."""

    def execute(self, batch: Batch) -> Any:
        logits = super().execute(batch)
        for i, row in enumerate(batch.logit_rows.tolist()):
            r = int(np.searchsorted(batch.query_starts, row, side="right")) - 1
            context = self._read(batch, r, int(batch.positions[row]) + 1).tolist()
            for place in range(len(context) - 2, 0, -1):
                if context[place - 1 : place + 1] == context[-2:]:
                    if hash(tuple(context)) % 7:
                        logits[i, context[place + 1]] += 12.0
                    break
        return logits


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def answer(engine: Engine, tokens: list[int], params: SamplingParams = GREEDY, namespace: str = "") -> Any:
    """The output of one request, and how many steps it took."""
    before = engine.stats().steps
    request_id = engine.add_request(tokens, params, namespace=namespace)
    output = run_all(engine)[request_id]
    return output, engine.stats().steps - before


def assert_nothing_held(engine: Engine) -> None:
    engine.check()
    assert engine.cache.stats.held_blocks == 0


class TestSources:
    def test_a_repeated_request_is_known_whole(self) -> None:
        engine, _ = make_engine(num_blocks=100, max_draft_tokens=8)
        first, steps = answer(engine, prompt(1, 30))
        again, fewer = answer(engine, prompt(1, 30))
        assert again.outputs[0].token_ids == first.outputs[0].token_ids == greedy_reference_on(prompt(1, 30))
        assert steps == 24
        # 9 tokens in each of two steps, and the other 6: the last one is no guess.
        assert fewer == 3
        assert again.accepted_draft_tokens == 8 + 8 + 5
        assert_nothing_held(engine)

    def test_another_namespace_is_never_guessed_from(self) -> None:
        engine, model = make_engine(num_blocks=100)
        answer(engine, prompt(1, 30), namespace="ada")
        _, steps = answer(engine, prompt(1, 30), namespace="bob")
        assert steps == 24
        assert engine.stats().speculation.num_draft_tokens == 0
        assert model.num_computed == 2 * (30 + 23)
        _, steps = answer(engine, prompt(1, 30), namespace="ada")
        assert steps < 10

    def test_a_public_prefix_does_not_connect_namespaces(self) -> None:
        engine, _ = make_engine(num_blocks=100)
        engine.cache.publish(prompt(1, 24))
        answer(engine, prompt(1, 24), namespace="ada")
        _, steps = answer(engine, prompt(1, 24), namespace="bob")
        assert steps == 24
        _, steps = answer(engine, prompt(1, 24), namespace="ada")
        assert steps < 10

    def test_what_the_request_has_written_before(self) -> None:
        engine, _ = make_engine(model=Parrot(100, 8))
        phrase = prompt(2, 12)
        output, steps = answer(engine, phrase * 3)
        assert steps < 20
        off, slow = answer(make_engine(model=Parrot(100, 8), speculation="off")[0], phrase * 3)
        assert off.outputs == output.outputs
        assert slow == 24

    def test_what_its_namespace_has_written_before(self) -> None:
        engine, _ = make_engine(model=Parrot(200, 8))
        phrase = prompt(3, 20)
        answer(engine, phrase + phrase[:3])
        answer(engine, [5, 6, 7, *phrase[:6]], namespace="other")
        before = engine.stats().speculation.num_draft_tokens
        answer(engine, [*prompt(4, 5), *phrase[:6]])
        assert engine.stats().speculation.num_draft_tokens > before

    def test_a_prediction(self) -> None:
        reference = greedy_reference_on(prompt(5, 20))
        engine, _ = make_engine(num_blocks=100)
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, prediction=reference)
        output, steps = answer(engine, prompt(5, 20), params)
        assert output.outputs[0].token_ids == reference
        assert steps <= 3
        wrong = [1 + token % (VOCAB - 1) for token in reference[:3]] + reference[3:]
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, prediction=wrong)
        output, steps = answer(make_engine(num_blocks=100)[0], prompt(5, 20), params)
        assert output.outputs[0].token_ids == reference
        assert steps < 15
        assert output.rejected_draft_tokens > 0

    def test_off_is_off(self) -> None:
        engine, _ = make_engine(num_blocks=100, speculation="off")
        params = SamplingParams(temperature=0.0, max_tokens=5, prediction=[1, 2, 3])
        assert answer(engine, prompt(1, 30), params)[1] == 5
        assert engine.stats().speculation.num_drafts == 0


def greedy_reference_on(tokens: list[int]) -> list[int]:
    """24 tokens, the end token among them if it comes."""
    found = list(tokens)
    while len(found) < len(tokens) + 24:
        found += greedy_reference(found, len(tokens) + 24 - len(found))
    return found[len(tokens) :]


class NarrowTokenizer(LetterTokenizer):
    """Knows fewer tokens than the model has logits for."""

    vocab_size = VOCAB - 9

    def grammar_source(self) -> PlainTokens:
        tokens = [self.token_text(token).encode() for token in range(self.vocab_size)]
        return PlainTokens(tokens, [END], END, None)


class TestGrammars:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_what_a_grammar_forces_is_guessed_and_changes_no_token(self, temperature: float) -> None:
        fields = {"first": {"type": "integer"}, "second": {"enum": ["north", "south"]}}
        schema = {"type": "object", "properties": fields, "required": list(fields)}
        schema["additionalProperties"] = False
        params = SamplingParams(
            structured={"json": schema}, temperature=temperature, seed=3, max_tokens=60, logprobs=2
        )
        on, _ = make_engine(num_blocks=100, tokenizer=LetterTokenizer(), step_costs=FREE)
        off, _ = make_engine(num_blocks=100, tokenizer=LetterTokenizer(), speculation="off")
        for seed in (1, 1):  # the second one is known
            output, steps = answer(on, prompt(seed, 30), params)
            plain, slow = answer(off, prompt(seed, 30), params)
            assert output.outputs == plain.outputs
            assert output.accepted_draft_tokens > 10
            assert steps < slow
            assert_nothing_held(on)

    def test_a_guess_beyond_the_vocabulary_changes_no_token(self) -> None:
        """As a padded model's cached text or a prediction may have it."""
        params = SamplingParams(structured={"regex": "[a-c]{20}"}, temperature=0.0, max_tokens=30)
        off, _ = make_engine(num_blocks=100, tokenizer=NarrowTokenizer(), speculation="off")
        plain, _ = answer(off, prompt(1, 30), params)
        known = plain.outputs[0].token_ids
        for place in (0, 3, 9):
            guess = [*known[:place], NarrowTokenizer.vocab_size, *known[place:]]
            on, _ = make_engine(num_blocks=100, tokenizer=NarrowTokenizer(), step_costs=FREE)
            output, _ = answer(on, prompt(1, 30), replace(params, prediction=guess))
            assert output.outputs == plain.outputs
            assert_nothing_held(on)


class TestEnds:
    def test_stop_strings_limits_and_ends_inside_a_run(self) -> None:
        """Every way to end, at every place of a known answer: as without speculation."""
        tokens = prompt(1, 30)
        tokenizer = LetterTokenizer()
        known = greedy_reference_on(tokens)
        on, _ = make_engine(num_blocks=100, tokenizer=tokenizer)
        off, _ = make_engine(num_blocks=100, tokenizer=tokenizer, speculation="off")
        answer(on, tokens)
        for place in (1, 6, 11, 20):
            letters = tokenizer.decode(known[place : place + 2])
            for options in (
                {"max_tokens": place},
                {"stop": letters},
                {"stop": letters, "min_tokens": place + 2},
                {"stop": [letters], "include_stop_str_in_output": True},
                {"stop_token_ids": [known[place]]},
                {"stop_token_ids": [known[place]], "min_tokens": place + 3},
                {"logprobs": 2, "max_tokens": place + 1},
            ):
                params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **options})
                a, b = answer(on, tokens, params)[0], answer(off, tokens, params)[0]
                assert a.outputs == b.outputs, options
        assert on.stats().speculation.num_accepted_tokens > 50
        assert_nothing_held(on)

    def test_a_step_is_one_delta_and_counts_are_exact(self) -> None:
        engine, _ = make_engine(num_blocks=100, max_draft_tokens=5)
        answer(engine, prompt(1, 30))
        request_id = engine.add_request(prompt(1, 30), GREEDY, stream=True)
        deltas = []
        while engine.has_work:
            found = engine.step().deltas
            assert len(found) == 1
            deltas += found
        counts = engine.stats().speculation
        assert [len(delta.token_ids) for delta in deltas[:3]] == [6, 6, 6]
        assert deltas[-1].request_id == request_id
        accepted = [delta.accepted_draft_tokens for delta in deltas]
        rejected = [delta.rejected_draft_tokens for delta in deltas]
        assert accepted[:4] == [5, 5, 5, accepted[3]]
        assert sum(accepted) == counts.num_accepted_tokens
        assert sum(rejected) == counts.num_draft_tokens - counts.num_accepted_tokens
        assert sum(counts.accepted_per_pos) == counts.num_accepted_tokens
        assert counts.accepted_per_pos[0] == max(counts.accepted_per_pos) <= counts.num_drafts

    def test_wrong_guesses_are_never_matchable(self) -> None:
        engine, _ = make_engine(num_blocks=100, step_costs=FREE)
        reference = greedy_reference_on(prompt(6, 20))
        wrong = [*reference[:5], *prompt(7, 19)]
        assert wrong[5] != reference[5]
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, prediction=wrong)
        request_id = engine.add_request(prompt(6, 20), params)
        while engine.has_work:
            result = engine.step()
            engine.check()
            assert engine.cache.match(prompt(6, 20) + wrong).num_tokens <= 25
        assert result.finished[0].request_id == request_id
        assert result.finished[0].outputs[0].token_ids == reference

    def test_aborts_and_failed_steps_between(self) -> None:
        failing = iter([i % 5 == 3 for i in range(1000)])
        engine, _ = make_engine(model=PagedHashModel(100, 8, fail_if=lambda batch: next(failing)))
        known = greedy_reference_on(prompt(1, 30))
        for abort_after in (None, 1, 2, None):
            request_id = engine.add_request(prompt(1, 30), GREEDY)
            beside = engine.add_request(prompt(2, 13), GREEDY)
            outputs = {}
            for step in range(100):
                if step == abort_after:
                    engine.abort(request_id)
                outputs.update({output.request_id: output for output in engine.step().finished})
                engine.check()
                if not engine.has_work:
                    break
            assert outputs[beside].outputs[0].token_ids == greedy_reference_on(prompt(2, 13))
            got = outputs[request_id].outputs[0].token_ids
            assert got == known[: len(got)]
            assert abort_after is not None or got == known
        assert_nothing_held(engine)


requests = st.tuples(
    st.integers(0, 5),  # which phrase
    st.integers(1, 3),  # how often
    st.integers(0, 9),  # how many other tokens before
    st.sampled_from([0.0, 0.0, 0.7]),
    st.integers(1, 30),
    st.sampled_from(
        [
            {},
            {"repetition_penalty": 1.2},
            {"frequency_penalty": 0.5},
            {"min_tokens": 1, "stop_token_ids": [7]},
            {"top_p": 0.9},
            {"n": 2},
            {"logprobs": 1},
            {"stop": "A"},
            {"prompt_logprobs": 0},
        ]
    ),
    st.sampled_from(["", "ada"]),
    st.integers(0, 12),  # the step in which it arrives
)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(requests, min_size=1, max_size=9),
    st.sampled_from([{}, {"num_blocks": 24, "max_model_len": 100}, {"budget": 12}]),
    st.integers(1, 17),
)
def test_on_and_off_give_the_same_tokens(wanted: Any, shape: Any, max_draft: int) -> None:
    """Any mixture, with chunks, preemption, samples, penalties and full caches; as many guesses as can be."""
    results = []
    for speculation in ("on", "off"):
        options = {"speculation": "off"} if speculation == "off" else {"step_costs": FREE}
        size = {"num_blocks": 150, **shape}
        model = Parrot(size["num_blocks"], 8)
        engine, _ = make_engine(
            model=model,
            tokenizer=LetterTokenizer(),
            max_num_seqs=5,
            max_draft_tokens=max_draft,
            **{**size, **options},
        )
        deltas: list[Any] = []
        outputs: dict[str, Any] = {}
        waiting = sorted(enumerate(wanted), key=lambda one: one[1][-1])
        step = 0
        while waiting or engine.has_work:
            while waiting and (waiting[0][1][-1] <= step or not engine.has_work):
                i, (phrase, times, before, temperature, most, more, namespace, _) = waiting.pop(0)
                engine.add_request(
                    prompt(100 + i, before) + prompt(phrase, 9) * times,
                    SamplingParams(**{"temperature": temperature, "max_tokens": most, "seed": i, **more}),
                    request_id=str(i),
                    namespace=namespace,
                    stream=i % 2 == 0,
                )
            result = engine.step()
            if step % 3 == 0:
                engine.check()
            deltas += result.deltas
            outputs.update({output.request_id: output for output in result.finished})
            step += 1
        assert_nothing_held(engine)
        outputs |= collect_outputs(deltas)
        results.append({key: output.outputs for key, output in outputs.items()})
    assert results[0] == results[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_take_only_what_prompts_leave(temperature: float) -> None:
    engine, model = make_engine(num_blocks=200, budget=32, step_costs=FREE)
    params = SamplingParams(
        temperature=temperature, max_tokens=40, ignore_eos=True, seed=1, prediction=greedy_reference_on([9])
    )
    engine.add_request([9], params, request_id="guessing")
    engine.step()
    engine.add_request(prompt(1, 90), GREEDY, request_id="prompt")
    for _ in range(2):
        engine.step()
        counts = {request_id: count for request_id, _, count in model.batches[-1]}
        assert sum(counts.values()) == 32
        assert counts["guessing"] == 1, "the prompt wants all that is left"
    run_all(engine)
    assert END < VOCAB
