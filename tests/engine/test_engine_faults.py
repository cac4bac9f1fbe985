# SPDX-License-Identifier: Apache-2.0
"""Faults: the guilty request ends with an error, the others get their answers, and nothing leaks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from paged_language_model import VOCAB, PagedHashModel, greedy_reference, make_engine, run_all
from told_deltas import collect_outputs

from radixkv.entrypoints.beam_search import BeamSearchParams
from radixkv.entrypoints.llm import LLM
from radixkv.errors import InvalidRequestError
from radixkv.sampling.logits_processors import CountPenalty, MinTokens
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.sampling.sampling_state import SamplingState

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)

pytestmark = pytest.mark.injects_faults


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def assert_nothing_held(engine) -> None:
    engine.check()
    assert engine.cache.stats.held_blocks == 0
    assert not engine.requests


@pytest.mark.parametrize("caches", [True, False])
def test_a_request_whose_later_chunk_fails_ends_though_nothing_of_its_first_is_kept(caches: bool) -> None:
    """Its first chunk comes through each time that it runs alone; that clears it of nothing."""

    def fails(batch: Any) -> bool:
        return any(entry.request.request_id == "bad" and entry.end > 20 for entry in batch.entries)

    engine, _ = make_engine(
        model=PagedHashModel(64, 8, fail_if=fails), budget=16, enable_prefix_caching=caches
    )
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1)
    engine.add_request(prompt(1, 30), params, request_id="bad")
    engine.add_request(prompt(2, 9), GREEDY, request_id="good")
    outputs = run_all(engine, max_steps=200)
    assert outputs["bad"].error_code == "step_failed"
    assert outputs["good"].outputs[0].token_ids == greedy_reference(prompt(2, 9), 12)
    assert_nothing_held(engine)


class FailOnce:
    """Stands in for a method; the call of the given number raises, before or after the method has run."""

    def __init__(self, method: Any, call: int, error: BaseException, *, after: bool = False) -> None:
        self.method, self.call, self.error, self.after = method, call, error, after
        self.calls = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == self.call and not self.after:
            raise self.error
        result = self.method(*args, **options)
        if self.calls == self.call:
            raise self.error
        return result


@pytest.mark.parametrize(
    "method", ["acquire", "match", "is_current", "available_blocks", "_commit", "_release"]
)
@pytest.mark.parametrize(
    ("call", "error"),
    [
        pytest.param(call, error("broken"), marks=() if i == j else pytest.mark.nightly)
        for i, call in enumerate((1, 3, 6))
        for j, error in enumerate((AssertionError, KeyError, RuntimeError))
    ],
)
def test_a_fault_in_the_cache_costs_nobody_their_answer(monkeypatch, method, call, error):
    engine, _ = make_engine(num_blocks=40, budget=24, max_model_len=120)
    prompts = [prompt(i % 4, 20 + i) for i in range(7)]
    if method.startswith("_"):
        from radixkv.cache.lease import Lease

        name = method.removeprefix("_")
        broken = FailOnce(getattr(Lease, name), call, error, after=name == "commit")
        monkeypatch.setattr(Lease, name, lambda *args, **options: broken(*args, **options))
    else:
        broken = FailOnce(getattr(engine.cache, method), call, error)
        monkeypatch.setattr(engine.cache, method, broken)
    params = [
        SamplingParams(temperature=float(i % 2), seed=i, max_tokens=12, n=1 + i % 3, ignore_eos=True)
        for i in range(7)
    ]
    ids = [
        engine.add_request(p, q, stream=i % 3 > 0)
        for i, (p, q) in enumerate(zip(prompts, params, strict=True))
    ]
    deltas = []
    outputs = {}
    for _ in range(2000):
        if not engine.has_work:
            break
        result = engine.step()
        engine.check()
        deltas += result.deltas
        outputs.update({output.request_id: output for output in result.finished})
    outputs |= collect_outputs(deltas)
    assert broken.calls >= call, "the fault did not happen: a weak test"
    assert engine.stats().num_rebuilds == 1
    healthy, _ = make_engine(num_blocks=400, budget=512)
    for p, q, request_id in zip(prompts, params, ids, strict=True):
        alone = healthy.add_request(p, q)
        reference = run_all(healthy, check=False)[alone]
        for got, wanted in zip(outputs[request_id].outputs, reference.outputs, strict=True):
            assert got.token_ids == wanted.token_ids, "each token is delivered once"
    assert_nothing_held(engine)


def test_a_request_that_breaks_the_scheduler_each_time_ends_alone(monkeypatch):
    engine, _ = make_engine(num_blocks=80)
    from radixkv import PrefixCache

    acquire = PrefixCache.acquire

    def poisoned(self, token_ids, *args, **options):
        assert int.from_bytes(token_ids.data[:4], "little") != 66, "poison"
        return acquire(self, token_ids, *args, **options)

    monkeypatch.setattr(PrefixCache, "acquire", poisoned)
    good = [[1 + i, *prompt(i, 20)] for i in range(3)]
    ids = [engine.add_request(p, GREEDY) for p in good]
    bad = engine.add_request([66, 1, 2], GREEDY)
    outputs = run_all(engine)
    assert outputs[bad].outputs[0].finish_reason == "error"
    assert "poison" in outputs[bad].error
    assert [outputs[i].outputs[0].token_ids for i in ids] == [greedy_reference(p, 12) for p in good]
    assert_nothing_held(engine)


def test_listeners_and_settings_survive_a_rebuild():
    engine, _ = make_engine(num_blocks=40, eviction_policy="benchmarks.classic_policies:SLRU")
    events = []
    engine.cache.subscribe(events.append)
    engine.add_request(prompt(1, 30), GREEDY)
    engine.step()
    before = engine.cache
    engine.cache.match = FailOnce(engine.cache.match, 1, AssertionError("broken"))
    engine.add_request(prompt(2, 30), GREEDY)
    run_all(engine)
    assert engine.cache is not before
    assert engine.cache.policy.name == "slru"
    count = len(events)
    engine.add_request(prompt(3, 30), GREEDY)
    run_all(engine)
    assert len(events) > count
    assert [event.sequence for event in events] == sorted(event.sequence for event in events)


def test_a_sampler_fault_changes_no_sample(monkeypatch):
    """A step that fails while it samples is run again: nobody's random stream has moved on."""
    p = prompt(1, 20)
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=10, ignore_eos=True) for i in range(4)]
    results = []
    for fail in (False, True):
        engine, _ = make_engine(num_blocks=80)
        ids = [engine.add_request(p, q) for q in params]
        with monkeypatch.context() as patch:
            if fail:
                broken = FailOnce(SamplingState.draw, 14, RuntimeError("broken"))
                patch.setattr(SamplingState, "draw", lambda self, ahead=0, broken=broken: broken(self, ahead))
            outputs = run_all(engine)
        results.append([outputs[i].outputs[0].token_ids for i in ids])
    assert results[0] == results[1]


