# SPDX-License-Identifier: Apache-2.0
"""Many adapters on one base: PEFT's answers, hot and cold, mixed in one batch; each with its own prefixes."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import by_day
from quantised_checkpoints import gptq, quantise
from tiny_adapters import greedy, last_logits, peft_model, plain_model, save_adapter
from tiny_configs import VOCAB_SIZE
from tiny_models import save_tiny_model

from radixkv import LLM, SamplingParams
from radixkv.errors import AdapterLoadError, ConfigError, InvalidRequestError

COUNT = 8
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
#: The adapters of every model here: options of PEFT.
ADAPTERS: dict[str, dict[str, Any]] = {
    "wide": {"r": 8},
    "stable": {"r": 3, "use_rslora": True},
    "two-layers": {"target_modules": ["q_proj", "v_proj", "up_proj"], "layers_to_transform": [0, 2]},
    "pattern": {"target_modules": ["o_proj", "down_proj"], "rank_pattern": {"o_proj": 2}},
}
INVOCATION = [5, 6, 7]
#: Adapters that begin at a text of their own.
ACTIVATED: dict[str, dict[str, Any]] = {
    "judge": {"r": 4, "alora_invocation_tokens": INVOCATION},
    "rewriter": {"r": 2, "alora_invocation_tokens": INVOCATION, "target_modules": ["q_proj", "up_proj"]},
}


class Trained:
    """A tiny base with its adapters, on disk and as models of PEFT."""

    def __init__(self, folder: Path, family: str, options: dict[str, dict[str, Any]], **changes: Any) -> None:
        self.base = save_tiny_model(folder / f"tiny-{family}", family, **changes)
        self.models: dict[str, Any] = {"": plain_model(self.base)}
        self.folders: dict[str, Path] = {}
        for seed, (name, each) in enumerate(options.items()):
            self.models[name] = peft_model(self.base, seed, **each)
            self.folders[name] = save_adapter(self.models[name], folder / name)

    def llm(self, **options: Any) -> LLM:
        """An engine with all of the adapters."""
        specs = tuple(f"{name}={path}" for name, path in self.folders.items())
        return LLM(str(self.base), **{"lora": specs, "num_blocks": 256, "warm_up": "off", **options})


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 40, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def answers(llm: LLM, asked: Sequence[tuple[str, Sequence[int]]]) -> list[tuple[list[int], int]]:
    """The tokens of each answer and how many of its prompt's were cached; all run together."""
    ids = [llm.engine.add_request(prompt, GREEDY, lora=name) for name, prompt in asked]
    found: dict[str, Any] = {}
    while len(found) < len(ids):
        found.update({output.request_id: output for output in llm.engine.step().finished})
    llm.engine.check()
    outputs = [found[request_id] for request_id in ids]
    assert all(output.error is None for output in outputs)
    return [(list(output.outputs[0].token_ids), output.num_cached_tokens) for output in outputs]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("llama"), "llama", ADAPTERS | ACTIVATED)


def test_mixed_batches_answer_as_peft(llama: Trained) -> None:
    asked = [
        (name, prompt) for prompt in prompts(3) for name in ("pattern", "", "wide", "two-layers", "stable")
    ]
    expected = [greedy(llama.models[name], prompt, COUNT) for name, prompt in asked]
    assert len({tuple(tokens) for tokens in expected}) > 12  # or the adapters would not matter
    with llama.llm() as llm:
        cold = answers(llm, asked)
        hot = answers(llm, asked)
    assert [tokens for tokens, _ in cold] == [tokens for tokens, _ in hot] == expected
    assert sum(cached for _, cached in cold) == 0 < sum(cached for _, cached in hot)


@pytest.mark.parametrize(
    "family",
    [
        "qwen2-moe-window",
        *(
            pytest.param(each, marks=pytest.mark.nightly)
            for each in ("qwen2", "gemma2", "phi3-window", "gpt-neox")
        ),
    ],
)
@pytest.mark.nightly
def test_families(family: str, tmp_path: Path) -> None:
    targets = {"target_modules": ["q_proj", "o_proj", "up_proj"]} if "moe" in family else {}
    trained = Trained(tmp_path, family, {"a": {"r": 4, **targets}, "b": {"r": 2, **targets}})
    asked = [(name, prompt) for prompt in prompts(1, seed=3) for name in ("b", "", "a")]
    with trained.llm() as llm:
        found = [tokens for tokens, _ in answers(llm, asked)]
    assert found == [greedy(trained.models[name], prompt, COUNT) for name, prompt in asked]


