# SPDX-License-Identifier: Apache-2.0
"""Models that see where many things meet: adapters, tenants, guesses, tiny pools, tiers, aborts and restarts.

Each seed draws an engine and its requests. Every answer is compared with that of an engine with room
for all that neither caches nor guesses, and answers one request at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nightly import by_day, tried

pytest.importorskip("numba")
pytest.importorskip("PIL")

from seeing_hash_model import check_nothing_is_left, encode_layer_by_layer
from tiny_adapters import peft_model, save_adapter
from tiny_vision_models import Parts, shown, words
from vision_trials import Trial, prompt
from waiting import until

from radixkv import LLM, Request, SamplingParams

KINDS = ("gemma3", "gemma4", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "mistral3", "lfm3_vl")
PICTURES = [shown(seed, size) for seed, size in enumerate([(96, 64), (40, 72), (64, 64), (96, 64), (48, 48)])]
TEXT_LAYERS = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|up_proj|gate_proj|down_proj)"
KEPT = 256 * 1024**2


@dataclass(frozen=True)
class Ask:
    parts: Parts
    params: SamplingParams
    adapter: str
    namespace: str
    aborted_after: int | None


class Crossing:
    """The engine and the requests of one seed."""

    def __init__(self, kind: str, seed: int, folder: Path) -> None:
        self.random = random = np.random.default_rng(seed)
        self.trial = Trial(kind, folder / "base")
        self.adapters: list[str] = []
        self.options: dict[str, Any] = {"max_model_len": 384}
        if random.random() < 0.5 and kind not in ("lfm3_vl",):
            model = peft_model(self.trial.reference.model, seed, target_modules=TEXT_LAYERS)
            self.options["lora"] = (f"sight={save_adapter(model, folder / 'adapter')}",)
            self.adapters = ["sight"]
        elif random.random() < 0.5:
            self.options["quantization"] = "int8"
        self.small: dict[str, Any] = {
            **self.options,
            "num_blocks": int(random.integers(26, 40)),
            "max_num_seqs": int(random.integers(2, 6)),
            "max_num_batched_tokens": int(random.choice([16, 24, 64, 256])),
            "speculation": str(random.choice(["auto", "off"])),
            "kv_tier": (f"disk:{folder / 'tier'},8m",) if random.random() < 0.7 else (),
        }
        if kind in ("gemma3", "gemma4", "lfm3_vl") and seed % 2:
            self.small["window_memory"] = 1 << 19
        self.in_pieces = random.random() < 0.5
        self._told: list[list[Any]] = []

    def ask(self) -> Ask:
        """Return a new conversation, or the next turn of one, or one asked before."""
        random = self.random
        if self._told and random.random() < 0.7:
            parts = list(self._told[int(random.integers(len(self._told)))])
            if random.random() < 0.6:
                parts += self._turn()
        else:
            parts = [words(int(random.integers(3)), int(random.integers(5, 60))), *self._turn()]
        while self._length(parts) > 320:
            parts = parts[:-2]
        self._told = [*self._told[-6:], parts]
        return Ask(
            parts,
            SamplingParams(
                temperature=0,
                max_tokens=int(random.integers(1, 14)),
                ignore_eos=True,
                n=1 + int(random.random() < 0.1),
            ),
            str(random.choice(["", *self.adapters])),
            str(random.choice(["", "ada"])),
            int(random.integers(0, 6)) if random.random() < 0.15 else None,
        )

    def _turn(self) -> list[Any]:
        picture = PICTURES[int(self.random.integers(len(PICTURES)))]
        return [picture, words(int(self.random.integers(9)), int(self.random.integers(1, 20)))]

    def _length(self, parts: Parts) -> int:
        return sum(
            len(part)
            if isinstance(part, list)
            else 2 + self.trial.processor.num_tokens(part.width, part.height)
            for part in parts
        )

    def request(self, ask: Ask) -> Request:
        given = prompt(ask.parts)
        ids, images = self.trial.processor.place(
            given["prompt_token_ids"], given["multi_modal_data"]["image"]
        )
        return Request(ids, ask.params, images=images, lora=ask.adapter, namespace=ask.namespace)


def expected(crossing: Crossing, asks: list[Ask]) -> dict[Any, list[int]]:
    """Return the answers of an engine with room for all."""
    known: dict[Any, list[int]] = {}
    options = {**crossing.options, "num_blocks": 400, "enable_prefix_caching": False, "speculation": "off"}
    with crossing.trial.llm(**options) as llm:
        for ask in asks:
            key = repr(ask.parts), ask.adapter, ask.params.max_tokens
            if key not in known:
                request = crossing.request(ask)
                llm.engine.add(request)
                while not request.is_finished:
                    result = llm.engine.step()
                (output,) = result.finished
                assert output.error is None
                known[key] = list(output.outputs[0].token_ids)
    return known


def serve(crossing: Crossing, llm: LLM, asks: list[Ask], known: dict[Any, list[int]]) -> None:
    """Let an engine answer, a few at a time, and check it after each step."""
    engine = llm.engine
    if crossing.in_pieces:
        encode_layer_by_layer(engine)
    waiting, running = list(asks), dict[str, tuple[Ask, int]]()
    while waiting or running:
        while waiting and len(running) < 6:
            ask = waiting.pop(0)
            request = crossing.request(ask)
            engine.add(request)
            running[request.request_id] = ask, 0
        for output in engine.step().finished:
            ended = running.pop(output.request_id, None)
            if ended is not None:
                ask, _ = ended
                assert output.error is None
                for sample in output.outputs:
                    key = repr(ask.parts), ask.adapter, ask.params.max_tokens
                    assert list(sample.token_ids) == known[key]
        engine.check()
        for name, (ask, steps) in list(running.items()):
            running[name] = ask, steps + 1
            if steps == ask.aborted_after:
                engine.abort(name)
                del running[name]

    def is_free() -> bool:
        engine.step()  # takes what a tier has saved
        engine.check()
        return not engine.has_work and engine.cache.stats.held_blocks == 0

    until(is_free)
    check_nothing_is_left(engine, KEPT)


@pytest.mark.parametrize(
    ("kind", "seed"),
    by_day([(kind, seed) for kind in KINDS for seed in range(4)], ("gemma3", 0)),
)
def test_answers_are_those_of_an_engine_with_room_for_all(tmp_path: Path, kind: str, seed: int) -> None:
    crossing = Crossing(kind, seed, tmp_path)
    asks = [crossing.ask() for _ in range(tried(24))]
    known = expected(crossing, asks)
    half = len(asks) // 2
    for some in (asks[:half], asks[half:]):  # a restart in between
        with crossing.trial.llm(**crossing.small) as llm:
            serve(crossing, llm, some, known)