class Stuttering(PagedHashModel):
    """Gives infinite or NaN logits for one sample once it is so long."""

    def __init__(self, value: float, length: int, at_least: int, **options: Any) -> None:
        super().__init__(100, 8, **options)
        self.value, self.length, self.seen, self.at_least = value, length, 0, at_least

    def execute(self, batch: Any) -> torch.Tensor:
        logits = super().execute(batch)
        row = 0
        for entry in batch.entries:
            if entry.samples:
                if entry.request.num_tokens == self.length and entry.request.index >= self.at_least:
                    logits[row, 3] = self.value
                    self.seen += 1
                row += 1
        return logits


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_in_one_of_several_samples_ends_that_request_alone(value, temperature):
    model = Stuttering(value, 24, at_least=2)
    engine, _ = make_engine(model=model, num_blocks=100)
    sick = prompt(1, 20)
    other = prompt(2, 30)
    params = SamplingParams(n=3, seed=5, temperature=temperature, max_tokens=12, ignore_eos=True)
    bad = engine.add_request(sick, params)
    good = engine.add_request(other, GREEDY)
    outputs = run_all(engine)
    assert model.seen == 1
    assert [completion.finish_reason for completion in outputs[bad].outputs] == ["error"] * 3
    assert outputs[bad].error_code == "nan_logits"
    assert outputs[good].outputs[0].token_ids == greedy_reference(other, 12)
    assert engine.cache.match(sick).num_tokens == 0, "what it computed must not be cached"
    assert_nothing_held(engine)


