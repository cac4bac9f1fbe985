# SPDX-License-Identifier: Apache-2.0
"""Updates, pauses, sleep and restarts at random beside requests: a token is of the weights in force."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fuzzing import examples
from tiny_models import save_tiny_model

from radixkv import LLM, SamplingParams
from radixkv.scheduling.request import Request

SETTINGS: dict[str, Any] = {"device": "cpu", "warm_up": "off", "max_num_batched_tokens": 48}
#: Family, settings: small pools (preemption), tiers, windows, states, drafts.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_blocks": 14, "speculation": "off"}),
    "drafts": ("llama", {"num_blocks": 20}),
    "tiers": ("llama", {"num_blocks": 12, "kv_tier": ["disk:{folder},max=64MiB"]}),
    "memory": ("llama", {"num_blocks": 12, "kv_tier": ["host:64MiB"]}),
    "windows": ("gemma2", {"num_blocks": 24}),
    "states": ("qwen3_next", {"num_blocks": 24}),
    "mamba": ("mamba2", {"num_blocks": 24}),
}


@dataclass
class Asked:
    """A request: its prompt, and each sample's tokens with the weights that gave them."""

    prompt: list[int]
    tenant: str
    got: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    aborted: bool = False


class Fuzz:
    """An engine, what it was asked, and engines that never change to compare with."""

    def __init__(self, folder: Path, name: str, settings: dict[str, Any], seed: int) -> None:
        self.random = random.Random(seed)
        self.weights = [save_tiny_model(folder / str(each), name, each) for each in (0, 1)]
        self.scratch = folder / "scratch"
        tiers = [tier.format(folder=folder / "tier") for tier in settings.get("kv_tier", ())]
        self.settings = SETTINGS | settings | ({"kv_tier": tiers} if tiers else {})
        self.version = 0
        self.llm = LLM(str(self.weights[0]), **self.settings)
        plain = SETTINGS | {"num_blocks": 256, "speculation": "off"}
        self.fresh = [LLM(str(each), **plain) for each in self.weights]
        self.asked: dict[str, Asked] = {}
        self.families = [[self.random.randrange(3, 250) for _ in range(90)] for _ in range(3)]

    def close(self) -> None:
        for llm in (self.llm, *self.fresh):
            llm.close()

    def ask(self) -> None:
        chance = self.random
        prompt = chance.choice(self.families)[: chance.randrange(1, 90)]
        prompt = [*prompt, *(chance.randrange(3, 250) for _ in range(chance.randrange(1, 12)))]
        tenant = chance.choice(["alice", "bob"])
        params = SamplingParams(
            temperature=0.0, max_tokens=chance.randrange(1, 14), n=chance.choice([1, 1, 2])
        )
        request = Request(prompt, params, namespace=tenant, stream=True, background=chance.random() < 0.2)
        self.asked[self.llm.engine.add(request)] = Asked(prompt, tenant)

    def step(self) -> None:
        if self.llm.engine.has_work:
            self.llm.engine.wait()
            self.take(self.llm.engine.step())

    def take(self, result: Any) -> None:
        for delta in result.deltas:
            asked = self.asked[delta.request_id]
            asked.got.setdefault(delta.index, []).extend((token, self.version) for token in delta.token_ids)
            assert delta.error is None, delta.error
            if delta.finish_reason is not None:
                asked.ended.add(delta.index)
                asked.aborted |= delta.finish_reason == "abort"

    def drain(self) -> None:
        while self.llm.engine.has_work:
            self.step()

    def update(self) -> None:
        """From a folder that is written over at once."""
        engine, version = self.llm.engine, self.random.randrange(2)
        shutil.copytree(self.weights[version], self.scratch, dirs_exist_ok=True)
        new = engine.read_weights(str(self.scratch))
        shutil.copytree(self.weights[1 - version], self.scratch, dirs_exist_ok=True)
        mode = self.random.choice(["keep", "keep", "wait", "abort"])
        if mode == "wait":
            self.drain()
        elif mode == "abort":
            for request in engine.requests:
                engine.abort(request.request_id)
        self.take(engine.take_result())
        for _ in range(self.random.randrange(3)):
            self.step()
        engine.use_weights(new)
        self.take(engine.take_result())  # of a step that it waited for, so of the earlier weights
        self.version = version

    def sleep(self) -> None:
        engine, level = self.llm.engine, self.random.randrange(3)
        engine.sleep(level)
        engine.check()
        self.take(engine.take_result())
        tags = self.random.choice([None, ["weights"], ["kv_cache"]])
        for each in (tags, None):
            new = None
            if engine.lacks_weights and each != ["kv_cache"]:
                new = engine.read_weights(str(self.weights[self.version]))
            engine.wake_up(each, new)

    def pause(self) -> None:
        engine = self.llm.engine
        engine.pause("keep")
        assert not engine.has_work
        engine.resume()

    def abort(self) -> None:
        requests = self.llm.engine.requests
        if requests:
            self.llm.engine.abort(self.random.choice(requests).request_id)
            self.take(self.llm.engine.take_result())

    def restart(self) -> None:
        """Start again, by either weights, over the same tier."""
        self.drain()
        self.llm.close()
        self.version = self.random.randrange(2)
        self.llm = LLM(str(self.weights[self.version]), **self.settings)

    def check(self) -> None:
        """Compare each run of tokens of the same weights with a fresh engine's."""
        for asked in self.asked.values():
            assert asked.aborted or len(asked.ended) == len(asked.got)
            for tokens in asked.got.values():
                at = 0
                while at < len(tokens):
                    version = tokens[at][1]
                    end = at
                    while end < len(tokens) and tokens[end][1] == version:
                        end += 1
                    params = SamplingParams(temperature=0.0, max_tokens=end - at, ignore_eos=True)
                    prompt = [*asked.prompt, *(token for token, _ in tokens[:at])]
                    [found] = self.fresh[version].generate([prompt], params, progress=False)
                    assert [token for token, _ in tokens[at:end]] == found.outputs[0].token_ids
                    at = end
        self.asked.clear()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_weights_in_force(kind, tmp_path):
    name, settings = KINDS[kind]
    fuzz = Fuzz(tmp_path, name, settings, seed=7)
    moves = [fuzz.ask] * 8 + [fuzz.step] * 24 + [fuzz.update] * 2 + [fuzz.sleep, fuzz.pause, fuzz.abort]
    try:
        for round_ in range(examples(3)):
            for _ in range(150):
                fuzz.random.choice(moves)()
                fuzz.llm.engine.check()
            fuzz.drain()
            fuzz.check()
            engine = fuzz.llm.engine
            assert not engine.requests
            engine.cache.reset()
            for _ in range(1000):  # loads for requests that were aborted have to end
                if engine.cache.stats.num_leases:
                    engine.step()
            assert engine.cache.stats.free_blocks == engine.cache.num_blocks
            if round_ % 2:
                fuzz.restart()
    finally:
        fuzz.close()
