# SPDX-License-Identifier: Apache-2.0
"""After a restart the same prompts hit from disk, however the process before has ended."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_models import save_tiny_model
from waiting import until

from radixkv.cli.bench.server_process import started_process
from radixkv.entrypoints.llm import LLM
from radixkv.errors import ConfigError
from radixkv.sampling.sampling_params import SamplingParams

PROMPTS = [[start + 7 * i % 90 for i in range(53)] for start in (5, 6, 7)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = {"num_blocks": 64, "block_size": 8, "threads": 1, "warm_up": "off"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model"), "llama"))


def answers(model: str, folder: Path, **options: Any) -> tuple[list[list[int]], list[int]]:
    """Tokens, and how many of each prompt's were cached, of an engine that lives for this alone."""
    with LLM(model, kv_tier=f"disk:{folder},max=1GiB", **OPTIONS | options) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    return [o.outputs[0].token_ids for o in outputs], [o.num_cached_tokens for o in outputs]


def test_the_next_engine_finds_what_was_cached(model, tmp_path):
    cold = answers(model, tmp_path)
    warm = answers(model, tmp_path)
    assert cold[0] == warm[0]
    assert max(cold[1]) < 48
    assert warm[1] == [48, 48, 48]


def test_a_model_with_states_resumes_from_the_disk(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    folder = save_tiny_model(tmp_path / "model", "lfm2")
    prompt = [5 + 7 * i % 90 for i in range(200)]
    options = {"num_blocks": 64, "block_size": 16, "threads": 1, "max_num_seqs": 1, "warm_up": "off"}
    outputs = []
    for _ in range(2):
        with LLM(str(folder), kv_tier=f"disk:{tmp_path / 'kv'},max=1GiB", **options) as llm:
            outputs += llm.generate([prompt], GREEDY)
            llm.engine.check()
    assert [output.num_cached_tokens for output in outputs] == [0, 192]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


@pytest.mark.parametrize(
    "other",
    [
        {"kv_cache_dtype": "int8"},
        pytest.param({"block_size": 16}, marks=pytest.mark.nightly),
        pytest.param({"deterministic": True}, marks=pytest.mark.nightly),
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_kind_of_blocks_is_not_found(model, tmp_path, other):
    answers(model, tmp_path)
    assert max(answers(model, tmp_path, **other)[1]) < 48
    assert answers(model, tmp_path, **other)[1] == [48, 48, 48]


def test_a_changed_weight_is_another_model(model, tmp_path):
    from safetensors.torch import load_file, save_file

    other = save_tiny_model(tmp_path / "other", "llama")
    cold = answers(str(other), tmp_path / "kv")
    weights = load_file(other / "model.safetensors")
    name = sorted(weights)[len(weights) // 2]
    weights[name].view(-1)[-1] += 0.25
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    changed = answers(str(other), tmp_path / "kv")
    assert max(changed[1]) < 48
    assert cold[1] == changed[1]


@pytest.mark.nightly
def test_deterministic_mode_wants_the_same_processor(model, tmp_path, monkeypatch):
    first = answers(model, tmp_path, deterministic=True)
    monkeypatch.setattr("radixkv.entrypoints.builder.computed_by", lambda *_: "another processor")
    assert max(answers(model, tmp_path, deterministic=True)[1]) < 48
    monkeypatch.undo()
    assert answers(model, tmp_path, deterministic=True) == (first[0], [48, 48, 48])


def test_two_engines_do_not_share_a_folder(model, tmp_path):
    with (
        LLM(model, kv_tier=f"disk:{tmp_path}", **OPTIONS),
        pytest.raises(ConfigError, match="is in use by process"),
    ):
        LLM(model, kv_tier=f"disk:{tmp_path}", **OPTIONS)


def complete(url: str, prompt: list[int]) -> tuple[str, int]:
    """Text, and cached tokens."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    cached: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return reply["choices"][0]["text"], cached


def test_servers_that_are_ended_and_killed(model, tmp_path):
    folder = tmp_path / "kv"
    arguments = [
        model,
        "--kv-tier",
        f"disk:{folder},max=1GiB,long=0",
        "--block-size",
        "8",
        "--num-blocks",
        "64",
    ]
    with LLM(model, kv_tier=arguments[2], **OPTIONS) as llm:
        [cold] = llm.generate(PROMPTS[:1], GREEDY)
    answer = cold.outputs[0].text
    assert cold.num_cached_tokens == 0
    with started_process(arguments) as server:
        assert complete(server.url, PROMPTS[0]) == (answer, 48)
        other = complete(server.url, PROMPTS[1])
        written = 2 * 6 * 8 * 3 * 2 * 16 * 4 * 2
        until(lambda: sum(path.stat().st_size for path in folder.glob("*.seg")) >= written)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with LLM(model, kv_tier=arguments[2], **OPTIONS) as llm:
        found = llm.generate(PROMPTS[:2], GREEDY)
    assert [each.outputs[0].text for each in found] == [answer, other[0]]
    assert [each.num_cached_tokens for each in found] == [48, 48]


@pytest.mark.nightly
def test_a_server_whose_disk_is_full_goes_on_without_it(model, tmp_path, capfd):
    """The system lets no file grow, as on a full disk: tier off, one warning, right answers."""
    folder = tmp_path / "kv"
    tier = f"disk:{folder},max=1GiB,long=0"
    arguments = [model, "--block-size", "8", "--num-blocks", "64", "--kv-tier", tier]
    prompts = [[(5 + number + 3 * i) % 90 + 1 for i in range(53)] for number in range(8)]
    with LLM(model, **OPTIONS) as llm:
        expected = [output.outputs[0].text for output in llm.generate(prompts, GREEDY)]
    with started_process(arguments) as server:
        limit = 150_000  # bytes: some blocks
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        assert [complete(server.url, prompt)[0] for prompt in prompts] == expected

        def figures() -> str:
            return httpx.get(f"{server.url}/metrics").raise_for_status().text

        until(lambda: 'radixkv_tier_up{tier="disk"} 0.0' in figures())
        assert 'radixkv_tier_errors_total{call="save",tier="disk"} 1.0' in figures()
        assert [complete(server.url, prompt)[0] for prompt in prompts] == expected
        assert httpx.get(f"{server.url}/health").status_code == 200
    assert capfd.readouterr().err.count("is off from now on") == 1
    assert sum(path.stat().st_size for path in folder.glob("*.seg")) <= limit
    with LLM(model, kv_tier=tier, **OPTIONS) as llm:  # with room again, what was written whole is found
        found = llm.generate(prompts, GREEDY)
    assert [output.outputs[0].text for output in found] == expected
    assert found[0].num_cached_tokens == 48