@pytest.mark.parametrize("family", ["qwen3_5_text", pytest.param("lfm2", marks=pytest.mark.nightly)])
def test_hybrid_models(family: str, tmp_path: Path) -> None:
    """States of each adapter apart, cold and from kept ones; rows of all in one batch."""
    base = tmp_path / "tiny-hybrid"
    save_tiny_model(base, family)
    targets = ["q_proj", "k_proj", *(["w1", "w2"] if family == "lfm2" else ["up_proj", "down_proj"])]
    models = {"": plain_model(base)}
    models |= {name: peft_model(base, seed, target_modules=targets) for seed, name in enumerate("ab")}
    folders = {name: save_adapter(models[name], tmp_path / name) for name in "ab"}
    text = torch.randint(3, 320, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    asked = [(name, text[:length]) for length in (150, 100) for name in ("b", "", "a")]
    expected = [greedy(models[name], prompt, COUNT) for name, prompt in asked]
    specs = tuple(f"{name}={folder}" for name, folder in folders.items())
    with LLM(str(base), lora=specs, num_blocks=128, warm_up="off", speculation="off") as llm:
        cold, hot = answers(llm, asked), answers(llm, asked)
        activated = save_adapter(
            peft_model(base, 3, target_modules=targets, alora_invocation_tokens=[5]), tmp_path / "c"
        )
        with pytest.raises(AdapterLoadError, match="activated"):
            llm.adapters.load("c", str(activated))
    assert [tokens for tokens, _ in cold] == [tokens for tokens, _ in hot] == expected
    assert all(cached >= 64 for _, cached in hot)


@pytest.mark.parametrize(
    "options",
    by_day(
        [{"deterministic": True}, {"speculation": "off"}, {"async_scheduling": True}],
        {"async_scheduling": True},
    ),
    ids=str,
)
def test_modes(options: dict[str, Any], llama: Trained) -> None:
    asked = [(name, prompt) for prompt in prompts(1, seed=4) for name in ("wide", "", "stable")]
    with llama.llm(**options) as llm:
        together = [tokens for tokens, _ in answers(llm, asked)]
        alone = [answers(llm, [each])[0][0] for each in asked]
    assert together == alone == [greedy(llama.models[name], prompt, COUNT) for name, prompt in asked]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [{}, {"deterministic": True}, {"quantization": "int8"}, {"quantization": "int8", "num_blocks": 40}],
    ids=str,
)
def test_fifty_prompts(options: dict[str, Any], llama: Trained) -> None:
    """Of each adapter and the base, in one batch, cold and hot; int8: as each alone, there is no peer."""
    names = ("", *ADAPTERS)
    asked = [(name, prompt) for prompt in prompts(50, seed=20) for name in names]
    with llama.llm(**options) as llm:
        cold = [tokens for tokens, _ in answers(llm, asked)]
        hot = answers(llm, asked)
    assert cold == [tokens for tokens, _ in hot]
    assert sum(cached for _, cached in hot)
    if options.get("quantization"):
        with llama.llm(**options, enable_prefix_caching=False) as llm:
            assert cold == [answers(llm, [each])[0][0] for each in asked]
    else:
        assert cold == [greedy(llama.models[name], prompt, COUNT) for name, prompt in asked]


def test_logits_are_those_of_merged_weights(llama: Trained) -> None:
    prompt = prompts(1, seed=5)[0]
    expected = last_logits(peft_model(llama.base, 0, **ADAPTERS["wide"]).merge_and_unload(), prompt)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
    with llama.llm() as llm:
        told = llm.generate([prompt], params, lora="wide")[0].outputs[0].logprobs[0].top
    wanted = torch.log_softmax(expected, dim=-1)
    assert all(abs(each.logprob - float(wanted[each.token_id])) < 1e-4 for each in told)


