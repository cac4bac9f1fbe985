# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints: each is the model of the numbers that its codes stand for."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints as written
import torch
from live_server import LiveServer, live_server
from nightly import by_day
from paged_language_model import run_all
from quantised_formats import FORMATS, MLX
from rank_threads import engine_on_ranks
from safetensors.torch import load_file, save_file
from test_model_loader import load, logits_of, refusal
from tiny_adapters import greedy, peft_model, plain_model, save_adapter
from tiny_models import save_tiny_model

from radixkv import LLM, SamplingParams
from radixkv.engine.config import EngineConfig
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv.model.attention.latent_attention import Latents

TOKENS = list(range(5, 30))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 32}
    return save_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny-llama", "llama", num_attention_heads=2, **sizes
    )


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "tiny-llama"))


@pytest.fixture
def plain(original: Path, tmp_path: Path) -> Path:
    """A folder for the same model with the numbers that codes stand for."""
    return Path(shutil.copytree(original, tmp_path / "plain" / "tiny-llama"))


def products(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    model = load(folder, **options).model
    return {name: each for name, each in model.state_dict().items() if "_proj.weight" in name}


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_that_codes_stand_for(folder: Path, plain: Path, name: str) -> None:
    write, settings = FORMATS[name]
    written.quantise(folder, write, settings, plain=plain)
    found, expected = products(folder, dtype="float32"), load_file(plain / "model.safetensors")
    assert len(found) == 7
    for key, weight in found.items():
        assert torch.equal(weight, expected[key]), key


def test_layers_differ_in_their_forms(folder: Path, plain: Path) -> None:
    """A group by a pattern, one by its class, and a layer left as it was."""
    settings = written.groups("float", "channel")
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    settings["config_groups"]["group_1"] = {"targets": ["re:.*mlp[.]"], "weights": weights}

    def write(weight: torch.Tensor) -> written.Stored:
        return (written.int8 if 96 in weight.shape else written.channel_fp8)(weight)

    written.quantise(folder, write, {**settings, "format": "mixed-precision"}, plain=plain)
    left = "model.layers.0.self_attn.q_proj.weight"
    number = load_file(plain / "model.safetensors")[left]

    def restore(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[left.removesuffix("weight") + "weight_scale"]
        tensors[left] = number.to(torch.bfloat16)
        tensors[left.replace("q_proj.weight", "k_scale")] = torch.tensor(1.0)  # of keys: not needed

    damage(folder, restore)
    damage(plain, lambda tensors: tensors.update({left: number.to(torch.bfloat16).float()}))
    assert torch.equal(
        logits_of(load(folder, dtype="float32"), TOKENS), logits_of(load(plain, dtype="float32"), TOKENS)
    )


MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
_OF_MIXED = {"model.layers.0.mlp.up_proj": "NVFP4", "model.layers.0.self_attn.q_proj": "FP8"}


@pytest.mark.parametrize("in_config", [True, False])
def test_modelopt_layers_of_their_own_algorithms(folder: Path, plain: Path, in_config: bool) -> None:
    layers = {name: {"quant_algo": algorithm, "group_size": 16} for name, algorithm in _OF_MIXED.items()}
    settings = {**MIXED, "quantized_layers": layers}

    def write(weight: torch.Tensor) -> written.Stored:
        return (written.nvfp4 if 96 in weight.shape else written.one_fp8)(weight)

    written.quantise(folder, write, settings if in_config else None, plain=plain)
    if not in_config:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    found, expected = products(folder, dtype="float32"), load_file(plain / "model.safetensors")
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (MIXED, "it has no quantized_layers"),
        ({**MIXED, "quantized_layers": {"a": {"quant_algo": "NVFP4_SVD"}, "b": "FP8"}}, "of NVFP4_SVD)"),
        ({**MIXED, "quantized_layers": {"a": {"quant_algo": "FP8"}}}, "it is I8, which no layer of FP8 is"),
    ],
)
def test_modelopt_layers_that_are_not_read(
    folder: Path, plain: Path, settings: dict[str, Any], expected: str
) -> None:
    written.quantise(folder, written.int8, settings, plain=plain)
    assert expected in refusal(folder)


