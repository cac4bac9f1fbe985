# SPDX-License-Identifier: Apache-2.0
"""Weights that change while an engine runs: tokens are those of a fresh engine, nothing old is found."""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import save_tiny_model

from radixkv import LLM, SamplingParams
from radixkv.errors import EnginePausedError, InvalidRequestError, WeightUpdateError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = [7 * i % 250 for i in range(70)]
OTHER = [*PROMPT[:40], *range(30)]
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "num_blocks": 64,
    "warm_up": "off",
    "speculation": "off",
    "max_num_batched_tokens": 48,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """Two folders of a family, with other weights each."""
    made: dict[str, tuple[Path, Path]] = {}

    def of(name: str = "llama") -> tuple[Path, Path]:
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            made[name] = tuple(save_tiny_model(root / str(seed), name, seed) for seed in (0, 1))  # type: ignore
        return made[name]

    return of


@pytest.fixture
def llm(folders: Callable[..., tuple[Path, Path]]) -> Iterator[LLM]:
    with LLM(str(folders()[0]), **SETTINGS) as llm:
        yield llm


def tokens(llm: LLM, *prompts: list[int], params: SamplingParams = GREEDY) -> list[list[int]]:
    found = llm.generate(list(prompts), params, progress=False)
    llm.engine.check()
    return [list(sample.token_ids) for output in found for sample in output.outputs]


def fresh(
    folder: Path, *prompts: list[int], params: SamplingParams = GREEDY, **changes: Any
) -> list[list[int]]:
    with LLM(str(folder), **(SETTINGS | changes)) as llm:
        return tokens(llm, *prompts, params=params)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


KINDS = [
    ("llama", {}),
    ("llama", {"deterministic": True}),
    ("llama", {"dtype": "bfloat16"}),
    ("llama", {"quantization": "int8"}),
    ("qwen3", {}),
]
MORE_KINDS = [
    ("llama", {"quantization": "fp8"}),
    ("gemma2", {}),
    ("mixtral", {}),
    ("mamba2", {}),
]


@pytest.mark.parametrize(
    ("name", "changes"),
    [*KINDS, *(pytest.param(*kind, marks=pytest.mark.nightly) for kind in MORE_KINDS)],
    ids=str,
)
def test_tokens_after_an_update_are_those_of_a_fresh_engine(folders, name, changes):
    old, new = folders(name)
    with LLM(str(old), **(SETTINGS | changes)) as llm:
        before = tokens(llm, PROMPT, OTHER)
        fingerprint = llm.update_weights(new)
        assert llm.engine.model.fingerprint == fingerprint
        output = llm.generate([PROMPT], GREEDY, progress=False)[0]
        assert output.num_cached_tokens == 0
        expected = fresh(new, PROMPT, OTHER, **changes)
        assert expected != before
        assert tokens(llm, PROMPT, OTHER) == expected  # hot
        llm.update_weights(tensors_of(old))
        assert tokens(llm, PROMPT, OTHER) == before


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"deterministic": True}], ids=str)
def test_a_folder_may_be_written_over_after_an_update(folders, tmp_path, changes):
    old, new = folders()
    folder = shutil.copytree(new, tmp_path / "saved")
    with LLM(str(old), **(SETTINGS | changes)) as llm:
        llm.update_weights(folder)
        before = tokens(llm, PROMPT)
        shutil.copytree(old, folder, dirs_exist_ok=True)  # the files stay, with other contents
        llm.engine.cache.reset()
        assert tokens(llm, PROMPT) == before
        if sys.platform == "linux":
            gc.collect()
            assert str(folder) not in Path("/proc/self/maps").read_text()  # none would end the process


def test_logprobs_of_a_prompt_are_of_one_model(llm, folders):
    """An update while some chunks of a prompt have been computed."""
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    prompt = (PROMPT * 3)[:190]
    llm.engine.add_request(prompt, params)
    llm.engine.step()
    llm.update_weights(folders()[1])
    finished = []
    while llm.engine.has_work:
        finished += llm.engine.step().finished
    with LLM(str(folders()[1]), **SETTINGS) as other:
        expected = other.generate([prompt], params, progress=False)[0].prompt_logprobs
    assert [output.prompt_logprobs for output in finished] == [expected]