def test_nan_in_a_beam_search_ends_it():
    engine, _ = make_engine(model=Stuttering(float("nan"), 24, at_least=0), num_blocks=100)
    params = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True)
    sick, good = LLM.from_engine(engine).beam_search([prompt(1, 20), prompt(2, 30)], params)
    assert sick.error_code == "nan_logits"
    assert [completion.finish_reason for completion in sick.outputs] == ["error"]
    assert good.error is None
    assert [len(beam.token_ids) for beam in good.outputs] == [10] * 3
    assert_nothing_held(engine)


class BrokenTokenizer:
    """Fails on one token, at encoding, decoding, at the end of a stream, or when it names a token."""

    def __init__(self, where: str, error: BaseException | None = None) -> None:
        self.where = where
        self.error = error or RuntimeError(f"can't {where}")
        self.num_streams = 0  # only the first one is broken

    def encode(self, text: str, **options: bool) -> list[int]:
        if self.where == "encode":
            raise self.error
        return [1 + ord(c) % (VOCAB - 1) for c in text]

    def token_text(self, token_id: int) -> str:
        if self.where == "token_text":
            raise self.error
        return f"<{token_id}>"

    def decode(self, token_ids: list[int]) -> str:
        if self.where == "decode":
            raise self.error
        return "".join(f"<{token}>" for token in token_ids)

    def stream(self, skip_special_tokens: bool = True, *, kept: object = ()) -> BrokenTokenizer:
        self.num_streams += 1
        return self if self.num_streams == 1 else BrokenTokenizer("nowhere")

    def push(self, token_ids: list[int]) -> str:
        if self.where in ("push", "both"):
            raise self.error
        return "x"

    def finish(self) -> str:
        if self.where in ("finish", "both"):
            raise self.error
        return ""


def with_tokenizer(where: str, error: BaseException | None = None, **options: Any) -> Any:
    return make_engine(**{"num_blocks": 80, "tokenizer": BrokenTokenizer(where, error), **options})[0]


@pytest.mark.parametrize("where", ["push", "finish", "both", "token_text"])
@pytest.mark.parametrize("end", ["runs", "abort"])
def test_a_tokenizer_fault_ends_that_request_alone(where, end):
    engine = with_tokenizer(where)
    bad = engine.add_request(
        prompt(1, 20), SamplingParams(temperature=0.0, max_tokens=5, logprobs=1, prompt_logprobs=1)
    )
    good = engine.add_request(prompt(2, 30), GREEDY)
    if end == "abort":
        engine.abort(bad)
        outputs = {output.request_id: output for output in engine.take_result().finished}
        outputs |= run_all(engine)
        assert outputs[bad].outputs[0].finish_reason == "abort"
    else:
        outputs = run_all(engine)
        assert outputs[bad].error_code == "detokenization_failed"
    assert outputs[good].outputs[0].token_ids == greedy_reference(prompt(2, 30), 12)
    assert engine.stats().num_rebuilds == 0
    assert_nothing_held(engine)


class Panic(BaseException):
    """What a Rust extension raises when it panics: not an `Exception`."""


@pytest.mark.parametrize("where", ["push", "finish", "both", "token_text"])
def test_a_panic_while_decoding_ends_that_request_alone(where):
    engine = with_tokenizer(where, Panic("a panic in the decoder"))
    bad = engine.add_request(
        prompt(1, 20), SamplingParams(temperature=0.0, max_tokens=5, logprobs=1, prompt_logprobs=1)
    )
    good = engine.add_request(prompt(2, 30), GREEDY)
    outputs = run_all(engine)
    assert outputs[bad].error_code == "detokenization_failed"
    assert "a panic in the decoder" in outputs[bad].error
    assert outputs[good].outputs[0].token_ids == greedy_reference(prompt(2, 30), 12)
    assert engine.stats().num_rebuilds == 0
    assert_nothing_held(engine)