def test_mlx_stores_embeddings_and_single_layers_in_other_bits(folder: Path, plain: Path) -> None:
    name = "model.layers.0.mlp.up_proj"
    own = {name: {"bits": 8, "group_size": 32}}

    def write(weight: torch.Tensor) -> written.Stored:
        return written.mlx(weight, bits=8 if weight.shape == (96, 64) and next(rows) else 4)

    rows = iter([False, True])  # gates come before ups
    written.quantise(folder, write, {**MLX, **own}, plain=plain)
    embedded = written.mlx(load_file(plain / "model.safetensors")["model.embed_tokens.weight"])

    def store(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {f"model.embed_tokens.{rest}": part for rest, part in embedded.tensors.items()}

    damage(folder, store)
    damage(plain, lambda tensors: tensors.update({"model.embed_tokens.weight": embedded.plain}))
    assert torch.equal(
        logits_of(load(folder, dtype="float32"), TOKENS), logits_of(load(plain, dtype="float32"), TOKENS)
    )


@pytest.mark.parametrize(
    ("family", "names"), [("mixtral", "w1 w2 w3"), ("qwen3-moe", "gate_proj down_proj up_proj")]
)
def test_mlx_stores_experts_as_one_tensor(tmp_path: Path, family: str, names: str) -> None:
    """A product whose inputs are no whole groups stays plain: the second model's `down_proj`."""
    folder = save_tiny_model(tmp_path / "quantised", family)
    plain = Path(shutil.copytree(folder, tmp_path / "plain"))
    numbers = load_file(folder / "model.safetensors")
    stored = {name: each for name, each in numbers.items() if ".experts." not in name}
    for layer in sorted({name.partition(".experts.")[0] for name in numbers.keys() - stored.keys()}):
        for name, ours in zip(("gate_proj", "down_proj", "up_proj"), names.split(), strict=True):
            experts = [f"{layer}.experts.{number}.{ours}.weight" for number in range(4)]
            stem = f"{layer}.switch_mlp.{name}."
            if numbers[experts[0]].shape[1] % 32:
                stored[f"{stem}weight"] = torch.stack([numbers[each] for each in experts])
                continue
            made = [written.mlx(numbers[each]) for each in experts]
            stored |= {
                stem + leaf: torch.stack([one.tensors[leaf] for one in made]) for leaf in made[0].tensors
            }
            numbers |= {each: one.plain for each, one in zip(experts, made, strict=True)}
    save_file(stored, folder / "model.safetensors", metadata={"format": "mlx"})
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization": MLX}))
    found, expected = (logits_of(load(each, dtype="float32"), TOKENS) for each in (folder, plain))
    assert torch.equal(found, expected)


def test_matrices_that_mlx_puts_together_in_its_own_way(folder: Path, plain: Path) -> None:
    written.quantise(folder, *FORMATS["mlx-4"], plain=plain)
    stacked = {"embed_q.weight": "weight", "embed_q.scales": "scales", "embed_q.biases": "biases"}

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for new, leaf in stacked.items():
            tensors[f"model.layers.0.self_attn.{new}"] = torch.stack([tensors[FIRST + leaf]] * 2)

    damage(folder, change)
    assert "MLX has model.layers.0.self_attn.embed_q.weight in a form of its own" in refusal(folder)


def test_with_a_dtype_they_are_expanded_to_it(folder: Path, plain: Path) -> None:
    written.quantise(folder, *FORMATS["nf4"], plain=plain)
    loaded = load(folder, dtype="bfloat16")
    assert loaded.dtype == torch.bfloat16
    expected = load_file(plain / "model.safetensors")
    for key, weight in products(folder, dtype="bfloat16").items():
        assert torch.equal(weight, expected[key].to(torch.bfloat16))
    assert torch.equal(logits_of(loaded, TOKENS), logits_of(load(plain, dtype="bfloat16"), TOKENS))


def test_a_modelopt_file_of_its_own(folder: Path, plain: Path) -> None:
    written.quantise(folder, written.one_fp8, None, plain=plain)
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}})
    )
    assert torch.equal(logits_of(load(folder, dtype="float32"), TOKENS), logits_of(load(plain), TOKENS))