def test_a_generator_of_tensors_in_another_dtype(llm, folders):
    _, new = folders()
    llm.update_weights((name, tensor.to(torch.bfloat16)) for name, tensor in tensors_of(new).items())
    rounded = {name: tensor.to(torch.bfloat16).float() for name, tensor in tensors_of(new).items()}
    first = tokens(llm, PROMPT)
    llm.update_weights(rounded)
    assert tokens(llm, PROMPT) == first


def test_samples_of_a_group_share_the_prompt_after_an_update(llm, folders):
    params = SamplingParams(temperature=1.0, n=4, max_tokens=8, seed=5, ignore_eos=True)
    tokens(llm, PROMPT, params=params)
    llm.update_weights(folders()[1])
    computed = llm.engine.stats().computed_tokens
    found = tokens(llm, PROMPT, params=params)
    assert llm.engine.stats().computed_tokens - computed <= len(PROMPT) + 4 * 8
    assert found == fresh(folders()[1], PROMPT, params=params)


def test_kept_streams_go_on_by_the_new_weights(llm, folders):
    """Their tokens from then on are those of a prompt of all tokens before."""
    stream = llm.stream(PROMPT, GREEDY)
    got: list[int] = []
    for delta in stream:
        got += delta.token_ids
        if len(got) >= 4:
            break
    llm.update_weights(folders()[1], mode="keep")
    known = len(got)
    for delta in stream:
        got += delta.token_ids
    llm.engine.check()
    [rest] = fresh(
        folders()[1],
        [*PROMPT, *got[:known]],
        params=SamplingParams(temperature=0.0, max_tokens=12 - known, ignore_eos=True),
    )
    assert got[known:] == rest


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_streams_end_before_an_update(llm, folders, mode):
    before = fresh(folders()[0], PROMPT)[0]
    stream = llm.stream(PROMPT, GREEDY)
    got, last = list(next(stream).token_ids), None
    llm.update_weights(folders()[1], mode=mode)
    for last in stream:
        got += last.token_ids
    assert last is not None
    assert last.finish_reason == {"abort": "abort", "wait": "length"}[mode]
    assert got == before[: len(got)]
    assert tokens(llm, PROMPT) == fresh(folders()[1], PROMPT)


def test_pins_and_public_text_hold_no_old_blocks(llm, folders):
    cache = llm.engine.cache
    cache.publish(PROMPT[:32])
    tokens(llm, PROMPT)
    assert cache.pin(PROMPT[:48]) is not None
    llm.update_weights(folders()[1])
    cache = llm.engine.cache
    assert not cache.pins()
    assert cache.stats.free_blocks == cache.num_blocks
    tokens(llm, PROMPT)
    [output] = llm.generate([PROMPT], GREEDY, namespace="somebody else", progress=False)
    assert output.num_cached_tokens == 32  # still public


def test_names_of_the_earlier_model_mean_the_new_one(llm, folders):
    earlier = llm.engine.cache.namespace_key("alice")
    llm.update_weights(folders()[1])
    now = llm.engine.cache.namespace_key("alice")
    assert now != earlier
    assert llm.engine.cache.namespace_key(earlier) == now
    with pytest.raises(InvalidRequestError, match="names the model"):
        llm.engine.cache.namespace_key((*earlier[:3], "another"))


def test_counters_go_on(llm, folders):
    tokens(llm, PROMPT)
    tokens(llm, PROMPT)
    before = llm.engine.cache.stats
    llm.update_weights(folders()[1])
    after = llm.engine.cache.stats
    assert (after.acquires, after.hit_tokens) == (before.acquires, before.hit_tokens)
    assert before.hit_tokens > 0


def test_a_tier_gives_no_old_blocks(folders, tmp_path):
    old, new = folders()
    settings = SETTINGS | {"kv_tier": [f"disk:{tmp_path},max=64MiB"], "num_blocks": 12}
    with LLM(str(old), **settings) as llm:
        before = tokens(llm, PROMPT, OTHER)
        for _ in range(2):
            llm.update_weights(new)
            assert tokens(llm, PROMPT, OTHER) == fresh(new, PROMPT, OTHER)
            tokens(llm, [9, *OTHER], [8, *PROMPT])
            llm.update_weights(old)
            assert tokens(llm, PROMPT, OTHER) == before


