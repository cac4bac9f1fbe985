# SPDX-License-Identifier: Apache-2.0
"""Families with state layers: a runner's logits against transformers', in pieces, from a kept state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from nightly import by_day

pytest.importorskip("numba")

from hand_made_steps import HandMade
from safetensors import safe_open
from tiny_configs import HYBRID_FAMILIES, tiny_config
from tiny_models import save_random_model, save_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError
from radixkv.model.loading.loader import load_model
from radixkv.model.make_runner import make_runner
from radixkv_kernels.states import GRID

LENGTH = 2 * GRID + 12
#: Families whose logits have the same bits in any pieces in deterministic mode.
SAME_BITS = {"lfm2", "qwen3_5_text", "olmo_hybrid", "nemotron_h", "bamba", "falcon_h1"} | {
    "mamba",
    "mamba2",
    "falcon_mamba",
}


def config_of(folder: Path, **changes: object) -> EngineConfig:
    options = {"device": "cpu", "num_blocks": 16, "max_num_seqs": 2, "warm_up": "off", **changes}
    return EngineConfig.from_options(str(folder), options)


@pytest.mark.parametrize("model_type", by_day(HYBRID_FAMILIES, "lfm2", "qwen3_next", "falcon_h1"))
def test_logits_are_those_of_transformers_in_pieces_and_from_a_kept_state(
    model_type: str, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, model_type)
    tokens = np.random.default_rng(0).integers(3, 320, LENGTH).tolist()
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        positions = torch.arange(LENGTH)[None]
        expected = reference(
            input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=False
        ).logits[0]
    config = config_of(tmp_path, deterministic=model_type in SAME_BITS)
    runner, _ = make_runner(config, load_model(config, show_progress=False))
    whole = HandMade(runner, tokens).run([LENGTH], saves={GRID: 5, 2 * GRID: 6})
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-3)
    assert torch.equal(whole.argmax(-1), expected.argmax(-1))
    pieces = HandMade(runner, tokens).run([50, 51, GRID - 1, GRID, GRID + 1, LENGTH])
    state = runner.states.save([6]).result()
    runner.states.load([7], list(state))
    resumed = HandMade(runner, tokens, base=2 * GRID, slot=7).run([LENGTH - 5, LENGTH])
    if model_type in SAME_BITS:
        assert torch.equal(pieces, whole)
        assert torch.equal(resumed, whole[2 * GRID :])
    else:
        torch.testing.assert_close(pieces, whole, rtol=0, atol=2e-4)
        torch.testing.assert_close(resumed, whole[2 * GRID :], rtol=0, atol=2e-4)
    wrong = HandMade(runner, tokens, base=2 * GRID, slot=5).run([LENGTH])
    assert (wrong - whole[2 * GRID :]).abs().max() > 1e-2


def test_a_checkpoint_that_sees_images_loads_as_its_text_half(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "qwen3_5",
        text_config=tiny_config("qwen3_5_text").to_dict(),
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
        },
        **{f"{name}_token_id": at for at, name in enumerate(("image", "video", "vision_start"), 10)},
    )
    save_random_model(tmp_path, config)
    loaded = load_model(config_of(tmp_path), show_progress=False)
    assert type(loaded.model).__name__ == "Qwen3_5ForCausalLM"
    assert {shape.kind for shape in loaded.attention.states} == {"conv", "delta"}
    with safe_open(tmp_path / "model.safetensors", "pt") as files:
        name = next(each for each in files.keys() if each.endswith("layers.0.linear_attn.A_log"))  # noqa: SIM118
        assert torch.equal(files.get_tensor(name), loaded.model.model.layers[0].linear_attn.A_log)


def test_memory_of_states_that_is_too_small_is_refused_with_the_numbers(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "lfm2")
    config = config_of(tmp_path, state_memory=1000)
    with pytest.raises(ConfigError, match=r"one request needs 2 of 0\.0 MiB.*--state-memory"):
        make_runner(config, load_model(config, show_progress=False))
    config = config_of(tmp_path, block_size=128)
    with pytest.raises(ConfigError, match="--block-size 128 is too large for a model with states"):
        make_runner(config, load_model(config, show_progress=False))


def test_deterministic_mode_is_refused_where_it_does_not_hold(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "zamba2")
    config = config_of(tmp_path, deterministic=True)
    with pytest.raises(ConfigError, match="--deterministic does not hold for the family zamba2"):
        make_runner(config, load_model(config, show_progress=False))


def test_quantised_weights_serve_state_layers(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "mamba2")
    tokens = np.random.default_rng(0).integers(3, 320, LENGTH).tolist()
    config = config_of(tmp_path, quantization="int8")
    runner, _ = make_runner(config, load_model(config, show_progress=False))
    whole = HandMade(runner, tokens).run([LENGTH])
    pieces = HandMade(runner, tokens).run([50, GRID + 1, LENGTH])
    assert torch.isfinite(whole).all()
    torch.testing.assert_close(pieces, whole, rtol=0, atol=2e-4)
