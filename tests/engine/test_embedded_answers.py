# SPDX-License-Identifier: Apache-2.0
"""The embedded model's answers: token for token those of plain transformers, whatever cache and batch.

Everything greedy and in float32. The reference is `generate` of transformers on the same converted folder.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from radixkv import LLM, EngineConfig, SamplingParams
from radixkv.entrypoints.beam_search import BeamSearchParams
from radixkv.entrypoints.builder import engine_for_model
from radixkv.model.loading.loader import LoadedModel, load_model, pull

NEW_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)

SYSTEM = (
    "You are a careful assistant for the harbour of Lindholm. You answer questions about tides, berths, "
    "customs and the weather, always in whole sentences, and you name the source of every figure. "
)
STORY = (
    "The old lighthouse keeper climbed the {n} steps each evening, counted the ships on the horizon, and "
    "wrote their number into a ledger that nobody had read since the year {year}. "
)


def story(num_sentences: int, start: int = 0) -> str:
    return "".join(STORY.format(n=100 + i, year=1800 + i) for i in range(start, start + num_sentences))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(EngineConfig())


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(pull("smollm2-135m-instruct"), dtype=torch.float32).eval()


def make_llm(loaded: LoadedModel, **options: Any) -> LLM:
    options = {"num_blocks": 1024, "warm_up": "off", **options}
    return LLM.from_engine(engine_for_model(EngineConfig(**options), loaded))


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    tokenizer = loaded.tokenizer

    def chat(*turns: str, system: str | None = None) -> list[int]:
        messages = [{"role": "system", "content": system}] if system else []
        messages += [
            {"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(turns)
        ]
        return tokenizer.apply_chat_template(messages)

    turns = [
        "What is a berth?",
        "A berth is a place where a ship is moored.",
        "Who decides which ship gets one?",
    ]
    found = [
        tokenizer.encode("The"),
        tokenizer.encode("Once upon a time"),
        tokenizer.encode("def fibonacci(n):\n    "),
        chat("What is the capital of France?"),
        chat(turns[0], system=SYSTEM),
        chat(*turns, system=SYSTEM),
        chat(*turns, "The harbour master decides.", "And at night?", system=SYSTEM),
        chat("When is high tide?", system=SYSTEM * 6),
        chat("When is low tide?", system=SYSTEM * 6),
        chat("Please translate: Zürich, naïve, señor, Œuvre", system=SYSTEM * 6),
        chat("日本の首都はどこですか。"),
        chat("Напиши короткое стихотворение о море 🌊🚢"),
        tokenizer.encode("مرحبا بالعالم. ") * 3,
        tokenizer.encode(story(14) + "On the last page it said:"),
    ]
    assert len(found[-1]) > 512  # of several segments of attention, and of more than one chunk
    return found


@pytest.fixture(scope="module")
def largest_chunks(loaded: LoadedModel, prompts: list[list[int]]) -> tuple[LLM, list[list[int]]]:
    """An engine that computes all prompts in chunks of up to 512 tokens, and its first answers."""
    llm = make_llm(loaded, max_num_batched_tokens=512)
    return llm, token_ids(llm.generate(prompts, GREEDY))


@pytest.fixture(scope="module")
def expected(
    loaded: LoadedModel, reference: Any, prompts: list[list[int]], largest_chunks: tuple[LLM, list[list[int]]]
) -> list[list[int]]:
    """Answers of which transformers says that each token is the likeliest after those before it.

    That makes them what its greedy `generate` gives, for one forward pass instead of one a token.
    """
    answers = largest_chunks[1]
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer]), logits_to_keep=len(answer) + 1).logits[0]
        assert answer == logits[:-1].argmax(dim=1).tolist()
        ends = [token in loaded.eos_token_ids for token in answer]
        assert not any(ends[:-1])
        assert len(answer) == NEW_TOKENS or ends[-1]
    return answers


def token_ids(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("chunk", "num_prompts"),
    [
        *(pytest.param(size, count, marks=pytest.mark.nightly) for size, count in ((16, 13), (64, 14))),
        (512, 14),
    ],
)
def test_cold_and_hot_equal_transformers(loaded, prompts, expected, largest_chunks, chunk, num_prompts):
    """Small chunks are those of shorter prompts: more than 512 tokens are nine of 64."""
    prompts, expected = prompts[:num_prompts], expected[:num_prompts]
    if chunk == 512:
        llm, cold = largest_chunks
    else:
        llm = make_llm(loaded, max_num_batched_tokens=chunk)
        cold = token_ids(llm.generate(prompts, GREEDY))
    assert cold == expected
    hot = llm.generate(prompts, GREEDY)
    assert token_ids(hot) == expected
    assert all(out.num_cached_tokens == len(p) - 1 for out, p in zip(hot, prompts, strict=True))
    llm.engine.check()


def test_alone_and_eight_at_once_equal_transformers(loaded, prompts, expected):
    alone = make_llm(loaded, max_num_seqs=1)
    assert token_ids(alone.generate(prompts[:4], GREEDY)) == expected[:4]
    eight = make_llm(loaded, max_num_seqs=8, enable_prefix_caching=False)
    assert token_ids(eight.generate(prompts[:8], GREEDY)) == expected[:8]


def test_after_preemption_equal_transformers(loaded, prompts, expected):
    """A pool that holds some of the prompts, but not their outputs, which are longer than elsewhere."""
    chosen = [i for i, prompt in enumerate(prompts) if len(prompt) < 150 and len(expected[i]) == NEW_TOKENS]
    longer = replace(GREEDY, max_tokens=2 * NEW_TOKENS)
    needed = [-(-(len(prompts[i]) + longer.max_tokens) // 8) for i in chosen]
    llm = make_llm(loaded, num_blocks=max(needed) + 6, block_size=8, scheduling_policy="fcfs")
    outputs = llm.generate([prompts[i] for i in chosen], longer)
    assert [ids[:NEW_TOKENS] for ids in token_ids(outputs)] == [expected[i] for i in chosen]
    assert llm.engine.stats().num_preemptions > 0, "nothing was preempted: a weak test"
    llm.engine.check()
    assert llm.engine.cache.stats.held_blocks == 0


@pytest.mark.nightly
def test_a_burst_computes_the_shared_prompt_once(loaded):
    tokenizer = loaded.tokenizer
    system = (SYSTEM * 60)[:2600]
    prompts = [
        tokenizer.apply_chat_template(
            [
                {"role": "system", "content": system},
                {"role": "user", "content": f"{i}: what about berth {i * 7}?"},
            ]
        )
        for i in range(24)
    ]
    shared = next(i for i, column in enumerate(zip(*prompts, strict=False)) if len(set(column)) > 1)
    assert shared > 480
    distinct = {tuple(prompt[: i + 1]) for prompt in prompts for i in range(shared, len(prompt))}
    llm = make_llm(loaded)
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=2))
    assert llm.engine.stats().computed_prompt_tokens == shared + len(distinct)


def test_the_second_turn_computes_only_what_is_new(loaded):
    llm = make_llm(loaded)
    messages = [{"role": "system", "content": SYSTEM * 4}, {"role": "user", "content": "Say hello."}]
    first = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=16))[0]
    answer = first.outputs[0]
    before = llm.engine.stats().computed_prompt_tokens
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And goodbye."}]
    prompt = loaded.tokenizer.apply_chat_template(messages)
    known = [*first.prompt_token_ids, *answer.token_ids]
    assert prompt[: len(known)] == known, "the template does not repeat the answer as it was generated"
    second = llm.generate(prompt, GREEDY)[0]
    # All but the answer's last token, which was sampled and never computed.
    assert second.num_cached_tokens == len(known) - 1
    assert llm.engine.stats().computed_prompt_tokens - before == len(prompt) - len(known) + 1


@pytest.mark.nightly
def test_logprobs_agree_with_transformers(loaded, reference, prompts):
    prompt = prompts[5]
    llm = make_llm(loaded, max_num_batched_tokens=32)
    llm.generate(prompt, GREEDY)  # something to be not allowed to use
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=2)
    output = llm.generate(prompt, params)[0]
    tokens = [*prompt, *output.outputs[0].token_ids]
    with torch.inference_mode():
        logits = reference(torch.tensor([tokens])).logits[0].double()
    logprobs = torch.log_softmax(logits, dim=1).numpy()
    assert output.prompt_logprobs[0] is None
    positions = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert len(positions) == len(tokens) - 1
    for i, entry in enumerate(positions):
        assert entry.chosen.token_id == tokens[i + 1]
        assert entry.chosen.logprob == pytest.approx(logprobs[i, tokens[i + 1]], abs=1e-4)
        best = np.sort(logprobs[i])[::-1][: len(entry.top)]
        assert [top.logprob for top in entry.top] == pytest.approx(best.tolist(), abs=1e-4)
    assert len(positions[-1].top) == 3
    again = llm.generate(prompt, GREEDY)[0]
    assert again.num_cached_tokens == len(prompt) - 1, "prompt logprobs must not cost others their hits"


@pytest.mark.parametrize(
    ("width", "penalty", "early"), [pytest.param(3, 1.0, False, marks=pytest.mark.nightly), (4, 0.6, True)]
)
@pytest.mark.nightly
def test_beams_equal_transformers(loaded, reference, prompts, width, penalty, early):
    prompt = prompts[3]
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=12,
            do_sample=False,
            length_penalty=penalty,
            early_stopping=early,
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=0,
        )
    ends = loaded.eos_token_ids
    expected = []
    for row in out.sequences[:, len(prompt) :].tolist():
        cut = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        expected.append(row[:cut])
    llm = make_llm(loaded)
    params = BeamSearchParams(beam_width=width, max_tokens=12, length_penalty=penalty, early_stopping=early)
    outputs = llm.beam_search(prompt, params)[0].outputs
    assert [beam.token_ids for beam in outputs] == expected
    assert [beam.score for beam in outputs] == pytest.approx(out.sequences_scores.tolist(), abs=1e-4)
    most = len(prompt) + width * 11
    assert llm.engine.stats().computed_tokens <= most, "the prompt is computed once"
    assert llm.engine.cache.stats.held_blocks == 0
    llm.engine.check()


@pytest.mark.nightly
def test_a_seed_gives_the_same_sample_whatever_the_batch(loaded, prompts):
    llm = make_llm(loaded)
    params = [SamplingParams(temperature=0.9, top_p=0.9, seed=i, max_tokens=10) for i in range(6)]
    together = llm.generate(prompts[:6], params)
    alone = [llm.generate(p, q)[0] for p, q in zip(prompts[:6], params, strict=True)]
    assert token_ids(together) == token_ids(alone)


class LogitsRecorder:
    """Runs a runner's steps and keeps the logits of every sampled position."""

    def __init__(self, runner: Any) -> None:
        self._execute = runner.execute
        self.logits: dict[tuple[int, ...], torch.Tensor] = {}

    def execute(self, batch: Any) -> torch.Tensor:
        logits = self._execute(batch)
        sampled = [entry.request for entry in batch.entries if entry.samples]
        for request, row in zip(sampled, logits, strict=True):
            self.logits[tuple(request.tokens().tolist())] = row.clone()
        return logits


