# SPDX-License-Identifier: Apache-2.0
"""A stored form of weights crossed with everything else: small pools, ranks, adapters, tiers, narrow K/V.

Each seed draws a form and options, serves prompts that begin alike for several tenants with some ended in
the middle of their answers, and holds every answer to the model of the form's numbers:

    float32, K/V in full   the tokens of transformers (of PEFT, with an adapter)
    else                   the tokens of the request alone in an engine with room for all; each is nearly
                           the most likely one by the plain model
"""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Any

import torch
from paged_language_model import run_all
from quantised_checkpoints import quantise
from quantised_formats import FORMATS
from rank_threads import engine_on_ranks
from tiny_adapters import greedy, peft_model, plain_model, save_adapter

from radixkv.engine.engine import Engine
from radixkv.sampling.sampling_params import SamplingParams
from tests.support.tiny_models import save_tiny_model

#: Inputs of products are 64 and 128, so that two ranks' shares are whole groups of 32.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
#: Their blocks do not go into these sizes, or into halves of them.
CUT_BY_RANKS = ("fp8-uneven-blocks", "modelopt-blocks", "gptq-dynamic")
#: Nats by which a token of rounded inputs may be less likely than the best one.
NEAR = 0.4
_LENGTH = 8


def write_base(folder: Path) -> Path:
    """A tiny model whose products all forms can hold."""
    return save_tiny_model(folder, "llama", num_attention_heads=2, num_key_value_heads=2, **SIZES)


def cross(seed: int, base: Path, place: Path) -> str:
    """Serve one crossing.

    Args:
        base: of `write_base`.
        place: an empty folder.

    Returns:
        What was crossed.

    Raises:
        AssertionError: an answer differs, or something is held at the end.
    """
    draw = Random(seed)
    form = draw.choice(sorted(FORMATS))
    ranks = 2 if form not in CUT_BY_RANKS and draw.random() < 0.25 else 1
    options: dict[str, Any] = {
        "dtype": draw.choice(["float32", "float32", "auto", "bfloat16"]),
        "kv_cache_dtype": draw.choice(["auto", "auto", "int8", "fp8_e4m3"]),
        "deterministic": draw.random() < 0.3,
        "warm_up": "off",
    }
    adapter = ranks == 1 and draw.random() < 0.3  # which one rank computes
    stress: dict[str, Any] = {
        "num_blocks": draw.choice([14, 18, 40]),
        "max_num_batched_tokens": draw.choice([None, 16, 24]),
        "speculation": draw.choice(["auto", "off"]),
    }
    tier = draw.random() < 0.4
    what = f"seed {seed}: {form}, {ranks} ranks, {options}, {stress}, adapter {adapter}, tier {tier}"
    # Of one name, by which an adapter knows its base.
    folder, plain = (Path(shutil.copytree(base, place / each / "tiny")) for each in ("stored", "plain"))
    quantise(folder, *FORMATS[form], plain=plain)
    reference = plain_model(plain)
    tuned = None
    if adapter:
        tuned = peft_model(plain_model(plain), seed)
        options["lora"] = (f"own={save_adapter(tuned, place / 'adapter')}",)
    if tier:
        stress["kv_tier"] = (f"disk:{place / 'tier'},max=16MiB",)
    asked = _prompts(draw, adapter)
    is_exact = options["dtype"] == "float32" and options["kv_cache_dtype"] == "auto"
    if is_exact:
        expected = [greedy(tuned if name else reference, prompt, _LENGTH) for prompt, name, _ in asked]
    else:
        expected = _alone(folder, ranks, options, asked)
        for (prompt, name, _), tokens in zip(asked, expected, strict=True):
            short = _shortfall(tuned if name else reference, prompt, tokens)
            assert short < NEAR, (what, prompt, tokens, short)
    for _ in range(2 if tier else 1):  # the second time from the disk
        engine = engine_on_ranks(folder, ranks, **options, **stress)
        try:
            found = _served(engine, draw, asked)
            for index, tokens in found.items():
                assert tokens == expected[index], (what, index, tokens, expected[index])
            assert tier or engine.cache.stats.num_leases == 0, what  # saves hold blocks for a while
        finally:
            engine.close()
    return what


def _prompts(draw: Random, adapter: bool) -> list[tuple[list[int], str | None, str]]:
    """Prompts with their adapters and tenants: of several lengths, most begin alike."""
    start = [draw.randrange(3, 290) for _ in range(40)]
    asked = []
    for _ in range(7):
        own = [draw.randrange(3, 290) for _ in range(draw.randrange(1, 20))]
        prompt = start[: draw.choice([0, 16, 24, 40])] + own
        asked.append((prompt, "own" if adapter and draw.random() < 0.5 else None, draw.choice(["", "b"])))
    return [*asked, asked[0]]


def _params(count: int = _LENGTH) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)


def _alone(
    folder: Path, ranks: int, options: dict[str, Any], asked: list[tuple[list[int], str | None, str]]
) -> list[list[int]]:
    engine = engine_on_ranks(
        folder, ranks, **options, num_blocks=200, speculation="off", enable_prefix_caching=False
    )
    found = []
    try:
        for prompt, name, namespace in asked:
            engine.add_request(prompt, _params(), lora=name, namespace=namespace)
            (output,) = run_all(engine).values()
            found.append(list(output.outputs[0].token_ids))
    finally:
        engine.close()
    return found


def _served(
    engine: Engine, draw: Random, asked: list[tuple[list[int], str | None, str]]
) -> dict[int, list[int]]:
    """Answers by the prompts' numbers, of those that were not ended."""
    ids: dict[str, int] = {}
    outputs: dict[str, Any] = {}
    waiting = list(enumerate(asked))
    ended: set[str] = set()
    while waiting or engine.has_work:
        if waiting and (not engine.has_work or draw.random() < 0.4):
            index, (prompt, name, namespace) = waiting.pop(0)
            ids[engine.add_request(prompt, _params(), lora=name, namespace=namespace)] = index
            if draw.random() < 0.2:
                ended.add(engine.add_request(prompt[::-1], _params(40), namespace=namespace))
        result = engine.step()
        engine.check()
        outputs |= {output.request_id: output for output in result.finished}
        if ended and draw.random() < 0.3:
            engine.abort(ended.pop())
    return {index: list(outputs[name].outputs[0].token_ids) for name, index in ids.items() if name in outputs}


@torch.inference_mode()
def _shortfall(model: Any, prompt: list[int], tokens: list[int]) -> float:
    """By how many nats the least likely of the tokens is below the best one in its place."""
    logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0].log_softmax(-1)
    own = logits[len(prompt) - 1 : -1]
    chosen = own[torch.arange(len(tokens)), torch.tensor(tokens)]
    return float((own.amax(-1) - chosen).max())