@pytest.mark.nightly
def test_int8_weights_keep_float32_adapters(llama: Trained) -> None:
    """The change of the logits is that of PEFT but for the rounding of the base."""
    prompt = prompts(1, seed=6)[0]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    with llama.llm(quantization="int8") as llm, llama.llm() as exact:
        for name in ("", "wide"):
            pair = [each.generate([prompt], params, lora=name)[0] for each in (llm, exact)]
            scores = [
                torch.tensor([place.top[0].logprob for place in one.prompt_logprobs[1:]]) for one in pair
            ]
            assert float((scores[0] - scores[1]).abs().mean()) < 0.25


def test_adapters_of_a_base_with_activation_order(llama: Trained, tmp_path: Path) -> None:
    """Its products take their inputs in an order of their own, adapters in the model's: as on its numbers."""
    pytest.importorskip("numba")
    folder, plain = (Path(shutil.copytree(llama.base, tmp_path / each / llama.base.name)) for each in "ab")
    write = partial(gptq, shuffled=True)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    assert quantise(folder, write, settings, plain=plain)
    (prompt,) = prompts(1, seed=9)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)

    def scores(base: Path, name: str) -> torch.Tensor:
        specs = tuple(f"{each}={path}" for each, path in llama.folders.items())
        with LLM(str(base), lora=specs, num_blocks=64, warm_up="off", speculation="off") as llm:
            own = llm.generate([prompt], params, lora=name)[0].prompt_logprobs[1:]
        return torch.tensor([place.chosen.logprob for place in own])

    expected, base = scores(plain, "wide"), scores(plain, "")
    change = float((expected - base).abs().mean())
    assert float((scores(folder, "wide") - expected).abs().mean()) < 0.1 * change


def test_same_name_with_other_weights_hits_nothing(llama: Trained, tmp_path: Path) -> None:
    prompt = prompts(1, seed=7)[0] * 3
    folder = shutil.copytree(llama.folders["wide"], tmp_path / "x")
    with llama.llm(lora=(f"x={folder}",)) as llm:
        first, _ = answers(llm, [("x", prompt)])[0]
        assert answers(llm, [("x", prompt)])[0] == (first, len(prompt) - 1)
        other = llama.folders["stable"]
        llm.adapters.load("x", str(other))
        llm.adapters.load("y", str(folder))  # the first weights, under another name
        again, cached = answers(llm, [("x", prompt)])[0]
        assert cached == 0
        assert again == greedy(llama.models["stable"], prompt, COUNT) != first
        assert answers(llm, [("y", prompt)])[0] == (first, len(prompt) - 1)
        assert answers(llm, [("", prompt)])[0][1] == 0
        assert llm.explain(prompt, lora="y").num_hit_tokens > 0


def test_a_request_ends_with_the_weights_it_began_with(llama: Trained) -> None:
    prompt = prompts(1, seed=8)[0]
    with llama.llm() as llm:
        steps = llm.stream(prompt, GREEDY, lora="wide")
        tokens = list(next(steps).token_ids)
        llm.adapters.load("wide", str(llama.folders["stable"]))
        llm.adapters.unload("stable")
        tokens += [token for delta in steps for token in delta.token_ids]
        assert tokens == greedy(llama.models["wide"], prompt, COUNT)
        assert answers(llm, [("wide", prompt)])[0][0] == greedy(llama.models["stable"], prompt, COUNT)
        with pytest.raises(InvalidRequestError, match="no adapter 'stable'"):
            llm.generate([prompt], GREEDY, lora="stable")


def test_least_recently_used_leaves_memory(llama: Trained) -> None:
    prompt = prompts(1, seed=9)[0]
    with llama.llm(max_loras=2) as llm:
        for name in ("wide", "stable", "wide", "pattern"):
            found, _ = answers(llm, [(name, prompt)])[0]
            assert found == greedy(llama.models[name], prompt, COUNT)
        gc.collect()
        assert {card.name for card in llm.adapters.cards() if card.in_memory} == {"wide", "pattern"}
        # More at once than may stay: all are there until they have answered.
        asked = [(name, prompt) for name in ADAPTERS]
        assert [tokens for tokens, _ in answers(llm, asked)] == [
            greedy(llama.models[name], prompt, COUNT) for name in ADAPTERS
        ]
        gc.collect()
        assert sum(card.in_memory for card in llm.adapters.cards()) == 2