@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep_and_wake(llm, folders, level):
    before = tokens(llm, PROMPT)
    llm.engine.pause("keep")
    assert not llm.is_sleeping
    llm.engine.resume()
    llm.sleep(level)
    assert llm.is_sleeping
    with pytest.raises(EnginePausedError):
        llm.generate([PROMPT], GREEDY, progress=False)
    llm.wake_up(["weights"])
    llm.wake_up(["kv_cache"])
    assert not llm.is_sleeping
    assert tokens(llm, PROMPT) == before


def test_weights_that_came_in_sleep_serve_after_it(llm, folders):
    tokens(llm, PROMPT)
    llm.sleep(2)
    llm.wake_up(["weights"])
    llm.update_weights(tensors_of(folders()[1]))
    llm.wake_up()
    assert tokens(llm, PROMPT) == fresh(folders()[1], PROMPT)
    llm.sleep(2)
    llm.wake_up()
    assert tokens(llm, PROMPT) == fresh(folders()[1], PROMPT)


def test_streams_kept_in_sleep_go_on(llm):
    [whole] = tokens(llm, PROMPT)
    stream = llm.stream(PROMPT, GREEDY)
    got = list(next(stream).token_ids)
    llm.sleep(2, mode="keep")
    with pytest.raises(EnginePausedError, match="wake"):
        next(llm.stream(PROMPT, GREEDY))
    llm.wake_up()
    for delta in stream:
        got += delta.token_ids
    assert got == whole


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


NORM = "model.norm.weight"
BAD = {
    "missing": (without(NORM), "missing"),
    "half": (lambda tensors: list(tensors.items())[:3], "missing"),
    "shape": (lambda tensors: tensors | {NORM: torch.ones(3)}, "can't be read|do not fit"),
    "dtype": (lambda tensors: tensors | {NORM: torch.ones(64, dtype=torch.int64)}, "torch.int64"),
    "unknown": (lambda tensors: tensors | {"model.nrom.weight": torch.ones(3)}, "model.nrom.weight"),
    "no tensor": (lambda tensors: tensors | {NORM: [1.0]}, "no torch.Tensor"),
    "no pairs": (lambda tensors: [3], "no pair"),
    "nothing": (lambda tensors: {}, "no tensor was given"),
    "twice": (lambda tensors: [*tensors.items(), *tensors.items()], "twice"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_weights_leave_the_earlier_ones(llm, folders, case):
    change, message = BAD[case]
    before = tokens(llm, PROMPT)
    with pytest.raises(WeightUpdateError, match=message):
        llm.update_weights(change(tensors_of(folders()[1])))
    assert llm.generate([PROMPT], GREEDY, progress=False)[0].num_cached_tokens == len(PROMPT) - 1
    assert tokens(llm, PROMPT) == before


def test_a_generator_that_fails_leaves_the_earlier_ones(llm, folders):
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(tensors_of(folders()[1]).items())[:2]
        raise RuntimeError("the trainer died")

    before = tokens(llm, PROMPT)
    with pytest.raises(RuntimeError, match="trainer"):
        llm.update_weights(broken())
    assert tokens(llm, PROMPT) == before


def test_other_models_and_missing_folders_are_refused(llm, folders, tmp_path):
    before = tokens(llm, PROMPT)
    with pytest.raises(WeightUpdateError, match="another model"):
        llm.update_weights(folders("qwen3")[0])
    with pytest.raises(WeightUpdateError, match="no file or folder"):
        llm.update_weights(tmp_path / "none")
    cut = tmp_path / "cut"
    shutil.copytree(folders()[1], cut)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(WeightUpdateError, match="damaged"):
        llm.update_weights(cut)
    with pytest.raises(InvalidRequestError, match="mode"):
        llm.update_weights(folders()[1], mode="now")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="level"):
        llm.sleep(3)
    with pytest.raises(InvalidRequestError, match="tags"):
        llm.wake_up(["adapters"])  # type: ignore[list-item]
    assert tokens(llm, PROMPT) == before