@pytest.mark.nightly
def test_deterministic_mode_gives_the_same_bits(prompts, monkeypatch):
    """Cold, hot, chunked, preempted, batched: every logit of every step is the same, bit for bit."""
    loaded = load_model(EngineConfig())  # deterministic mode may change the model: a copy of our own
    chosen = [prompts[i] for i in (0, 3, 4)]
    recorded: list[dict[tuple[int, ...], torch.Tensor]] = []

    def run(rounds: int = 1, **options: Any) -> Any:
        # Without guesses: a step has one row of logits for each request.
        fixed = {"deterministic": True, "speculation": "off", "num_blocks": 400}
        engine = engine_for_model(EngineConfig(**{**fixed, **options}), loaded)
        llm = LLM.from_engine(engine)
        for _ in range(rounds):
            recorder = LogitsRecorder(engine.runner)
            with monkeypatch.context() as patch:
                patch.setattr(engine.runner, "execute", recorder.execute)
                llm.generate(chosen, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
            recorded.append(recorder.logits)
        return engine.stats()

    run(rounds=2)  # cold, then hot
    run(max_num_batched_tokens=24)
    run(max_num_seqs=1)
    blocks = max(-(-(len(p) + 4) // 8) for p in chosen) + 2
    tight = run(num_blocks=blocks, block_size=8)
    assert tight.cache.evicted_blocks > 0
    first = recorded[0]
    assert len(first) == 4 * len(chosen)
    for other in recorded[1:]:
        assert other.keys() == first.keys()
        for key, row in other.items():
            assert torch.equal(row, first[key]), f"other bits after {len(key)} tokens"


def test_structured_answers_match_or_are_cut(loaded: LoadedModel) -> None:
    color = {"enum": ["red", "green", "blue"]}
    person = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    schemas = [color, person]
    outputs = make_llm(loaded).chat(
        [[{"role": "user", "content": "Invent one, as JSON."}] for _ in schemas],
        [
            SamplingParams(structured={"json": own}, n=2, temperature=1.0, seed=1, max_tokens=12)
            for own in schemas
        ],
    )
    assert {sample.finish_reason for sample in outputs[0].outputs} == {"stop"}
    for schema, output in zip(schemas, outputs, strict=True):
        for sample in output.outputs:
            if sample.finish_reason != "length":
                assert sample.finish_reason == "stop"
                jsonschema.validate(json.loads(sample.text), schema)