def damage(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


FIRST = "model.layers.0.mlp.down_proj."


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[FIRST + name]

    return change


def cut(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[FIRST + name] = tensors[FIRST + name][:-1].contiguous()

    return change


def whole(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[FIRST + name] = tensors[FIRST + name].to(torch.int32)

    return change


def turned(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[FIRST + name] = tensors[FIRST + name].t().contiguous()

    return change


#: Format, what is changed, and what the refusal says.
DAMAGED: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], None], str]] = {
    "no-scales": ("fp8-blocks", without("weight_scale_inv"), "without a scale"),
    "too-few-blocks": ("fp8-blocks", cut("weight_scale_inv"), "scales, not [1, 3]"),
    "no-scale": ("modelopt", without("weight_scale"), "without a scale"),
    "channels": ("compressed-dynamic", cut("weight_scale"), "are [63, 1], expected [64, 1]"),
    "int8-without-scales": ("compressed-int8", without("weight_scale"), "weight_scale"),
    "packs": ("compressed-packed", cut("weight_packed"), "words, not [63, 24]"),
    "packs-without-shape": ("compressed-packed", without("weight_shape"), "weight_shape is missing"),
    "table": ("nf4", cut("weight.quant_map"), "a table of [15]"),
    "codes": ("nf4", cut("weight"), "need 3072 bytes, not [3071]"),
    "absmax": ("nf4", without("weight.absmax"), "absmax is missing"),
    "state": ("nf4", without("weight.quant_state.bitsandbytes__nf4"), "its scales are missing"),
    "scb": ("bitsandbytes-8", without("SCB"), "its scales are missing"),
    "biases": ("mlx-4", without("biases"), "biases is missing"),
    "groups": ("mlx-4", cut("scales"), "64 outputs have [63, 3] scales"),
    "zero-points": ("awq", without("qzeros"), "qzeros is missing"),
    "zero-points-of-gptq": ("gptq-3", without("qzeros"), "qzeros is missing"),
    "zero-points-of-packs": ("packed-4-zeros", without("weight_zero_point"), "zero_point is missing"),
    "order": ("gptq-act-order", without("g_idx"), "g_idx is missing"),
    "order-of-packs": ("packed-4-act-order", without("weight_g_idx"), "weight_g_idx is missing"),
    "whole-scale": ("nvfp4-compressed", without("weight_global_scale"), "global_scale is missing"),
    "whole-scales": ("gptq", whole("scales"), "its scales are torch.int32, expected floats"),
    "whole-biases": ("mlx-4", whole("biases"), "its biases are torch.int32, expected floats"),
    "turned-scales": ("compressed-int8-groups", turned("weight_scale"), "are [3, 64], expected [64, 3]"),
    "shape": ("modelopt", cut("weight"), "which is [63, 96] and not [64, 96]"),
    "smoothing": ("modelopt-smoothed", cut("pre_quant_scale"), "96 inputs have [95] scales"),
    "whole-smoothing": ("modelopt-awq", whole("pre_quant_scale"), "inputs' scales are torch.int32"),
    "int4-without-scales": ("modelopt-awq", without("weight_scale"), "weight_scale is missing"),
    "int4-cut": ("modelopt-awq", cut("weight_scale"), "64 outputs have [63, 3] scales"),
    "mxfp8": ("modelopt-mxfp8", cut("weight_scale"), "need [64, 3] scales, not [63, 3]"),
    "floats-of-auto-round": ("auto-round-mxfp4", without("weight_scale"), "weight_scale is missing"),
    "mxfp4": ("modelopt-mxfp4", whole("weight_scale"), "it is INT4, which no layer of MXFP4 is"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named(folder: Path, plain: Path, case: str) -> None:
    name, change, expected = DAMAGED[case]
    written.quantise(folder, *FORMATS[name], plain=plain)
    damage(folder, change)
    message = refusal(folder)
    assert expected in message
    assert FIRST in message
    assert "\n" not in message


def test_a_group_size_that_tensors_contradict(folder: Path, plain: Path) -> None:
    written.quantise(folder, written.mlx, {**MLX, "group_size": 64}, plain=plain)
    assert "groups are of 32 inputs, not of 64" in refusal(folder)


def test_a_smoothed_layer_whose_weight_is_plain(folder: Path, plain: Path) -> None:
    written.quantise(folder, *FORMATS["modelopt-smoothed"], plain=plain)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[FIRST + "weight_scale"]
        tensors[FIRST + "weight"] = tensors[FIRST + "weight"].float()

    damage(folder, change)
    assert "pre_quant_scale does not fit its format: its layer's weight is not quantised" in refusal(folder)


def test_weights_that_their_form_does_not_explain(folder: Path, plain: Path) -> None:
    written.quantise(folder, *FORMATS["auto-round"], plain=plain)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for leaf in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[FIRST + leaf]
        tensors[FIRST + "weight"] = torch.zeros(64, 96).to(torch.float8_e4m3fn)

    damage(folder, change)
    assert f"{FIRST}weight does not fit its format: no weight of its form" in refusal(folder)


def test_rotations_of_weights_are_in_their_numbers(folder: Path, plain: Path) -> None:
    write, settings = FORMATS["packed-4"]
    rotation = {"type": "hadamard", "apply": [{"location": "weight_output"}, {"location": "weight_input"}]}
    settings = {**settings, "transform_config": {"config_groups": {"R1": rotation}}}
    written.quantise(folder, write, settings, plain=plain)
    expected = load_file(plain / "model.safetensors")
    assert all(torch.equal(each, expected[name]) for name, each in products(folder, dtype="float32").items())


@pytest.mark.parametrize("name", ["packed-4", "modelopt"])
def test_experts_under_names_that_transformers_does_not_know(tmp_path: Path, name: str) -> None:
    """As tools write Mixtral's, whose authors have w1, w2 and w3."""
    folder = save_tiny_model(tmp_path / "quantised", "mixtral")
    plain = Path(shutil.copytree(folder, tmp_path / "plain"))
    written.quantise(folder, *FORMATS[name], plain=plain, bare="")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for old in [each for each in tensors if ".experts." in each]:
            new = old.replace("w1", "gate_proj").replace("w2", "down_proj").replace("w3", "up_proj")
            tensors[new] = tensors.pop(old)

    damage(folder, rename)
    assert torch.equal(
        logits_of(load(folder, dtype="float32"), TOKENS), logits_of(load(plain, dtype="float32"), TOKENS)
    )


def experts_of_one_scale(tensors: dict[str, torch.Tensor]) -> None:
    """Experts' scales as transformers saves them: those of a layer in one tensor."""
    scales = {name: tensors.pop(name) for name in sorted(tensors) if ".experts." in name and "scale" in name}
    for layer in {name.partition(".experts.")[0] for name in scales}:
        for product, own in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
            tensors[f"{layer}.experts.{product}_scale_inv"] = torch.stack(
                [
                    torch.cat([scales[f"{layer}.experts.{number}.{each}.weight_scale_inv"] for each in own])
                    for number in range(4)
                ]
            )


@pytest.mark.parametrize("expected", ["", "expert 3, and its layer has [3, ", "gate and up share blocks"])
def test_experts_whose_scales_are_one_tensor(tmp_path: Path, expected: str) -> None:
    folder = save_tiny_model(tmp_path / "quantised", "mixtral")
    plain = Path(shutil.copytree(folder, tmp_path / "plain"))
    written.quantise(folder, partial(written.block_fp8, block=16), SMALL, plain=plain, bare="")
    damage(folder, experts_of_one_scale)
    if not expected:
        logits = [logits_of(load(each, dtype="float32"), TOKENS) for each in (folder, plain)]
        assert torch.equal(*logits)
        return

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [each for each in tensors if "gate_up_proj_scale_inv" in each]:
            tensors[name] = (tensors[name][:3] if "expert" in expected else tensors[name][:, 1:]).contiguous()

    damage(folder, change)
    assert expected in refusal(folder)


SMALL = {"quant_method": "fp8", "weight_block_size": [16, 16]}
FAMILIES = (
    "qwen2",
    "phi3",
    "mixtral",
    "minicpm3",
    "llama4",
    "gemma3",
    "qwen3_next",
    "nemotron_h",
    "kimi_linear",
)


@pytest.mark.parametrize("family", by_day(FAMILIES, "phi3", "mixtral", "minicpm3", "llama4"))
def test_every_layer_of_a_family(tmp_path: Path, family: str) -> None:
    """Fused products, experts one by one and as one tensor, latents, layers with states."""
    folder = save_tiny_model(tmp_path / "quantised", family)
    plain = Path(shutil.copytree(folder, tmp_path / "plain"))
    written.quantise(folder, partial(written.block_fp8, block=16), SMALL, plain=plain, bare="")
    found, expected = (load(each, dtype="float32") for each in (folder, plain))
    weights = expected.model.state_dict()
    assert found.model.state_dict().keys() == weights.keys()
    for name, weight in found.model.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    assert found.attention == expected.attention
    latents = [
        sum(isinstance(each, Latents) for each in model.model.modules()) for model in (found, expected)
    ]
    assert latents[0] == latents[1]


@pytest.mark.parametrize("format_name", by_day(FORMATS, "fp8-blocks", "compressed-int8", "nf4"))
def test_answers_over_http_are_those_of_the_plain_model(folder: Path, plain: Path, format_name: str) -> None:
    """Cold, hot, the next turn, and several at once."""
    written.quantise(folder, *FORMATS[format_name], plain=plain)
    reference = plain_model(plain)
    prompts = [[(7 * i + 3 * start) % 290 + 3 for i in range(40 + start)] for start in range(3)]
    expected = [greedy(reference, prompt, 6) for prompt in prompts]
    turn = [*prompts[0], *expected[0], *prompts[1][:9]]
    config = EngineConfig(model=str(folder), dtype="float32", num_blocks=64, block_size=8, threads=1)
    engine = AsyncEngine.from_config(config)
    try:
        with live_server(engine) as server, ThreadPoolExecutor() as pool:
            cold = [complete(server, prompt) for prompt in prompts]
            together = list(pool.map(partial(complete, server), [*prompts, turn]))
            assert [tokens for tokens, _ in cold] == expected
            assert [tokens for tokens, _ in together] == [*expected, greedy(reference, turn, 6)]
            assert all(cached >= 32 for _, cached in together)
    finally:
        asyncio.run(engine.close())


def complete(server: LiveServer, prompt: list[int]) -> tuple[list[int], int]:
    """Tokens of a greedy answer, and how many of the prompt's were cached."""
    body = {"model": server.engine.model_name, "prompt": prompt, "max_tokens": 6, "temperature": 0}
    with server.http() as client:
        answer = client.post(
            "/v1/completions", json={**body, "ignore_eos": True, "return_token_ids": True}
        ).json()
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["token_ids"], int(details.get("cached_tokens", 0))


@pytest.mark.parametrize("format_name", by_day(("fp8-blocks", "nf4"), "fp8-blocks"))
def test_ranks_share_the_numbers(folder: Path, plain: Path, format_name: str) -> None:
    written.quantise(folder, *FORMATS[format_name], plain=plain)
    prompt = [(5 * i) % 290 + 3 for i in range(30)]
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    expected = greedy(plain_model(plain), prompt, 5)
    engine = engine_on_ranks(folder, 2, dtype="float32", num_blocks=32)
    try:
        engine.add_request(prompt, params)
        (output,) = run_all(engine).values()
        assert list(output.outputs[0].token_ids) == expected
    finally:
        engine.close()


def test_an_adapter_and_deterministic_mode(folder: Path, plain: Path, tmp_path: Path) -> None:
    written.quantise(folder, *FORMATS["fp8-blocks"], plain=plain)
    model = peft_model(plain, seed=3)
    adapter = save_adapter(model, tmp_path / "adapter")
    prompt = [(5 * i) % 290 + 3 for i in range(30)]
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    llm = LLM(
        str(folder), dtype="float32", lora=(f"own={adapter}",), deterministic=True, num_blocks=64, threads=1
    )
    with llm:
        answers = [llm.generate([prompt], params, lora="own")[0].outputs[0].token_ids for _ in range(2)]
    assert [list(each) for each in answers] == [greedy(model, prompt, 5)] * 2


def test_scales_are_part_of_the_fingerprint(folder: Path, plain: Path) -> None:
    written.quantise(folder, *FORMATS["fp8-blocks"], plain=plain)
    before = load(folder).fingerprint
    assert load(folder, dtype="float32").fingerprint != before

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[FIRST + "weight_scale_inv"][0, 0] *= 1.001

    damage(folder, change)
    assert load(folder).fingerprint != before
