# SPDX-License-Identifier: Apache-2.0
"""Adapters of models that see: the answers of PEFT, beside those of the base in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nightly import by_day

pytest.importorskip("numba")
pytest.importorskip("PIL")

from tiny_adapters import peft_model, save_adapter
from tiny_vision_models import Parts
from vision_trials import COUNT, Trial, dialogues, num_encoded, prompt

from radixkv import LLM, Request, SamplingParams
from radixkv.errors import AdapterLoadError

GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
TEXT_LAYERS = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|up_proj|gate_proj|down_proj)"


class Trained:
    """A tiny model that sees, with an adapter of the layers that PEFT is told to train."""

    def __init__(self, folder: Path, kind: str, layers: Any = TEXT_LAYERS) -> None:
        self.trial = Trial(kind, folder / "base")
        self.plain = [self.trial.expected(parts) for parts in dialogues(self.trial)]
        base = self.trial.reference.model
        model = peft_model(base, 1, target_modules=layers)
        self.spec = f"sight={save_adapter(model, folder / 'adapter')}"
        self.trial.reference.model = model.base_model.model
        self.trial.known.clear()
        self.changed = [self.trial.expected(parts) for parts in dialogues(self.trial)]


def request(llm: LLM, parts: Parts, adapter: str) -> Request:
    given = prompt(parts)
    processor: Any = llm.engine.model.image_processor
    ids, images = processor.place(given["prompt_token_ids"], given["multi_modal_data"]["image"])
    return Request(ids, GREEDY, images=images, lora=adapter)


def answers(llm: LLM, *requests: Request) -> list[list[int]]:
    found: dict[str, Any] = {}
    for each in requests:
        llm.engine.add(each)
    while len(found) < len(requests):
        found |= {output.request_id: output for output in llm.engine.step().finished}
        llm.engine.cache.check()
    return [list(found[each.request_id].outputs[0].token_ids) for each in requests]


@pytest.mark.parametrize(
    "kind", by_day(("llava", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "gemma4"), "llava")
)
def test_adapters_and_the_base_see_in_one_batch(tmp_path: Path, kind: str) -> None:
    trained = Trained(tmp_path, kind)
    assert trained.plain != trained.changed
    with trained.trial.llm(lora=(trained.spec,), max_num_batched_tokens=40) as llm:
        for _ in range(2):
            parts = dialogues(trained.trial)
            both = [request(llm, each, name) for each in parts for name in ("sight", "")]
            found = answers(llm, *both)
            assert found[::2] == trained.changed
            assert found[1::2] == trained.plain
        assert num_encoded(llm) == 6  # once for each namespace, as an adapter's prefixes are its own


def test_an_adapter_of_the_tower_is_refused_by_name(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "llava", ["q_proj", "v_proj"])  # which CLIP's layers are called, too
    with pytest.raises(AdapterLoadError, match=r"the tower that encodes images .*vision_tower"):
        trained.trial.llm(lora=(trained.spec,))
