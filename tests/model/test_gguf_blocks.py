# SPDX-License-Identifier: Apache-2.0
"""Models whose weights stay the blocks of a GGUF file, held to what transformers dequantises."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import ARCHITECTURES, read_model, write_family_gguf, write_llama_gguf
from nightly import by_day
from tiny_adapters import peft_model, save_adapter
from transformers import AutoModelForCausalLM

from radixkv import LLM, SamplingParams
from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError, ModelLoadError
from radixkv.model.attention.attention_hook import PlainCausalStep
from radixkv.model.loading.loader import LoadedModel, load_model
from radixkv.model.step_context import call_model

pytest.importorskip("numba")
from radixkv.model.cpu_layers.block_layers import BlockLayer, fuse_block_layers
from radixkv.model.cpu_layers.block_linear import BlockEmbedding, BlockLinear
from radixkv.model.cpu_layers.packed_linear import PackedLinear
from radixkv_kernels.cpu.linear.block_method import methods
from radixkv_kernels.cpu.linear.launch import RecordedLaunches

if not methods():
    pytest.skip("neither VNNI nor AVX2", allow_module_level=True)

#: As Q4_K_M files have them: six bits where it matters most, tied embeddings of six.
MIXED = {"rest": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}
TOKENS = [5, 90, 17, 230, 4, 4, 61, 300, 12, 8, 77, 150]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama_gguf(tmp_path_factory.mktemp("gguf") / "mixed.Q4_K_M.gguf", MIXED)


def load(path: Path, **options: object) -> LoadedModel:
    return load_model(EngineConfig(model=str(path), device="cpu", **options), show_progress=False)  # type: ignore[arg-type]


class Step(PlainCausalStep):
    """Attention as the fused layers call it."""

    def attend(self, *args: Any, window: int | None = None, **keywords: Any) -> torch.Tensor:
        return super().attend(*args, window=window, softcap=None, sinks=None, **keywords)


@torch.inference_mode()
def logits_of(loaded: LoadedModel, step: type[PlainCausalStep] = PlainCausalStep) -> torch.Tensor:
    positions = torch.arange(len(TOKENS))
    return call_model(loaded.model, torch.tensor(TOKENS), positions, None, step(positions))


@torch.inference_mode()
def dequantised_logits(path: Path, *, rounded: bool = False, model: Any = None) -> torch.Tensor:
    """Logits of transformers; with `rounded`, of products with inputs that int8 rows stand for."""
    model = model or AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, attn_implementation="eager", dtype=torch.float32
    )
    for module in model.modules():
        if rounded and isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: (round_rows(inputs[0]),))
    logits: torch.Tensor = model.eval()(torch.tensor([TOKENS]), use_cache=False).logits[0]
    return logits


def round_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows as int8 with a scale per 32 inputs says them."""
    groups = rows.unflatten(-1, (-1, 32))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return ((groups / scales).round() * scales).flatten(-2)


def deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_mixed_formats_compute_what_the_dequantised_model_does(
    mixed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded = load(mixed)
    assert capfd.readouterr() == ("", "")
    expected = dequantised_logits(mixed, rounded=True)
    assert deviation(expected, dequantised_logits(mixed)) < 0.1
    assert isinstance(loaded.model.model.embed_tokens, BlockEmbedding)
    assert isinstance(loaded.model.lm_head, BlockLinear)
    apart = logits_of(loaded)
    assert deviation(apart, expected) < 1e-2
    assert fuse_block_layers(loaded.model) == 2
    assert isinstance(loaded.model.model.layers[0], BlockLayer)
    fused = logits_of(loaded, Step)
    assert deviation(fused, expected) < 1e-2
    assert deviation(fused, apart) < 1e-2
    assert torch.equal(logits_of(load(mixed)), apart)


@pytest.mark.parametrize("architecture", by_day(ARCHITECTURES, "gemma3"))
def test_families_compute_what_their_dequantised_model_does(architecture: str, tmp_path: Path) -> None:
    path = write_family_gguf(tmp_path / f"{architecture}.gguf", architecture, MIXED)
    model = read_model(path)
    assert any(isinstance(module, BlockLinear) for module in model.modules())
    reference = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        config=model.config,
        attn_implementation="eager",
        dtype=torch.float32,
    )
    expected = dequantised_logits(path, rounded=True, model=reference)
    positions = torch.arange(len(TOKENS))
    with torch.inference_mode():
        found = call_model(model, torch.tensor(TOKENS), positions, None, PlainCausalStep(positions))
    assert deviation(found, expected) < 1e-2


