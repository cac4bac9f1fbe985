# SPDX-License-Identifier: Apache-2.0
"""A tiny model that sees beside transformers' own: its prompts, and the answers to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_vision_models import Parts, Reference, save_tiny_vision_model, shown, template_ids, words

from radixkv import LLM, SamplingParams

COUNT = 6
ONE, TWO, SMALL = shown(1), shown(2), shown(3, (40, 72))


class Trial:
    """A family's folder, transformers' model of it, and engines on it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = save_tiny_vision_model(folder, kind)
        # Checkpoints of states are at multiples of 64 tokens.
        self.begin = words(1, 70 if kind.startswith("qwen3_5") else 21)
        with self.llm() as llm:
            self.processor: Any = llm.engine.model.image_processor
        self.reference = Reference(self.folder, self.processor)
        self.known: dict[Any, list[int]] = {}

    def llm(self, **options: Any) -> LLM:
        chosen: dict[str, Any] = {"max_model_len": 512, "num_blocks": 64, "warm_up": "off", **options}
        return LLM(str(self.folder), device="cpu", **chosen)

    def expected(self, parts: Parts) -> list[int]:
        name = repr(parts)
        if name not in self.known:
            self.known[name] = self.reference.answer(parts, COUNT)
        return self.known[name]


def prompt(parts: Parts) -> Any:
    ids, images = template_ids(parts)
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}} if images else ids


def answers(llm: LLM, *several: Parts, **params: Any) -> list[list[int]]:
    sampling = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, **params)
    outputs = llm.generate([prompt(parts) for parts in several], sampling)
    assert [output.error for output in outputs] == [None] * len(several)
    llm.engine.cache.check()
    return [list(output.outputs[0].token_ids) for output in outputs]


def num_encoded(llm: LLM) -> int:
    return llm.engine.runner.images.num_encoded  # type: ignore[attr-defined]


def dialogues(trial: Trial) -> list[Parts]:
    """Prompts with one image, with the next turn, with another image, and with several."""
    begin = trial.begin
    first: list[Any] = [begin, ONE, words(2, 9)]
    return [
        first,
        [*first[:-1], words(2, 9) + words(3, 12)],
        [begin, TWO, words(2, 9)],
        [*first, SMALL, words(4, 5)],
        [ONE, SMALL, words(5, 3), ONE],
    ]
