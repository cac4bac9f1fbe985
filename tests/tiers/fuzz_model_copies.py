# SPDX-License-Identifier: Apache-2.0
"""Fuzz of real models whose states or windows are copied to tiers: `/path/to/python
tests/tiers/fuzz_model_copies.py SECONDS [SEED [FAMILY]]` runs it by itself.

A tiny pool over a host tier and a disk tier, copied by a thread that is held up, so that steps write over
what is still being copied: preemption, aborts, failing steps and copies, sleep, other weights, restarts over
the same folder. Each answer has the bits of an engine that caches nothing.
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from late_copies import HeldMemory
from tiny_configs import VOCAB_SIZE
from tiny_models import save_tiny_model

from radixkv import LLM, SamplingParams
from radixkv.model.runner import ModelRunner

#: Tokens of a whole text, and of an answer.
LENGTH, ANSWER = 200, 16
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "block_size": 8,
    "max_num_batched_tokens": 48,
    "max_model_len": 232,
    "threads": 1,
    "warm_up": "off",
    "deterministic": True,
    "seed": 0,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=0)

Answer = list[tuple[int, float]]


class Models:
    """Two tiny models of a family, and their answers without a cache."""

    def __init__(self, family: str, folder: Path) -> None:
        self.frees_windows = family == "gemma3"
        more = {"sliding_window": 20} if self.frees_windows else {}
        apart = {"window_memory": 1 << 20} if self.frees_windows else {}
        self.folders = [save_tiny_model(folder / str(seed), family, seed, **more) for seed in (0, 1)]
        self._engines = [
            LLM(str(each), num_blocks=64, enable_prefix_caching=False, speculation="off", **SETTINGS | apart)
            for each in self.folders
        ]
        self._known: dict[tuple[int, tuple[int, ...]], Answer] = {}

    def memory(self, num_requests: int, spare: int) -> dict[str, int]:
        """Memory for the states or windows of some requests, and for so many others, as an option."""
        runner = self._engines[0].engine.runner
        assert isinstance(runner, ModelRunner)
        if self.frees_windows:
            assert runner.windows is not None
            spec, size = runner.windows.spec, SETTINGS["block_size"]
            blocks = (num_requests + spare) * spec.blocks_per_request(size)
            return {"window_memory": (blocks + -(-spec.step_tokens // size)) * spec.block_bytes}
        assert runner.states is not None
        states = runner.states.spec
        return {
            "state_memory": num_requests * (2 * states.bytes_per_slot + states.bytes_per_ring)
            + spare * states.bytes_per_slot
        }

    def answer(self, which: int, prompt: list[int]) -> Answer:
        """Tokens and logprobs of a model."""
        key = which, tuple(prompt)
        if key not in self._known:
            (output,) = self._engines[which].generate([prompt], GREEDY, progress=False)
            self._known[key] = told(output)
        return self._known[key]


class FailingSteps:
    """Steps that fail now and then, before the model computes."""

    def __init__(self, r: random.Random, share: float) -> None:
        self._random, self.share = r, share

    def __call__(self, *_: Any) -> None:
        if self._random.random() < self.share:
            raise RuntimeError("a kernel failed")


def told(output: Any) -> Answer:
    """Tokens and logprobs of an output."""
    return [(token.chosen.token_id, token.chosen.logprob) for token in output.outputs[0].logprobs]


def fuzz(seed: int, models: Models, store: Path, num_requests: int = 12, restarts: int = 2) -> dict[str, int]:
    """Run engines over one folder, one after the other; what happened, by name. Raises where it is wrong."""
    r = random.Random(seed)
    texts = [[r.randrange(3, VOCAB_SIZE) for _ in range(LENGTH)] for _ in range(3)]
    counts = dict.fromkeys(("compared", "failed", "aborted", "hits", "overtaken", "slept", "updates"), 0)
    for _ in range(restarts):
        _serve(r, models, store, texts, num_requests, counts)
    return counts


def _serve(
    r: random.Random,
    models: Models,
    store: Path,
    texts: list[list[int]],
    num_requests: int,
    counts: dict[str, int],
) -> None:
    most = r.choice([1, 2, 3])
    llm = LLM(
        str(models.folders[0]),
        num_blocks=r.choice([30, 36]),
        max_num_seqs=most,
        speculation=r.choice(["off", "auto"]),
        kv_tier=(f"host:{r.choice([64, 4096])}KiB,long=0", f"disk:{store},max=16MiB,long=0"),
        **SETTINGS | models.memory(most, r.choice([0, 1, 4])),
    )
    engine, which = llm.engine, 0
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    held = HeldMemory(random.Random(seed_of(r)))
    part = runner.windows if models.frees_windows else runner.states
    assert part is not None
    part.host_copies = held
    fails = FailingSteps(r, r.choice([0.0, 0.03]))
    runner.model.register_forward_pre_hook(fails)
    sent: dict[str, tuple[int, list[int]]] = {}

    def step() -> None:
        for output in engine.step().finished:
            which, prompt = sent.pop(output.request_id, (0, []))
            counts["hits"] += bool(output.num_cached_tokens)
            if output.error is not None:
                counts["failed"] += 1
            elif prompt:
                assert told(output) == models.answer(which, prompt), f"{output.request_id}: other bits"
                counts["compared"] += 1
        engine.check()

    def settle() -> None:
        for _ in range(5000):
            if not engine.has_work:
                return
            step()
            if engine.has_work and engine.idle_s:
                engine.wait()
        raise AssertionError("the engine does not come to an end")

    for _ in range(num_requests):
        text = r.choice(texts)
        prompt = text[: r.randrange(1, LENGTH)] + [r.randrange(3, VOCAB_SIZE) for _ in range(r.randrange(9))]
        sent[engine.add_request(prompt, GREEDY)] = which, prompt
        for _ in range(r.randrange(12)):
            step()
        if r.random() < 0.15 and engine.requests:
            gone = r.choice(engine.requests).request_id
            sent.pop(gone, None)
            engine.abort(gone)
            counts["aborted"] += 1
        if r.random() < 0.3:
            held.let_go()
        if r.random() < 0.3:
            engine.cache.reset()  # tiers keep what they have, and get what is under way
        if r.random() < 0.1:
            counts["slept"] += 1
            llm.sleep(1, mode="keep")
            llm.wake_up()
        elif r.random() < 0.15:
            settle()  # what goes on is computed by both models
            which = 1 - which
            llm.update_weights(models.folders[which])
            runner.model.register_forward_pre_hook(fails)
            counts["updates"] += 1
    held.let_go(for_good=True)
    settle()
    assert not sent, f"no output came for {list(sent)}"
    assert not engine.stats().num_rebuilds, "an invariant broke"
    counts["overtaken"] += held.num_overtaken
    for figures in engine.stats().tiers:
        for name in ("saved_states", "loaded_states", "loaded_blocks"):
            counts[name] = counts.get(name, 0) + getattr(figures, name)
    counts["preemptions"] = counts.get("preemptions", 0) + engine.stats().num_preemptions
    assert engine.cache.stats.held_blocks == 0
    engine.cache.reset()
    engine.check()
    assert engine.cache.stats.num_leases == 0
    engine.close(save=r.random() < 0.5)


def seed_of(r: random.Random) -> int:
    """A seed for what other threads draw from."""
    return r.randrange(1 << 30)


def run_for(seconds: float, seed: int, family: str, tell: Callable[[str], None] = print) -> dict[str, int]:
    """Run seeds for so long; what happened in all of them."""
    total: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = Models(family, Path(folder))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                counts = fuzz(seed, models, Path(folder) / f"tier{seed}")
            except BaseException:
                tell(f"seed {seed}")
                raise
            for what, count in counts.items():
                total[what] = total.get(what, 0) + count
            seed += 1
    return total


if __name__ == "__main__":
    logging.getLogger("radixkv").disabled = True
    torch.set_num_threads(1)
    print(run_for(float(sys.argv[1]), int((sys.argv[2:] or ["0"])[0]), (sys.argv[3:] or ["qwen3_5_text"])[0]))
