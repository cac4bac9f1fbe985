# SPDX-License-Identifier: Apache-2.0
"""What the engine promises about answers: the same tokens whatever the cache, batch, faults and aborts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paged_language_model import (
    END,
    VOCAB,
    PagedHashModel,
    greedy_reference,
    make_engine,
    next_logits,
    run_all,
)
from told_deltas import collect_outputs

from radixkv.errors import (
    ContextLengthExceededError,
    EngineOverloadedError,
    InvalidRequestError,
)
from radixkv.sampling.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def assert_nothing_held(engine) -> None:
    engine.check()
    stats = engine.cache.stats
    assert stats.held_blocks == 0
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks


@pytest.mark.parametrize("budget", [1, 7, 16, 64, 512])
def test_greedy_output_does_not_depend_on_chunking_or_cache_state(budget):
    engine, _ = make_engine(budget=budget, num_blocks=128)
    prompts = [prompt(1, 30), prompt(2, 61), prompt(1, 30) + prompt(3, 5), prompt(2, 61)[:40], prompt(4, 1)]
    expected = [greedy_reference(p, 12) for p in prompts]
    for _ in ("cold", "hot"):
        ids = [engine.add_request(p, GREEDY) for p in prompts]
        outputs = run_all(engine)
        assert [outputs[i].outputs[0].token_ids for i in ids] == expected
    for p, tokens in zip(prompts, expected, strict=True):  # one at a time
        request_id = engine.add_request(p, GREEDY)
        output = run_all(engine)[request_id]
        assert output.outputs[0].token_ids == tokens
        assert output.num_cached_tokens == len(p) - 1
    assert_nothing_held(engine)


def test_a_burst_computes_each_distinct_prefix_token_once():
    engine, model = make_engine(num_blocks=600, budget=64)
    system = prompt(0, 150)
    prompts = [system + prompt(100 + i, 5 + i % 7) for i in range(24)]
    distinct = {tuple(p[: i + 1]) for p in prompts for i in range(len(p))}
    for p in prompts:
        engine.add_request(p, SamplingParams(temperature=0.0, max_tokens=1))
    run_all(engine)
    assert engine.stats().computed_prompt_tokens == len(distinct)
    assert model.num_computed == len(distinct)


def test_the_tokens_written_to_the_cache_are_those_it_did_not_hold():
    system = prompt(0, 150)
    prompts = [system + prompt(100 + i, 5 + i % 7) for i in range(6)]
    distinct = {tuple(p[: i + 1]) for p in prompts for i in range(len(p))}
    engine, _ = make_engine(num_blocks=600, budget=64)
    for written in (len(distinct), 0):
        for p in prompts:
            engine.add_request(p, GREEDY)
        assert sum(output.num_cache_write_tokens for output in run_all(engine).values()) == written
    scored = engine.add_request(prompts[0], SamplingParams(max_tokens=1, prompt_logprobs=0))
    output = run_all(engine)[scored]
    assert (output.num_cached_tokens, output.num_cache_write_tokens) == (0, 0), "computed, though cached"
    off, _ = make_engine(num_blocks=600, enable_prefix_caching=False)
    alone = off.add_request(prompts[0], GREEDY)
    assert run_all(off)[alone].num_cache_write_tokens == 0


def test_the_next_turn_computes_only_what_is_new():
    engine, _ = make_engine(num_blocks=200)
    first = prompt(5, 43)
    one = engine.add_request(first, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    answer = run_all(engine)[one].outputs[0].token_ids
    before = engine.stats().computed_prompt_tokens
    turn = first + answer + prompt(6, 10)
    two = engine.add_request(turn, GREEDY)
    output = run_all(engine)[two]
    # The last token of an answer is sampled, never computed: it is new to the second turn.
    assert output.num_cached_tokens == len(first) + len(answer) - 1
    assert engine.stats().computed_prompt_tokens - before == 10 + 1
    assert output.outputs[0].token_ids == greedy_reference(turn, 12)


def test_streams_under_forced_preemption_equal_streams_without():
    prompts = [prompt(i, 20 + 3 * i) for i in range(6)]
    params = [
        SamplingParams(temperature=t, max_tokens=40, seed=i, ignore_eos=True)
        for i, t in enumerate([0.0, 1.0, 0.7, 0.0, 1.3, 0.0])
    ]
    roomy, _ = make_engine(num_blocks=400)
    tight, _ = make_engine(num_blocks=14, max_model_len=112)
    results = []
    for engine in (roomy, tight):
        ids = [engine.add_request(p, q, stream=True) for p, q in zip(prompts, params, strict=True)]
        streamed: dict[str, list[int]] = {i: [] for i in ids}
        while engine.has_work:
            for delta in engine.step().deltas:
                streamed[delta.request_id] += delta.token_ids
            engine.check()
        results.append([streamed[i] for i in ids])
        assert_nothing_held(engine)
    assert roomy.stats().num_preemptions == 0
    assert tight.stats().num_preemptions > 0
    assert results[0] == results[1]


def test_samples_equal_single_requests_with_consecutive_seeds():
    engine, _ = make_engine(num_blocks=200)
    p = prompt(9, 50)
    together = engine.add_request(p, SamplingParams(n=4, seed=11, max_tokens=10, temperature=1.0))
    output = run_all(engine)[together]
    assert engine.stats().computed_prompt_tokens == len(p)
    for i, completion in enumerate(output.outputs):
        assert completion.index == i
        alone = engine.add_request(p, SamplingParams(seed=11 + i, max_tokens=10, temperature=1.0))
        assert run_all(engine)[alone].outputs[0].token_ids == completion.token_ids
    assert len({tuple(c.token_ids) for c in output.outputs}) > 1
    assert_nothing_held(engine)


def test_samples_share_their_prompt_blocks():
    engine, _ = make_engine(num_blocks=400, block_size=16, budget=2000, max_model_len=4000)
    engine.add_request(prompt(1, 1000), SamplingParams(n=8, seed=0, max_tokens=100, ignore_eos=True))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.cache.stats.held_blocks)
    assert most * 16 <= 1000 + 8 * (100 + 16)


def test_best_of_returns_the_samples_with_the_highest_mean_logprob():
    engine, _ = make_engine(num_blocks=200)
    p = prompt(3, 12)
    params = SamplingParams(n=2, best_of=5, seed=4, max_tokens=6, temperature=1.0, ignore_eos=True)
    request_id = engine.add_request(p, params)
    output = run_all(engine)[request_id]
    assert len(output.outputs) == 2
    assert output.outputs[0].logprobs is None, "logprobs were not asked for"

    def mean_logprob(tokens):
        context, total = list(p), 0.0
        for token in tokens:
            logits = next_logits(np.asarray(context)).astype(np.float64)
            total += logits[token] - np.log(np.exp(logits).sum())
            context.append(token)
        return total / len(tokens)

    singles = []
    for i in range(5):
        one = engine.add_request(
            p, SamplingParams(seed=4 + i, max_tokens=6, temperature=1.0, ignore_eos=True)
        )
        singles.append(run_all(engine)[one].outputs[0].token_ids)
    best = sorted(singles, key=mean_logprob, reverse=True)[:2]
    assert [c.token_ids for c in output.outputs] == best
    assert output.num_generated_tokens == 5 * 6, "what was generated to choose from counts"


@pytest.mark.parametrize("budget", [5, 16, 64])
@pytest.mark.parametrize("public", [False, True], ids=["private", "public"])
def test_prompt_logprobs_crossed_with_hot_caches_chunks_and_others(budget, public):
    """What is cached of the prompt, who decodes and who waits change no logprob, and nobody loses a hit."""
    engine, _ = make_engine(num_blocks=100, budget=budget, max_num_seqs=4)
    p = prompt(21, 45)
    if public:
        engine.cache.publish(p[:30])
    engine.add_request(p, GREEDY, namespace="other")  # the prompt is hot in both namespaces, or public
    engine.add_request(p, GREEDY, namespace="own")
    run_all(engine)
    for length in (45, 44, 33, 24, 17):  # ends in a partial block, in a cached one, at a block's end, ...
        asked_for = p[:length] if length % 2 else [*p[:length], 3]
        decoding = engine.add_request(prompt(22, 9), GREEDY, namespace="own")
        early = engine.step().finished  # when it has been answered before, it is known whole
        asked = engine.add_request(
            asked_for, SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=0), namespace="own"
        )
        beside = engine.add_request([*asked_for, 5, 6], GREEDY, namespace="own")
        outputs = run_all(engine) | {output.request_id: output for output in early}
        assert outputs[decoding].outputs[0].token_ids == greedy_reference(prompt(22, 9), 12)
        assert outputs[beside].outputs[0].token_ids == greedy_reference([*asked_for, 5, 6], 12)
        output = outputs[asked]
        assert output.num_cached_tokens == 0, "a prompt whose logits are wanted is computed"
        assert len(output.prompt_logprobs) == len(asked_for)
        for i, entry in enumerate(output.prompt_logprobs[1:], start=1):
            logits = next_logits(np.asarray(asked_for[:i])).astype(np.float64)
            expected = logits[asked_for[i]] - np.log(np.exp(logits).sum())
            assert entry.chosen.token_id == asked_for[i]
            assert entry.chosen.logprob == pytest.approx(expected, abs=1e-4)
    for namespace in ("own", "other"):
        again = engine.add_request(p, GREEDY, namespace=namespace)
        assert run_all(engine)[again].num_cached_tokens == len(p) - 1, "nobody's cache was emptied"
    assert_nothing_held(engine)


def test_prompt_logprobs_do_not_use_the_cache_and_do_not_spoil_it():
    engine, _ = make_engine(num_blocks=100, budget=16)
    p = prompt(8, 45)
    for _ in range(2):
        request_id = engine.add_request(
            p, SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2, logprobs=1)
        )
        output = run_all(engine)[request_id]
        assert output.outputs[0].token_ids == greedy_reference(p, 2)
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(p)
        for i in range(1, len(p)):
            logits = next_logits(np.asarray(p[:i])).astype(np.float64)
            expected = logits - np.log(np.exp(logits).sum())
            assert output.prompt_logprobs[i].chosen.token_id == p[i]
            assert output.prompt_logprobs[i].chosen.logprob == pytest.approx(expected[p[i]], abs=1e-4)
            assert output.prompt_logprobs[i].top[0].token_id == int(expected.argmax())
        assert output.outputs[0].logprobs[0].chosen.rank == 1
    again = engine.add_request(p, GREEDY)
    assert run_all(engine)[again].num_cached_tokens == len(p) - 1
    assert_nothing_held(engine)


def test_stop_tokens_min_tokens_and_lengths():
    engine, _ = make_engine(num_blocks=200)
    p = prompt(21, 9)
    tokens = greedy_reference(p, 30)
    free = engine.add_request(p, SamplingParams(temperature=0.0, max_tokens=30))
    stopped = engine.add_request(
        p, SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=[tokens[3]])
    )
    later = engine.add_request(
        p, SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=[tokens[3]], min_tokens=8)
    )
    outputs = run_all(engine)
    assert outputs[free].outputs[0].token_ids == tokens
    first = tokens.index(tokens[3])
    assert outputs[stopped].outputs[0].token_ids == tokens[: first + 1]
    assert outputs[stopped].outputs[0].stop_reason == tokens[3]
    assert outputs[stopped].outputs[0].finish_reason == "stop"
    assert len(outputs[later].outputs[0].token_ids) >= 8
    assert tokens[3] not in outputs[later].outputs[0].token_ids[:7]
    limited, _ = make_engine(num_blocks=10, block_size=8, max_model_len=20)
    request_id = limited.add_request(p, SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
    output = run_all(limited)[request_id].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (11, "length")


def test_end_token_ends_and_ignore_eos_goes_on():
    engine, _ = make_engine(num_blocks=400)
    for seed in range(40):
        p = prompt(seed, 4)
        reference = greedy_reference(p, 60)
        if reference[-1] == END and len(reference) < 50:
            break
    normal = engine.add_request(p, SamplingParams(temperature=0.0, max_tokens=60))
    on = engine.add_request(p, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    outputs = run_all(engine)
    assert outputs[normal].outputs[0].token_ids == reference
    assert (outputs[normal].outputs[0].finish_reason, outputs[normal].outputs[0].stop_reason) == (
        "stop",
        None,
    )
    assert len(outputs[on].outputs[0].token_ids) == 60


def test_bad_requests_are_refused_and_hold_nothing():
    engine, _ = make_engine(num_blocks=8, block_size=8, max_queue=2)
    for bad in ([], [1, VOCAB], [-1, 2]):
        with pytest.raises(InvalidRequestError):
            engine.add_request(bad, GREEDY)
    with pytest.raises(ContextLengthExceededError, match="64"):
        engine.add_request(prompt(1, 64), GREEDY)
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        engine.add_request([1], SamplingParams(logit_bias={VOCAB: 1.0}))
    for ends in (range(VOCAB), range(1, VOCAB)):  # the model's own end token among them, or besides
        with pytest.raises(InvalidRequestError, match="no token to choose"):
            engine.add_request([1], SamplingParams(min_tokens=1, stop_token_ids=ends))
    engine.add_request([1], GREEDY, request_id="a")
    with pytest.raises(InvalidRequestError, match="a"):
        engine.add_request([1], GREEDY, request_id="a")
    engine.add_request([2], GREEDY)
    with pytest.raises(EngineOverloadedError):
        engine.add_request([3], GREEDY)
    run_all(engine)
    assert_nothing_held(engine)


def test_a_failed_step_is_rolled_back_and_only_the_guilty_request_fails():
    system = prompt(1, 40)
    prompts = {"good-1": [*system, 5, 6], "bad": [*system, 7], "good-2": [*system, 8, 9]}
    model = PagedHashModel(
        64, 8, fail_if=lambda batch: any(e.request.request_id == "bad" for e in batch.entries)
    )
    engine, _ = make_engine(model=model)
    for request_id, p in prompts.items():
        engine.add_request(p, GREEDY, request_id=request_id)
    outputs = run_all(engine)
    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert "injected fault" in outputs["bad"].error
    for request_id in ("good-1", "good-2"):
        assert outputs[request_id].outputs[0].token_ids == greedy_reference(prompts[request_id], 12)
    assert_nothing_held(engine)
    # What the bad request contributed alone is not cached.
    assert engine.cache.match(prompts["bad"]).num_tokens <= len(system)


def test_a_passing_fault_fails_nobody():
    failures = iter([i in (0, 9, 20) for i in range(1000)])
    model = PagedHashModel(64, 8, fail_if=lambda batch: next(failures))
    engine, _ = make_engine(model=model)
    prompts = [prompt(i, 20) for i in range(4)]
    ids = [engine.add_request(p, GREEDY) for p in prompts]
    outputs = run_all(engine)
    assert [outputs[i].outputs[0].token_ids for i in ids] == [greedy_reference(p, 12) for p in prompts]
    assert_nothing_held(engine)


def test_nan_logits_end_that_request_alone_and_are_not_cached():
    model = PagedHashModel(64, 8, nan_for={"sick"})
    engine, _ = make_engine(model=model)
    healthy, sick = prompt(1, 30), prompt(2, 30)
    engine.add_request(healthy, GREEDY, request_id="well")
    engine.add_request(sick, GREEDY, request_id="sick")
    outputs = run_all(engine)
    assert outputs["sick"].outputs[0].finish_reason == "error"
    assert outputs["well"].outputs[0].token_ids == greedy_reference(healthy, 12)
    assert engine.cache.match(sick).num_tokens == 0
    assert_nothing_held(engine)


def test_timeout_ends_a_request_within_a_step():
    now = [0.0]
    engine, _ = make_engine(clock=lambda: now[0], request_timeout_s=5.0)
    engine.add_request(prompt(1, 20), SamplingParams(max_tokens=1000, ignore_eos=True), request_id="slow")
    engine.step()
    now[0] = 6.0
    result = engine.step()
    assert [output.outputs[0].finish_reason for output in result.finished] == ["error"]
    assert "request_timeout_s" in result.finished[0].error
    assert_nothing_held(engine)


def test_aborting_who_computes_a_shared_prompt_does_not_hang_the_others():
    engine, _ = make_engine(budget=16, num_blocks=64)
    system = prompt(0, 100)
    engine.add_request([*system, 1], GREEDY, request_id="first")
    engine.add_request([*system, 2], GREEDY, request_id="second")
    engine.step()
    engine.step()
    assert engine.scheduler.num_waiting == 1
    engine.abort("first")
    outputs = run_all(engine)
    assert outputs["second"].outputs[0].token_ids == greedy_reference([*system, 2], 12)
    assert_nothing_held(engine)


def test_prefix_caching_off_gives_the_same_answers():
    engine, model = make_engine(enable_prefix_caching=False, num_blocks=200)
    p = prompt(2, 40)
    for _ in range(2):
        ids = [engine.add_request(p, GREEDY) for _ in range(3)]
        outputs = run_all(engine)
        assert all(outputs[i].outputs[0].token_ids == greedy_reference(p, 12) for i in ids)
        assert all(outputs[i].num_cached_tokens == 0 for i in ids)
    assert model.num_computed >= 6 * len(p)
    assert_nothing_held(engine)


def test_a_prompt_that_the_pool_does_not_hold_is_refused_with_that_reason():
    engine, _ = make_engine(num_blocks=4, block_size=8, max_model_len=64)
    with pytest.raises(
        ContextLengthExceededError, match=r"pool of 4 blocks, which hold 32 of the 64 tokens .*--num-blocks"
    ):
        engine.add_request(prompt(1, 32), GREEDY)
    short, _ = make_engine(num_blocks=40, block_size=8, max_model_len=32)
    with pytest.raises(ContextLengthExceededError, match="maximum context length is 32"):
        short.add_request(prompt(1, 32), GREEDY)


def test_namespaces_do_not_share():
    engine, _ = make_engine(num_blocks=100)
    p = prompt(2, 40)
    for namespace in ("a", ("a", "b"), "b"):
        request_id = engine.add_request(p, GREEDY, namespace=namespace)
        assert run_all(engine)[request_id].num_cached_tokens == 0


@st.composite
def workloads(draw):
    num_roots = draw(st.integers(1, 3))
    requests = []
    for i in range(draw(st.integers(1, 10))):
        root = prompt(draw(st.integers(0, num_roots - 1)), draw(st.integers(1, 40)))
        tail = draw(st.lists(st.integers(1, 3), max_size=8))
        requests.append(
            {
                "prompt": root + tail,
                "n": draw(st.sampled_from([1, 1, 1, 2, 3])),
                "max_tokens": draw(st.integers(1, 20)),
                "arrival": draw(st.integers(0, 12)),
                "streamed": draw(st.booleans()),
                "abort": draw(st.sampled_from([None, None, None, 1, 3, 9])),
                "priority": draw(st.integers(0, 2)),
                "id": f"r{i}",
            }
        )
    return {
        "requests": requests,
        "budget": draw(st.sampled_from([3, 8, 16, 50, 128])),
        "cap": draw(st.sampled_from([None, 5, 20])),
        "num_blocks": draw(st.sampled_from([10, 14, 24, 80])),
        "policy": draw(st.sampled_from(["prefix", "fcfs", "priority", "fair"])),
        "faults": draw(st.sets(st.integers(0, 30), max_size=2)),
        "overtake": draw(st.sampled_from([0, 1, 32])),
    }


@given(workloads())
def test_any_workload_gives_reference_answers_and_leaks_nothing(work):
    count = iter(range(10**9))
    model = PagedHashModel(work["num_blocks"], 8, fail_if=lambda batch: next(count) in work["faults"])
    engine, _ = make_engine(
        model=model,
        num_blocks=work["num_blocks"],
        budget=work["budget"],
        max_tokens_per_request=work["cap"],
        scheduling_policy=work["policy"],
        max_overtake=work["overtake"],
        max_model_len=80,
    )
    outputs, deltas, aborted = {}, [], set()
    step = 0
    while engine.has_work or step <= 12:
        for r in work["requests"]:
            if r["arrival"] == step:
                params = SamplingParams(temperature=0.0, n=r["n"], max_tokens=r["max_tokens"])
                options = {"request_id": r["id"], "priority": r["priority"], "stream": r["streamed"]}
                engine.add_request(r["prompt"], params, **options)
            if r["abort"] is not None and r["arrival"] + r["abort"] == step and r["id"] not in outputs:
                engine.abort(r["id"])
                aborted.add(r["id"])
        result = engine.step()
        engine.check()
        deltas += result.deltas
        outputs.update({output.request_id: output for output in result.finished})
        step += 1
        assert step < 3000, "the engine does not come to an end"
    streamed = collect_outputs(deltas)
    assert set(streamed) == {r["id"] for r in work["requests"] if r["streamed"]}
    assert not set(streamed) & set(outputs), "told either way, never both"
    outputs |= streamed
    for r in work["requests"]:
        expected = greedy_reference(r["prompt"], min(r["max_tokens"], 80 - len(r["prompt"])))
        for completion in outputs[r["id"]].outputs:
            if completion.finish_reason == "abort":
                assert r["id"] in aborted
                assert completion.token_ids == expected[: len(completion.token_ids)]
            elif completion.finish_reason == "error":
                # Failed in company, then alone: only two faults can do that.
                assert len(work["faults"]) == 2, outputs[r["id"]].error
            else:
                assert completion.token_ids == expected
    assert_nothing_held(engine)


def test_a_kept_match_survives_a_split_of_the_block_it_copies_from():
    """Waiting requests keep their matches; an admission before them may split the node they end in."""
    engine, _ = make_engine(num_blocks=100, max_num_seqs=1)
    stem = prompt(1, 16)
    first, second = stem + prompt(2, 5), stem + prompt(2, 5) + prompt(3, 20)
    for p in (first, second):
        engine.add_request(p, GREEDY)
        run_all(engine)
    ids = [engine.add_request(p, GREEDY) for p in (first, second)]
    outputs = run_all(engine)
    for p, request_id in zip((first, second), ids, strict=True):
        assert outputs[request_id].outputs[0].token_ids == greedy_reference(p, 12)