def test_a_format_without_a_kernel_becomes_bfloat16(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kinds = {"rest": "Q8_0", "ffn_up": "TQ2_0", "attn_v": "BF16", "attn_k": "F16", "token_embd": "F16"}
    path = write_llama_gguf(tmp_path / "odd.gguf", kinds, tied=False)
    config = EngineConfig(model=str(path), device="cpu")
    loaded = load_model(config)
    assert "Rounded to bfloat16, since no kernel multiplies them: 2 of TQ2_0." in capfd.readouterr().err
    layer = loaded.model.model.layers[0]
    assert isinstance(layer.mlp.up_proj, PackedLinear)
    assert isinstance(layer.mlp.gate_proj, BlockLinear)
    assert deviation(logits_of(loaded), dequantised_logits(path)) < 0.1
    assert fuse_block_layers(loaded.model) == 0


def test_answers_are_the_same_hot_and_cold_alone_and_in_a_batch(mixed: Path) -> None:
    llm = LLM(str(mixed), device="cpu", num_blocks=64, deterministic=True, speculation="off")
    prompts = [TOKENS, TOKENS[:7], [*TOKENS, 3, 9], TOKENS[::-1], [7]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    together = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
    hot = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    assert hot == together
    reference = LLM(str(mixed), device="cpu", num_blocks=64, gguf="float32", speculation="off")
    expected = [each.outputs[0].token_ids for each in reference.generate(prompts, params)]
    assert sum(ours[0] == theirs[0] for ours, theirs in zip(together, expected, strict=True)) >= 4


def test_launches_into_memory_that_grew_are_not_made_again(
    mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer's memory grows while its launches are recorded: the old one is gone."""
    made: list[RecordedLaunches] = []
    run = RecordedLaunches.run

    def counted(launches: RecordedLaunches, inputs: Sequence[int]) -> None:
        made.append(launches)
        run(launches, inputs)

    monkeypatch.setattr(RecordedLaunches, "run", counted)
    loaded = load(mixed)
    assert fuse_block_layers(loaded.model) == 2
    found, counts = [], []
    for _ in range(3):
        found.append(logits_of(loaded, Step))
        counts.append(len(made))
    assert counts == [0, 2, 6]
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])


@pytest.mark.nightly
def test_adapters_stay_float32_beside_blocks(mixed: Path, tmp_path: Path) -> None:
    """As merged into the dequantised weights: of rows with the adapter, and of no others."""
    base = AutoModelForCausalLM.from_pretrained(mixed.parent, gguf_file=mixed.name, dtype=torch.float32)
    tuned = peft_model(base, 0, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
    folder = save_adapter(tuned, tmp_path / "a")
    expected = {"": dequantised_logits(mixed, rounded=True)}
    expected["a"] = dequantised_logits(mixed, rounded=True, model=tuned.merge_and_unload())
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    with LLM(str(mixed), device="cpu", num_blocks=16, lora=(f"a={folder}",), warm_up="off") as llm:
        assert isinstance(llm.engine.runner.model.model.layers[0], BlockLayer)
        ids = {llm.engine.add_request(TOKENS, params, lora=name): name for name in ("a", "", "a")}
        found: dict[str, Any] = {}
        while len(found) < len(ids):
            found.update({output.request_id: output for output in llm.engine.step().finished})
    for own, name in ids.items():
        told = torch.tensor([place.top[0].logprob for place in found[own].prompt_logprobs[1:]])
        wanted = torch.log_softmax(expected[name], -1).amax(-1)[:-1]
        assert deviation(told, wanted) < 1e-2


def test_options_choose(mixed: Path) -> None:
    packed = load(mixed, gguf="packed")
    plain = load(mixed, gguf="float32")
    assert isinstance(plain.model.model.embed_tokens, torch.nn.Embedding)
    assert plain.fingerprint != packed.fingerprint
    assert isinstance(load(mixed, dtype="float32").model.lm_head, torch.nn.Linear)
    with pytest.raises(ConfigError, match="--dtype and --quantization choose"):
        load(mixed, gguf="packed", quantization="int8")


def test_a_missing_tensor_is_named(mixed: Path, tmp_path: Path) -> None:
    path = tmp_path / "missing.gguf"
    data = mixed.read_bytes()
    assert data.count(b"blk.1.ffn_up.weight") == 1
    path.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(ModelLoadError, match=r"no tensors for 1 parameters .*layers\.1\.mlp\.up_proj"):
        load(path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    path = write_llama_gguf(tmp_path / "shape.gguf", {"rest": "Q8_0"}, layers=1)
    reader = gguf.GGUFReader(str(path), "r+")
    field = reader.fields["llama.feed_forward_length"]
    field.parts[field.data[0]][0] = 480
    reader.data.flush()
    del reader
    with pytest.raises(ModelLoadError, match=r"ffn_\w+\.weight .* has the shape \[.*512.*\]"):
        load(path)


def test_parts_of_a_split_file_are_one_model(mixed: Path, tmp_path: Path) -> None:
    write_llama_gguf(tmp_path / "tiny.gguf", MIXED, split=9)
    parts = sorted(tmp_path.iterdir())
    assert [part.name for part in parts] == [f"tiny-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    loaded = load(parts[1])
    assert loaded.name == "tiny"
    assert torch.equal(logits_of(loaded), logits_of(load(mixed)))
    parts[2].write_bytes(parts[2].read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"tiny-00003-of-00003\.gguf is a damaged"):
        load(parts[0])
    parts[2].unlink()
    with pytest.raises(ModelLoadError, match=r"1 of the 3 parts .* the first is tiny-00003-of-00003\.gguf"):
        load(parts[0])


def test_rotary_frequencies_are_divided_by_the_factors_of_the_file(mixed: Path, tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    plain = load(mixed).model.model.rotary_emb.inv_freq
    path = write_llama_gguf(tmp_path / "factors.gguf", MIXED, factors=factors)
    for kept in ("packed", "float32"):
        found = load(path, gguf=kept).model.model.rotary_emb.inv_freq
        assert torch.equal(found, plain / torch.from_numpy(factors))
    path = write_llama_gguf(tmp_path / "wrong.gguf", MIXED, factors=factors[:-1])
    with pytest.raises(ModelLoadError, match=r"has 31 values, and the model has \[32\] rotary frequencies"):
        load(path)
