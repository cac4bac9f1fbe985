# SPDX-License-Identifier: Apache-2.0
"""Folders of PEFT: what is read of them, and all that is refused by name before anything is loaded."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_adapter_folders import damage, equals
from safetensors.torch import load_file, save_file
from tiny_adapters import peft_model, plain_model, save_adapter
from tiny_models import save_tiny_model

from radixkv.errors import AdapterLoadError
from radixkv.model.adapters.base_modules import BaseModules
from radixkv.model.adapters.lora_weights import read_adapter

Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("base") / "tiny-llama", "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def base(base_folder: Path) -> BaseModules:
    return BaseModules.of(plain_model(base_folder), ("tiny-llama",), base_folder)


@pytest.fixture(scope="module")
def good(base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = peft_model(base_folder, 1, target_modules=targets)
    return save_adapter(model, tmp_path_factory.mktemp("adapters") / "good")


def edited(good: Path, folder: Path, edit: Edit) -> Path:
    shutil.copytree(good, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    weights = load_file(folder / "adapter_model.safetensors")
    edit(config, weights)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "r": 3},
        {
            "target_modules": ["q_proj", "down_proj"],
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"down_proj": 3},
        },
        {"target_modules": ["v_proj"], "layers_to_transform": [1]},
        {"target_modules": ["up_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
        {"target_modules": r".*\.1\.self_attn\.[qk]_proj"},
        {"target_modules": ["o_proj", "k_proj"], "exclude_modules": ["model.layers.0.self_attn.k_proj"]},
    ],
    ids=str,
)
def test_changes_are_those_of_peft(
    options: dict[str, Any], base: BaseModules, base_folder: Path, tmp_path: Path
) -> None:
    model = peft_model(base_folder, 2, **options)
    found = read_adapter(save_adapter(model, tmp_path / "a"), base, 8)
    expected = {
        name.removeprefix("base_model.model."): module.get_delta_weight("default")
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert expected
    assert found.modules.keys() == expected.keys()
    for path, change in found.modules.items():
        torch.testing.assert_close(torch.from_numpy(change.up @ change.down), expected[path].detach())


def test_narrow_weights_are_widened(base: BaseModules, good: Path, tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):

        def narrow(
            config: dict[str, Any], weights: dict[str, torch.Tensor], dtype: torch.dtype = dtype
        ) -> None:
            weights.update({name: tensor.to(dtype) for name, tensor in weights.items()})

        folder = edited(good, tmp_path / str(dtype), narrow)
        found, wide = read_adapter(folder, base, 8), read_adapter(good, base, 8)
        path = "model.layers.0.mlp.up_proj"
        assert torch.equal(
            torch.from_numpy(found.modules[path].down),
            torch.from_numpy(wide.modules[path].down).to(dtype).float(),
        )


def test_equal_weights_have_one_identity(base: BaseModules, good: Path, tmp_path: Path) -> None:
    def retell(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        config["lora_dropout"] = 0.5
        config["target_modules"] = sorted(config["target_modules"])
        config["lora_alpha"] *= 2  # with the half of B: the same product
        weights.update({name: t / 2 if "lora_B" in name else t for name, t in weights.items()})

    def change(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        next(iter(weights.values()))[0, 0] += 1e-3

    identity = read_adapter(good, base, 8).identity
    assert read_adapter(edited(good, tmp_path / "same", retell), base, 8).identity == identity
    assert read_adapter(edited(good, tmp_path / "other", change), base, 8).identity != identity


def test_unchanged_files_are_known_again(
    base: BaseModules, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, now = shutil.copytree(good, tmp_path / "a"), time.time()
    assert read_adapter(folder, base, 8).files is None  # too new: a change may not show in their times
    monkeypatch.setattr(time, "time", lambda: now + 10)
    first = read_adapter(folder, base, 8)
    assert first.files is not None
    known = replace(first.files, identity="as before")
    again = read_adapter(folder, base, 8, known)
    assert again.identity == "as before"
    assert equals(again, first)
    file = folder / "adapter_model.safetensors"
    data, times = bytearray(file.read_bytes()), file.stat()
    data[-1] ^= 1
    time.sleep(0.02)
    file.write_bytes(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert read_adapter(folder, base, 8, known).identity not in ("as before", first.identity)
    file.unlink()
    with pytest.raises(AdapterLoadError, match="missing"):
        read_adapter(folder, base, 8, known)


def setting(name: str, value: Any) -> Edit:
    return lambda config, weights: config.__setitem__(name, value)


def first_tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    def edit(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        name = next(name for name in weights if "1.self_attn.q_proj.lora_A" in name)
        weights[name] = change(weights[name]).contiguous()

    return edit


REFUSED: dict[str, tuple[Edit, str]] = {
    "DoRA": (setting("use_dora", True), "use_dora"),
    "saved modules": (setting("modules_to_save", ["lm_head"]), "modules_to_save"),
    "biases": (setting("bias", "all"), "bias"),
    "biases of B": (setting("lora_bias", True), "lora_bias"),
    "no invocation": (setting("alora_invocation_tokens", []), "alora_invocation_tokens"),
    "invocation as text": (setting("alora_invocation_tokens", "<x>"), "alora_invocation_tokens"),
    "a later PEFT's": (setting("use_something_new", True), "use_something_new"),
    "PiSSA": (setting("init_lora_weights", "pissa"), "init_lora_weights"),
    "no LoRA": (setting("peft_type", "IA3"), "peft_type"),
    "classifier": (setting("task_type", "SEQ_CLS"), "task_type"),
    "another base": (setting("base_model_name_or_path", "org/other-model"), "trained on 'org/other-model'"),
    "unknown target": (setting("target_modules", ["q_proj", "c_attn"]), "'c_attn'"),
    "head": (setting("target_modules", ["q_proj", "lm_head"]), "'lm_head'"),
    "hanging pattern": (setting("target_modules", r"(.*.*)*x" * 8), "pattern|name no module"),
    "no pattern": (setting("target_modules", "(["), "pattern"),
    "rank": (setting("r", 5), "shapes"),
    "rank too large": (setting("r", 64), "max_lora_rank"),
    "rank of text": (setting("r", "4"), "r must be"),
    "alpha": (setting("lora_alpha", float("nan")), "lora_alpha"),
    "fewer layers": (setting("layers_to_transform", [0]), "leaves out"),
    "shape": (first_tensor(lambda t: t[:, :-1]), "1.self_attn.q_proj have the shapes"),
    "infinite": (first_tensor(lambda t: t / 0), "finite"),
    "integers": (first_tensor(lambda t: t.to(torch.int32)), "type I32"),
    "missing": (lambda config, weights: weights.__delitem__(min(weights)), "one of the two"),
    "magnitudes": (
        lambda c, w: w.update({"base_model.model.x.lora_magnitude": torch.ones(2)}),
        "DoRA",
    ),
    "embedding": (lambda c, w: w.update({"base_model.model.lm_head.weight": torch.ones(2)}), "lm_head"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str, base: BaseModules, good: Path, tmp_path: Path) -> None:
    edit, said = REFUSED[case]
    with pytest.raises(AdapterLoadError, match=said):
        read_adapter(edited(good, tmp_path / "a", edit), base, 16)


def test_pickles_links_and_missing_files_are_refused(base: BaseModules, good: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(good, tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterLoadError, match="only weights in safetensors"):
        read_adapter(folder, base, 16)
    (folder / "adapter_model.safetensors").symlink_to("/etc/passwd")
    with pytest.raises(AdapterLoadError, match="outside"):
        read_adapter(folder, base, 16)
    with pytest.raises(AdapterLoadError, match="can't be read"):
        read_adapter(tmp_path / "nothing", base, 16)


def test_damaged_files_never_give_another_adapter(base: BaseModules, good: Path, tmp_path: Path) -> None:
    """Each is refused, or it is another adapter by its identity: its numbers were what was hit."""
    counts = damage(good, tmp_path / "a", base, 90, 5)
    assert counts["refused"] > 30