def test_a_panic_while_encoding_refuses_the_prompt():
    engine = with_tokenizer("encode", Panic("a panic in the encoder"))
    with pytest.raises(InvalidRequestError, match="a panic in the encoder"):
        engine.add_request("hello", GREEDY)
    assert not engine.has_work


@pytest.mark.parametrize("method", ["accept", "draw", "apply"])
@pytest.mark.parametrize("error", [RuntimeError("broken"), Panic("broken")], ids=["exception", "panic"])
def test_a_request_whose_sampling_state_breaks_ends_alone(monkeypatch, method, error):
    engine, _ = make_engine(num_blocks=80)
    owner = CountPenalty if method == "apply" else SamplingState
    whole = getattr(owner, method)

    def breaks(state: SamplingState) -> bool:
        return state is sick.sampling_state and state.num_generated == 3

    def broken(*args: Any) -> Any:
        if breaks(sick.sampling_state if method == "apply" else args[0]):
            raise error
        return whole(*args)

    monkeypatch.setattr(owner, method, broken)
    others = [prompt(i, 20) for i in range(2, 5)]
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True, presence_penalty=0.5)
    bad = engine.add_request(prompt(1, 20), params)
    sick = engine.requests[0].samples[0]
    good = [engine.add_request(p, GREEDY) for p in others]
    outputs = run_all(engine)
    assert outputs[bad].outputs[0].finish_reason == "error"
    assert "broken" in outputs[bad].error
    assert [outputs[i].outputs[0].token_ids for i in good] == [greedy_reference(p, 12) for p in others]
    assert engine.stats().num_rebuilds == 0
    assert_nothing_held(engine)


def test_a_panic_in_the_model_is_blamed_on_the_request_that_causes_it():
    class Panicking(PagedHashModel):
        def execute(self, batch: Any) -> torch.Tensor:
            if any(entry.request.request_id == "bad" for entry in batch.entries):
                raise Panic("a panic in a kernel")
            return super().execute(batch)

    engine, _ = make_engine(num_blocks=80, model=Panicking(80, 8))
    prompts = [prompt(i, 20) for i in range(3)]
    ids = [engine.add_request(p, GREEDY) for p in prompts]
    engine.add_request(prompt(9, 20), GREEDY, request_id="bad")
    outputs = run_all(engine)
    assert outputs["bad"].error_code == "step_failed"
    assert "a panic in a kernel" in outputs["bad"].error
    assert [outputs[i].outputs[0].token_ids for i in ids] == [greedy_reference(p, 12) for p in prompts]
    assert_nothing_held(engine)


def test_a_panic_in_the_cache_costs_nobody_their_answer():
    engine, _ = make_engine(num_blocks=80)
    prompts = [prompt(i, 20) for i in range(4)]
    ids = [engine.add_request(p, GREEDY) for p in prompts]
    engine.cache.acquire = FailOnce(engine.cache.acquire, 2, Panic("broken"))
    outputs = run_all(engine)
    assert engine.stats().num_rebuilds == 1
    assert [outputs[i].outputs[0].token_ids for i in ids] == [greedy_reference(p, 12) for p in prompts]
    assert_nothing_held(engine)


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["model", "sampler", "decoder", "cache"])
def test_an_interrupt_passes_through_and_leaves_an_engine_that_can_go_on(monkeypatch, ending, where):
    model = PagedHashModel(80, 8)
    engine = with_tokenizer("nowhere", model=model)
    prompts = [prompt(i, 20) for i in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=2)
    ids = [engine.add_request(p, params) for p in prompts]
    target, name = {
        "model": (model, "execute"),
        "sampler": (MinTokens, "apply"),
        "decoder": (BrokenTokenizer, "push"),
        "cache": (engine.cache, "acquire"),
    }[where]
    broken = FailOnce(getattr(target, name), 2, ending())
    with monkeypatch.context() as patch:
        patch.setattr(target, name, lambda *args, **options: broken(*args, **options))
        outputs = {}

        def until_interrupted() -> None:
            for _ in range(100):
                result = engine.step()
                outputs.update({output.request_id: output for output in result.finished})

        with pytest.raises(ending):
            until_interrupted()
        engine.check()
        outputs |= run_all(engine)
    assert [outputs[i].outputs[0].token_ids for i in ids] == [greedy_reference(p, 12) for p in prompts]
    assert_nothing_held(engine)
    again = [engine.add_request(p, params) for p in prompts]
    outputs = run_all(engine)
    assert [outputs[i].outputs[0].token_ids for i in again] == [greedy_reference(p, 12) for p in prompts]


