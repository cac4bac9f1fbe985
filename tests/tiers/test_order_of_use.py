# SPDX-License-Identifier: Apache-2.0
"""Of what an engine leaves behind, that goes first which was used longest ago, wherever it was used."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import save_tiny_model

from radixkv.entrypoints.llm import LLM
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.tiers.measured_tier import MeasuredTier

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
#: A record of the tiny model takes 6,272 bytes; with what lies beside it, so many of them.
CAP = 64 * 6400
TEXTS = range(12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model"), "llama"))


def cached_tokens(model: str, tier: str, texts: list[int]) -> list[int]:
    """Of each text, which has 48 tokens and one, asked for one after the other."""
    with LLM(model, kv_tier=tier, num_blocks=200, block_size=8, threads=1) as llm:
        prompts = [[text * 7 + 2, *(3 + (i * i + text) % 90 for i in range(48))] for text in texts]
        return [llm.generate([prompt], ONE_TOKEN)[0].num_cached_tokens for prompt in prompts]


@pytest.mark.parametrize("used_again", [pytest.param([0, 3], marks=pytest.mark.nightly), [5, 2, 9]])
def test_what_was_used_longest_ago_goes_first(model, tmp_path, monkeypatch, used_again):
    """Also if it was saved before others at the end of the process, or used in the pool alone."""
    monkeypatch.setattr(
        MeasuredTier, "_pays", lambda *_: True
    )  # a tiny model computes as fast as a disk reads
    folder = Path(tmp_path)
    cached_tokens(model, f"disk:{folder},max=1GiB,long=0", [*TEXTS, *used_again])
    order = [*(text for text in TEXTS if text not in used_again), *used_again]
    # A smaller cap at the restart, and what comes then.
    cached_tokens(model, f"disk:{folder},max={CAP},long=0", [20, 21, 22, 23])
    order += [20, 21, 22, 23]
    found = cached_tokens(model, f"disk:{folder},max={CAP},long=9999", order)
    assert found[0] == 0
    assert found[-4 - len(used_again) :] == [48] * (4 + len(used_again))
    assert found == sorted(found)
