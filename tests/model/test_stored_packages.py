# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints as their own packages write them, and the numbers that these make of them again.

radixkv does without the packages. To try it against them, install them beside it, in an environment of its
own: `pip install --no-deps compressed-tensors torchao bitsandbytes loguru`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from live_server import live_server
from safetensors.torch import save_file
from test_model_loader import load
from test_stored_checkpoints import complete
from tiny_adapters import greedy
from tiny_models import save_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

from radixkv.engine.config import EngineConfig
from radixkv.entrypoints.async_engine import AsyncEngine

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore:You passed .quantization_config:UserWarning"),
]
Numbers = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    return save_tiny_model(folder, "llama", num_attention_heads=2, **sizes)


def model_of(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cpu", **options)


def check(folder: Path, expected: Numbers, *, exact: bool = True) -> None:
    """The products' weights, which must be a package's numbers, in their dtype."""
    found = load(folder, dtype="bfloat16").model.state_dict()
    assert expected
    for name, numbers in expected.items():
        weight = numbers.to(torch.bfloat16)
        assert torch.equal(found[name], weight) if exact else torch.allclose(found[name], weight), name


def bits(kind: str, nested: bool) -> Callable[[Path, Path], Numbers]:
    def write(original: Path, folder: Path) -> Numbers:
        bnb = pytest.importorskip("bitsandbytes")
        from transformers import BitsAndBytesConfig  # needs the package

        options = {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
        settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **options)
        model_of(original, quantization_config=settings).save_pretrained(folder)
        modules = model_of(folder).named_modules()
        return {
            f"{name}.weight": bnb.functional.dequantize_4bit(each.weight.data, each.weight.quant_state)
            for name, each in modules
            if isinstance(each, bnb.nn.Linear4bit)
        }

    return write


def bits_8(original: Path, folder: Path) -> Numbers:
    bnb = pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig  # needs the package

    settings = BitsAndBytesConfig(load_in_8bit=True)
    model_of(original, quantization_config=settings).save_pretrained(folder)
    return {
        f"{name}.weight": bnb.functional.int8_vectorwise_dequant(each.weight.data, each.weight.SCB)
        for name, each in model_of(folder).named_modules()
        if isinstance(each, bnb.nn.Linear8bitLt)
    }


def torchao(name: str, **options: Any) -> Callable[[Path, Path], Numbers]:
    def write(original: Path, folder: Path) -> Numbers:
        package = pytest.importorskip("torchao.quantization")
        from transformers import TorchAoConfig  # needs the package

        groups = {
            key: package.PerGroup(value) if key == "granularity" else value for key, value in options.items()
        }
        settings = TorchAoConfig(getattr(package, name)(**groups))
        model_of(original, quantization_config=settings).save_pretrained(folder)
        state = model_of(folder).state_dict()
        return {key: each.dequantize() for key, each in state.items() if hasattr(each, "qdata")}

    return write


def compressed(preset: str) -> Callable[[Path, Path], Numbers]:
    def write(original: Path, folder: Path) -> Numbers:
        quantization = pytest.importorskip("compressed_tensors.quantization")
        compressors = pytest.importorskip("compressed_tensors.compressors")
        model = model_of(original)
        scheme = quantization.preset_name_to_scheme(preset, ["Linear"])
        settings = quantization.QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
        quantization.apply_quantization_config(model, settings)
        for module in model.modules():
            if hasattr(module, "weight_scale"):
                arguments = module.quantization_scheme.weights
                largest = 448 if "float" in str(arguments.type).lower() else 127
                groups = module.weight.float().view(len(module.weight), module.weight_scale.shape[-1], -1)
                scales = groups.abs().amax(-1) / largest
                module.weight_scale.data.copy_(scales.reshape(module.weight_scale.shape))
        compressor = compressors.ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        folder.mkdir()
        save_file(
            {
                name: each.contiguous()
                for name, each in model.state_dict().items()
                if name != "lm_head.weight"
            },
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        config = AutoConfig.from_pretrained(original).to_dict()
        described = compressor.quantization_config.model_dump(mode="json")
        described |= {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
        return _products(model_of(folder, quantization_config=CompressedTensorsConfig(dequantize=True)))

    return write


def fp8(original: Path, folder: Path) -> Numbers:
    from quantised_checkpoints import block_fp8, quantise  # no package writes it on a CPU

    folder.mkdir()
    plain = folder / "plain"
    plain.mkdir()
    for each in original.iterdir():
        (folder / each.name).write_bytes(each.read_bytes())
    settings = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    quantise(folder, block_fp8, settings, plain=plain)
    return _products(model_of(folder, quantization_config=FineGrainedFP8Config(dequantize=True)))


def _products(model: Any) -> Numbers:
    return {name: each for name, each in model.state_dict().items() if "_proj.weight" in name}


#: Format -> writes a folder and returns a package's numbers of it.
WRITERS: dict[str, Callable[[Path, Path], Numbers]] = {
    "nf4": bits("nf4", nested=False),
    "nf4-nested": bits("nf4", nested=True),
    "fp4": bits("fp4", nested=False),
    "bitsandbytes-8": bits_8,
    "torchao-int8": torchao("Int8WeightOnlyConfig"),
    "torchao-int8-dynamic": torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao-int8-groups": torchao("Int8WeightOnlyConfig", granularity=64),
    "torchao-fp8": torchao("Float8WeightOnlyConfig"),
    "torchao-int4": torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=32),
    "compressed-w8a8": compressed("W8A8"),
    "compressed-w8a16": compressed("W8A16"),
    "compressed-fp8": compressed("FP8_DYNAMIC"),
    "fp8": fp8,
}


@pytest.mark.parametrize("name", WRITERS)
def test_numbers_and_answers_are_the_package_s(original: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "quantised"
    expected = WRITERS[name](original, folder)
    for each in original.glob("*"):
        if not (folder / each.name).exists():
            (folder / each.name).write_bytes(each.read_bytes())
    check(folder, expected, exact=name != "bitsandbytes-8")
    plain = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    numbers = {key: each.float() for key, each in load(folder, dtype="float32").model.state_dict().items()}
    for key, each in expected.items():
        assert torch.allclose(numbers[key], each.float(), rtol=1e-2, atol=1e-6), key
    plain.load_state_dict(numbers, strict=False)
    check_answers(folder, plain)


def check_answers(folder: Path, plain: Any) -> None:
    """Serve a folder over HTTP, cold, from the cache and several at once; tokens are the plain model's."""
    prompts = [[(7 * i + 3 * start) % 290 + 3 for i in range(40 + start)] for start in range(3)]
    expected = [greedy(plain, prompt, 6) for prompt in prompts]
    config = EngineConfig(model=str(folder), dtype="float32", num_blocks=64, block_size=8, threads=1)
    engine = AsyncEngine.from_config(config)
    try:
        with live_server(engine) as server, ThreadPoolExecutor() as pool:
            cold = [complete(server, prompt) for prompt in prompts]
            together = list(pool.map(partial(complete, server), prompts))
    finally:
        asyncio.run(engine.close())
    assert [tokens for tokens, _ in cold] == [tokens for tokens, _ in together] == expected
    assert all(cached >= 32 for _, cached in together)
