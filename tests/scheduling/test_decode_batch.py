# SPDX-License-Identifier: Apache-2.0
"""Decodes that write into a block they have: the cache is called once a block, and nobody can tell."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paged_language_model import PagedHashModel, greedy_reference, make_engine, run_all

from radixkv.cache.lease import Lease
from radixkv.sampling.sampling_params import SamplingParams

PROMPT = [(7 * i) % 90 + 1 for i in range(21)]


def decoding(num_steps, prompts=(PROMPT,), **options):
    """An engine some steps into the decoding of its requests, and what each will generate."""
    options.setdefault("num_blocks", 200)
    options.setdefault("speculation", "off")  # drafts are computed, too: here every token is counted
    engine, model = make_engine(**options)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(prompt, params, request_id=f"r{i}")
    for _ in range(num_steps):
        engine.step()
        engine.check()
    return engine, model


@pytest.fixture
def calls(monkeypatch):
    """How often leases are appended to."""
    made = []
    append = Lease.append
    monkeypatch.setattr(
        Lease, "append", lambda lease, tokens: (made.append(lease.id), append(lease, tokens))[1]
    )
    return made


def test_the_cache_is_called_once_a_block_and_request(calls):
    engine, _ = decoding(4, [PROMPT, PROMPT[3:], PROMPT[9:]])
    calls.clear()
    for _ in range(32):  # four blocks of 8 tokens
        engine.step()
    assert len(calls) == 3 * 4


@pytest.mark.parametrize("num_steps", range(3, 20))
def test_a_prompt_that_goes_on_with_what_another_generated_shares_all_of_it(num_steps):
    engine, model = decoding(num_steps)
    tokens = engine.scheduler.running[0].tokens().tolist()
    before = model.num_computed
    params = SamplingParams(temperature=0.0, max_tokens=1)
    engine.add_request([*tokens, 5, 6, 7], params, request_id="follower")
    result = engine.step()
    engine.check()
    follower = next(output for output in result.finished if output.request_id == "follower")
    assert follower.num_cached_tokens == len(tokens)  # the token computed in this very step included
    assert model.num_computed - before == 1 + 3


@pytest.mark.parametrize("num_steps", range(3, 20))
def test_an_aborted_decode_leaves_all_it_computed(num_steps):
    engine, _ = decoding(num_steps)
    tokens = engine.scheduler.running[0].tokens().tolist()
    engine.abort("r0")
    engine.check()
    assert engine.cache.match(tokens).num_tokens == len(tokens) - 1
    assert engine.cache.stats.held_blocks == 0


@pytest.mark.parametrize("bad_step", range(2, 14))
def test_a_failed_step_takes_back_its_own_token_only(bad_step):
    count = iter(range(10**6))
    model = PagedHashModel(200, 8, fail_if=lambda batch: next(count) == bad_step)
    engine, _ = make_engine(model=model, num_blocks=200)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    for i in range(3):
        engine.add_request(PROMPT[i:], params, request_id=f"r{i}")
    outputs = run_all(engine)
    computed = sum(
        len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1 for output in outputs.values()
    )
    for output in outputs.values():
        assert output.outputs[0].token_ids == greedy_reference(output.prompt_token_ids, 20)
    # The step that failed is computed again for each; a resumed request computes its last token at least.
    assert model.num_computed <= computed + 3 + sum(len(PROMPT[i:]) for i in range(3)) * (bad_step < 3)


@pytest.mark.parametrize(("first", "second"), [(1, 9), (9, 24), (10, 20)])
def test_tokens_copied_from_a_failed_step_are_not_kept(first, second):
    """The first step computes both prompts; the second one's block begins with copies of the first one's."""
    count = iter(range(10**6))
    model = PagedHashModel(10, 8, fail_if=lambda batch: next(count) == 0)
    engine, _ = make_engine(model=model, num_blocks=10, budget=max(3, first + 2))
    prompt = [(11 * i) % 90 + 1 for i in range(second)]
    params = SamplingParams(temperature=0.0, max_tokens=4)
    ids = [engine.add_request(prompt[:n], params) for n in (first, second)]
    outputs = run_all(engine)
    for n, request_id in zip((first, second), ids, strict=True):
        assert outputs[request_id].outputs[0].token_ids == greedy_reference(prompt[:n], 4)


@pytest.mark.parametrize("first", range(13, 19, 2))
@pytest.mark.parametrize("bad_step", [1, 2])
def test_nothing_of_a_failed_step_is_cached_where_one_prompt_copies_from_another(first, bad_step):
    for second in range(first, first + 4):
        count = iter(range(10**6))
        model = PagedHashModel(24, 8, fail_if=lambda batch, count=count: next(count) == bad_step)
        engine, _ = make_engine(model=model, num_blocks=24, budget=24, max_tokens_per_request=16)
        ids = [engine.add_request(PROMPT[:n], SamplingParams(max_tokens=1)) for n in (first, second)]
        outputs = run_all(engine)
        assert [outputs[i].error for i in ids] == [None, None]


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 30), st.integers(0, 25)), min_size=1, max_size=8),
    st.sampled_from([16, 20, 30, 100]),
    st.booleans(),
)
def test_prompts_made_of_running_outputs_under_any_pressure(plan, num_blocks, caching):
    """Followers take up what others have generated so far, blocks are scarce, and all answers are right."""
    engine, _ = make_engine(num_blocks=num_blocks, budget=24, max_model_len=90, enable_prefix_caching=caching)
    prompts, outputs, step = {}, {}, 0
    pending = sorted(plan)
    while engine.has_work or pending:
        while pending and pending[0][0] <= step:
            _, length, more = pending.pop(0)
            running = engine.scheduler.running
            prompt = running[more % len(running)].tokens().tolist() if running else PROMPT[:length]
            prompt = [*prompt, *([3] * (more % 4))][:60]
            request_id = engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=25))
            prompts[request_id] = prompt
        outputs.update({output.request_id: output for output in engine.step().finished})
        engine.check()
        step += 1
        assert step < 2000, "the engine does not come to an end"
    for request_id, prompt in prompts.items():
        assert outputs[request_id].outputs[0].token_ids == greedy_reference(prompt, 25)
    assert engine.cache.stats.held_blocks == 0