def test_a_prompt_that_cannot_be_tokenised_is_refused():
    engine = with_tokenizer("encode")
    with pytest.raises(InvalidRequestError, match="can't encode"):
        engine.add_request("hello", GREEDY)
    assert not engine.has_work


@pytest.mark.parametrize("error", [None, Panic("a panic in the decoder")], ids=["exception", "panic"])
def test_a_beam_search_whose_output_cannot_be_decoded_fails_alone(error):
    engine = with_tokenizer("decode", error)
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    output = LLM.from_engine(engine).beam_search(prompt(1, 10), params)[0]
    assert output.error_code == "detokenization_failed"
    assert output.outputs[0].finish_reason == "error"
    assert_nothing_held(engine)


@pytest.mark.parametrize(
    "bad", [[1.5, 2], ["a"], [[1, 2]], [True, False], [2**70], [None], [1, -1]], ids=repr
)
def test_malformed_token_ids_are_refused(bad):
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError):
        engine.add_request(bad, GREEDY)
    assert not engine.has_work


def test_a_malformed_namespace_is_refused():
    engine, _ = make_engine()
    for bad in (5, ("a", 1), ["a"], None):
        with pytest.raises(InvalidRequestError):
            engine.add_request([1, 2], GREEDY, namespace=bad)
    assert not engine.has_work


def test_waiting_requests_time_out_too_and_keep_what_was_computed():
    now = [0.0]
    engine, _ = make_engine(clock=lambda: now[0], request_timeout_s=5.0, max_num_seqs=1, num_blocks=100)
    long = SamplingParams(max_tokens=1000, ignore_eos=True)
    engine.add_request(prompt(1, 20), long, request_id="runs")
    engine.add_request(prompt(2, 20), long, request_id="waits")
    engine.step()
    now[0] = 3.0
    engine.add_request(prompt(3, 20), GREEDY, request_id="later")
    engine.step()
    now[0] = 5.5
    result = engine.step()
    assert {output.request_id for output in result.finished} == {"runs", "waits"}
    assert {output.error_code for output in result.finished} == {"timeout"}
    outputs = run_all(engine)
    assert outputs["later"].outputs[0].token_ids == greedy_reference(prompt(3, 20), 12)
    assert engine.cache.match(prompt(1, 20)).num_tokens == 20
    assert_nothing_held(engine)


def test_an_abort_takes_effect_at_once_at_every_point():
    for steps in range(1, 14):
        engine, _ = make_engine(budget=16, num_blocks=40, max_model_len=100)
        samples = SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True)
        engine.add_request(prompt(1, 40), samples, request_id="a")
        best = SamplingParams(n=1, best_of=3, seed=1, max_tokens=6, ignore_eos=True)
        engine.add_request(prompt(1, 36), best, request_id="b")
        engine.add_request([*prompt(1, 40), 5], GREEDY, request_id="c")
        done = set()
        for _ in range(steps):
            done |= {output.request_id for output in engine.step().finished}
        for victim in ("a", "b"):
            engine.abort(victim)
            engine.abort(victim)
            engine.check()
        ended = engine.take_result().finished
        assert {output.request_id for output in ended} == {"a", "b"} - done
        outputs = run_all(engine)
        if "c" not in done:
            assert outputs["c"].outputs[0].token_ids == greedy_reference([*prompt(1, 40), 5], 12)
        assert_nothing_held(engine)