def test_activated_adapters_share_the_bases_prefix(llama: Trained) -> None:
    """Up to the last invocation the prompt is the base's: for it, and for every activated adapter."""
    plain = prompts(1, seed=10)[0]
    text = [*plain, *INVOCATION, *prompts(1, seed=11)[0]]
    asked = [*text, *INVOCATION, 90, 91]

    def expected(name: str, prompt: list[int]) -> list[int]:
        return greedy(llama.models[name], prompt, COUNT)

    with llama.llm() as llm:
        assert answers(llm, [("", text)])[0] == (expected("", text), 0)
        for name in ACTIVATED:
            assert answers(llm, [(name, asked)])[0] == (expected(name, asked), len(text))
            assert answers(llm, [(name, asked)])[0] == (expected(name, asked), len(text))
        # What the adapters computed is nobody's: the base computes its own.
        assert answers(llm, [("", asked)])[0] == (expected("", asked), len(text))
        assert answers(llm, [("", asked)])[0][1] == len(asked) - 1
        assert answers(llm, [("judge", asked)])[0] == (expected("judge", asked), len(text))
        # Without the invocation the base answers; with it at the start, the adapter answers all.
        assert answers(llm, [("judge", plain)])[0] == (expected("", plain), len(plain) - 1)
        first = [*INVOCATION, *range(20, 40)]
        assert answers(llm, [("judge", first)])[0] == (expected("judge", first), 0)
        assert answers(llm, [("", first)])[0] == (expected("", first), 0)
        assert llm.explain(asked, lora="judge").num_hit_tokens == len(asked) - 1


def test_activated_adapters_in_mixed_batches_and_chunks(llama: Trained) -> None:
    """Chunks that end before, in and after the invocation, beside the base and plain adapters."""
    texts = prompts(2, seed=12)
    asked = [
        (name, [*text, *INVOCATION, 90 + i])
        for i, text in enumerate(texts)
        for name in ("judge", "", "wide", "rewriter")
    ]
    expected = [greedy(llama.models[name], prompt, COUNT) for name, prompt in asked]
    with llama.llm(max_num_batched_tokens=24, max_num_seqs=8, num_blocks=24) as llm:
        for _ in range(2):
            assert [tokens for tokens, _ in answers(llm, asked)] == expected


def test_changed_files_are_not_taken_for_the_adapter(llama: Trained, tmp_path: Path) -> None:
    folder = shutil.copytree(llama.folders["wide"], tmp_path / "x")
    with llama.llm(lora=(f"x={folder}", f"y={llama.folders['stable']}"), max_loras=1) as llm:
        shutil.rmtree(folder)
        shutil.copytree(llama.folders["pattern"], folder)
        gc.collect()
        with pytest.raises(InvalidRequestError, match="have changed"):
            llm.generate([[5, 6, 7]], GREEDY, lora="x")
        shutil.rmtree(folder)
        with pytest.raises(InvalidRequestError, match="can't be read any more"):
            llm.generate([[5, 6, 7]], GREEDY, lora="x")
        assert llm.generate([[5, 6, 7]], GREEDY, lora="y")[0].error is None


def test_refusals(llama: Trained, tmp_path: Path) -> None:
    with LLM(str(llama.base), num_blocks=16, warm_up="off") as llm:
        with pytest.raises(InvalidRequestError, match="--lora"):
            llm.generate([[5, 6]], GREEDY, lora="wide")
        with pytest.raises(ConfigError, match="without adapters"):
            llm.adapters.load("wide", str(llama.folders["wide"]))
    with pytest.raises(AdapterLoadError, match="'gone' can't be loaded"):
        llama.llm(lora=(f"gone={tmp_path}",))
    with pytest.raises(ConfigError, match="NAME=PATH"):
        llama.llm(lora=("wide",))
    with pytest.raises(ConfigError, match="twice"):
        llama.llm(lora=(f"a={tmp_path},a={tmp_path}",))
    with pytest.raises(ConfigError, match="one rank"):
        llama.llm(tensor_parallel=2)
    with llama.llm(num_blocks=16) as llm:
        identity = llm.adapters.cards()[0].identity
        with pytest.raises(InvalidRequestError, match="as lora instead"):
            llm.generate([[5, 6]], GREEDY, namespace=("t", "", identity))
