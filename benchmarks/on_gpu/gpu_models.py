# SPDX-License-Identifier: Apache-2.0
"""Whole tiny models of every family on the GPU: the tokens of transformers' whole pass on the CPU, whether a
prompt is new, cached, beside others, goes on, or comes back after the pool was too small for all.

Random weights in float32, so that greedy tokens have no near ties. The configurations are the tests'. Experts
and states also run in bfloat16, the type that is served: there experts have other kernels, and only there are
their steps recorded. Each token must be nearly the likeliest by the float32 model over the same weights.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from benchmarks.gpu_parts import Report, Skip
from benchmarks.paged_bench import Sizes
from radixkv import LLM, SamplingParams

#: The tests' folder of tiny configurations.
SUPPORT = Path(__file__).resolve().parents[2] / "tests" / "support"
#: New tokens of each answer, and random prompts that push the others out.
ANSWER, OTHERS = 8, 6
_BLOCK = 16
#: What a configuration says that has experts.
_EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}
#: In bfloat16, most that a chosen token's logit may be below the largest one, in spreads of the logits, and
#: the share of tokens of which that is asked: an expert chosen by rounding changes an answer.
_GAP, _SHARE = 0.1, 0.8


def models(sizes: Sizes, report: Report, group: str, part: str = "1/1") -> None:
    """Check each family of a group, or every n-th: `part` is `i/n`.

    Raises:
        Skip: the tests are not beside the benchmarks.
    """
    if not SUPPORT.is_dir():
        raise Skip("the tests' tiny models are not here")
    sys.path[:0] = [str(SUPPORT), str(SUPPORT.parents[1])]
    if group == "adapters":
        check_adapters(sizes, report)
        return
    writers = families(group)
    check = check_bfloat16 if group == "bfloat16" else partial(check_family, states=group == "states")
    index, count = map(int, part.split("/"))
    names = list(writers)[: 1 if sizes.small else None][index - 1 :: count]
    for name in names:
        try:
            with tempfile.TemporaryDirectory() as folder:
                check(sizes, report, name, writers[name](Path(folder)))
        except Exception as error:
            # The next family may still tell something.
            report(model=name, ok=False, error=f"{type(error).__name__}: {str(error)[:400]}")


def families(group: str) -> dict[str, Callable[[Path], Path]]:
    """Return the writer of a tiny model to a folder, by name."""
    # The imports are of the tests, found by the path that `models` adds.
    from tiny_configs import FAMILIES, HYBRID_FAMILIES, SHAPES
    from tiny_models import save_tiny_model

    mixed = {name: own for name, own in {**FAMILIES, **SHAPES}.items() if _EXPERTS & own[1].keys()}
    groups = {"plain": FAMILIES, "shapes": SHAPES, "states": HYBRID_FAMILIES}
    names = (groups | {"bfloat16": mixed | HYBRID_FAMILIES})[group]
    return {name: partial(save_tiny_model, name=name) for name in names}


def check_family(sizes: Sizes, report: Report, name: str, folder: Path, *, states: bool) -> None:
    """One line: which of the ways to compute an answer gave other tokens than transformers."""
    # States are kept every 64 tokens: a prompt must be longer for a hit.
    long = 150 if states else 70
    first, other = tokens(long, 1), tokens(37, 2)
    prompts = [first, other, first[: long - 10] + other[:14]]
    model = whole_pass(folder)
    wanted = [greedy(model, prompt) for prompt in prompts]
    turn = first + wanted[0] + tokens(9, 3)
    wanted_turn = greedy(model, turn)
    del model
    llm = LLM(
        model=str(folder),
        device=sizes.device.type,
        dtype="float32",
        num_blocks=40,
        block_size=_BLOCK,
        max_num_batched_tokens=48,
        max_model_len=256,
        warm_up="off",
    )
    wrong: list[str] = []

    def compare(way: str, got: list[list[int]], expected: list[list[int]]) -> None:
        wrong.extend(f"{way} {i}" for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)

    try:
        compare("cold", [answers(llm, [prompt])[0] for prompt in prompts], wanted)
        before = llm.engine.cache.stats.hit_tokens
        compare("hot", [answers(llm, [prompt])[0] for prompt in prompts], wanted)
        cached = llm.engine.cache.stats.hit_tokens - before
        compare("together", answers(llm, prompts), wanted)
        compare("next turn", answers(llm, [turn]), [wanted_turn])
        for seed in range(OTHERS):
            answers(llm, [tokens(140, 10 + seed)])
        compare("evicted", answers(llm, prompts), wanted)
        llm.engine.cache.check()
        graphs = getattr(llm.engine.runner, "graphs", None)
        total = sum(map(len, prompts))
        floor = total - 64 * len(prompts) if states else total - (_BLOCK + 1) * len(prompts)
        report(
            model=name,
            ok=not wrong and cached >= floor,
            wrong=wrong,
            cached=cached,
            prompts=total,
            evicted=llm.engine.cache.stats.evicted_blocks,
            replayed=None if graphs is None else graphs.replayed,
        )
    finally:
        llm.close()


def check_bfloat16(sizes: Sizes, report: Report, name: str, folder: Path) -> None:
    """One line: how near the likeliest the chosen tokens are, and whether steps were recorded."""
    prompts = [tokens(150, seed) for seed in range(4)]
    llm = LLM(
        model=str(folder),
        device=sizes.device.type,
        dtype="bfloat16",
        num_blocks=80,
        block_size=_BLOCK,
        max_model_len=256,
        warm_up="off",
    )
    try:
        cold = [answers(llm, [prompt])[0] for prompt in prompts]
        together = answers(llm, prompts)
        graphs = getattr(llm.engine.runner, "graphs", None)
    finally:
        llm.close()
    # The same weights in a type of which rounding is no matter.
    model = whole_pass(folder, torch.bfloat16).float()
    gaps = torch.tensor(
        [
            gap
            for given in (cold, together)
            for prompt, answer in zip(prompts, given, strict=True)
            for gap in gaps_of(model, prompt, answer)
        ]
    )
    near = float((gaps <= _GAP).float().mean())
    report(
        model=f"{name} bfloat16",
        ok=near >= _SHARE and (graphs is None or (graphs.enabled and graphs.replayed > 0)),
        near=near,
        median_gap=float(gaps.median()),
        same_together=sum(a == b for a, b in zip(cold, together, strict=True)) / len(prompts),
        replayed=None if graphs is None else graphs.replayed,
        captured=None if graphs is None else graphs.captured,
    )


def gaps_of(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """How far each token's logit is below its position's largest, in spreads of the logits."""
    ids = torch.tensor([[*prompt, *answer]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    gaps: list[float] = ((logits.amax(1) - chosen) / logits.std(1)).tolist()
    return gaps


def check_adapters(sizes: Sizes, report: Report) -> None:
    """Two low-rank adapters and the base model in one batch, beside PEFT's own tokens."""
    # Of the tests, found by the path that `models` adds.
    from tiny_adapters import greedy as adapted
    from tiny_adapters import peft_model, plain_model, save_adapter
    from tiny_models import save_tiny_model

    with tempfile.TemporaryDirectory() as place:
        folder = save_tiny_model(Path(place) / "base", "llama")
        prompt, specs = tokens(60, 1), []
        wanted = {"": adapted(plain_model(folder), prompt, ANSWER)}
        for seed, rank in ((1, 4), (2, 16)):
            name = f"rank-{rank}"
            model = peft_model(folder, seed, r=rank)
            wanted[name] = adapted(model, prompt, ANSWER)
            specs.append(f"{name}={save_adapter(model, Path(place) / name)}")
        llm = LLM(
            model=str(folder),
            device=sizes.device.type,
            dtype="float32",
            num_blocks=64,
            max_model_len=256,
            lora=tuple(specs),
            max_lora_rank=16,
        )
        try:
            for way in ("cold", "hot"):
                found = {llm.engine.add_request(prompt, greedily(), lora=name): name for name in wanted}
                got: dict[str, list[int]] = {}
                while len(got) < len(wanted):
                    for output in llm.engine.step().finished:
                        got[found[output.request_id]] = list(output.outputs[0].token_ids)
                wrong = [name or "base" for name in wanted if got[name] != wanted[name]]
                report(model=f"adapters, {way}", ok=not wrong, wrong=wrong)
            graphs = getattr(llm.engine.runner, "graphs", None)
            report(model="adapters", replayed=None if graphs is None else graphs.replayed)
        finally:
            llm.close()


def greedily() -> SamplingParams:
    """Settings of every answer."""
    return SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of each prompt, all at once."""
    found = llm.generate(prompts, greedily(), progress=False)
    return [list(output.outputs[0].token_ids) for output in found]


def tokens(count: int, seed: int) -> list[int]:
    """Random ids of a tiny model."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 320, (count,), generator=generator).tolist()


def whole_pass(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of a folder on the CPU."""
    kind = AutoConfig.from_pretrained(folder).model_type
    chosen = AutoModelForImageTextToText if kind == "mistral4" else AutoModelForCausalLM
    return chosen.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()


def greedy(model: Any, prompt: Sequence[int]) -> list[int]:
    """The next tokens, each computed from all before it, without a cache."""
    ids = torch.tensor([prompt])
    for _ in range(ANSWER):
        places = torch.arange(ids.shape[1])[None]
        logits = model(input_ids=ids, position_ids=places, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()
