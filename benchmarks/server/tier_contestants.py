# SPDX-License-Identifier: Apache-2.0
"""Who `benchmarks.tiers` compares: engines with and without tiers, and vLLM with and without LMCache."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from benchmarks.peers import lmcache, vllm_cpu
from benchmarks.peers.engines import Places
from benchmarks.peers.process import RunningServer
from radixkv.engine.outputs import RequestOutput
from radixkv.entrypoints.llm import LLM
from radixkv.model.loading.embedded_model import find_embedded, prepare_embedded
from radixkv.model.loading.model_cache import cache_home
from radixkv.sampling.sampling_params import SamplingParams

OUTPUT_TOKENS = 4
BLOCK_COUNTS = ("offered_blocks", "saved_blocks", "dropped_blocks", "loaded_blocks")
# Longest that what was begun for a tier is waited for, off the clock.
_SAVES_S = 10.0
_VLLM_BLOCK = 128


@dataclass(frozen=True)
class Answer:
    """What came of a prompt."""

    tokens: list[int]
    ttft_s: float
    cached_tokens: int


class Engine(Protocol):
    """Answers prompts, one after the other."""

    def answer(self, prompt: Sequence[int]) -> Answer: ...

    def finish_saves(self) -> None:
        """Return when what it began for its tier has been done."""

    def counts(self) -> dict[str, int]:
        """Blocks so far, by `BLOCK_COUNTS`; empty where it has no tier, or does not say."""


class RadixKV:
    """An engine in this process."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def answer(self, prompt: Sequence[int]) -> Answer:
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        output: RequestOutput = self._llm.generate([list(prompt)], params)[0]
        assert output.times is not None
        assert output.times.first_token is not None
        tokens = list(output.outputs[0].token_ids)
        return Answer(tokens, output.times.first_token, output.num_cached_tokens)

    def finish_saves(self) -> None:
        engine, end = self._llm.engine, time.perf_counter() + _SAVES_S
        while time.perf_counter() < end:
            if engine.has_work:
                engine.step()
            counts = self.counts()
            if not counts or counts["offered_blocks"] == counts["saved_blocks"] + counts["dropped_blocks"]:
                break
            time.sleep(0.002)
        time.sleep(0.05)  # what was given to the tier is being written

    def counts(self) -> dict[str, int]:
        return {name: getattr(tier, name) for tier in self._llm.engine.stats().tiers for name in BLOCK_COUNTS}


class VLLM:
    """A server of vLLM."""

    def __init__(self, server: RunningServer) -> None:
        self._http = httpx.Client(base_url=server.url, timeout=httpx.Timeout(600.0), trust_env=False)
        self._model = str(self._http.get("/v1/models").json()["data"][0]["id"])

    def answer(self, prompt: Sequence[int]) -> Answer:
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start, ttft, cached = time.perf_counter(), None, 0
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                if ttft is None:
                    ttft = time.perf_counter() - start
                usage = json.loads(line.removeprefix("data: ")).get("usage") or {}
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or cached
        assert ttft is not None
        return Answer([], ttft, cached)

    def finish_saves(self) -> None:
        time.sleep(0.2)

    def counts(self) -> dict[str, int]:
        return {}


class Contestant:
    """An engine, and what it was measured to do.

    Args:
        without: the same engine without its tier; None: it has none.
    """

    def __init__(self, name: str, engine: Engine, without: str | None) -> None:
        self.name, self.engine, self.without = name, engine, without
        self.clear()

    def clear(self) -> None:
        self.ttfts: list[float] = []
        self.times: list[float] = []
        self.prompt_tokens = self.cached_tokens = 0
        self._counts = self.engine.counts()

    def ask(self, prompt: Sequence[int]) -> Answer:
        start = time.perf_counter()
        answer = self.engine.answer(prompt)
        self.times.append(time.perf_counter() - start)
        self.ttfts.append(answer.ttft_s)
        self.prompt_tokens += len(prompt)
        self.cached_tokens += answer.cached_tokens
        return answer

    def figures(self) -> dict[str, Any]:
        ordered = sorted(self.ttfts)
        return {
            "hit_rate": self.cached_tokens / self.prompt_tokens,
            "ttft_p50_s": statistics.median(ordered),
            "ttft_p95_s": ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))],
            "prompt_tokens_per_s": self.prompt_tokens / sum(self.times),
            **{name: count - self._counts[name] for name, count in self.engine.counts().items()},
        }


@contextlib.contextmanager
def contestants(
    model: str, pool_tokens: int, tiers: dict[str, str], peers: Sequence[str]
) -> Iterator[list[Contestant]]:
    """All of them, each with a cache of so many tokens; `none` is the engine without a tier.

    Args:
        tiers: name -> what `--kv-tier` would say.
        peers: of `vllm` and `lmcache`.

    Raises:
        PeerUnavailable: a peer can't be installed or started.
    """
    options: dict[str, Any] = {
        "num_blocks": pool_tokens // 16,
        "speculation": "off",
        "max_model_len": pool_tokens,
    }
    with contextlib.ExitStack() as stack:
        found = [Contestant("none", RadixKV(stack.enter_context(LLM(model, **options))), None)]
        for name, tier in tiers.items():
            llm = stack.enter_context(LLM(model, kv_tier=(tier,), **options))
            found.append(Contestant(name, RadixKV(llm), "none"))
        if peers:
            places = _places(model)
        # Its first block holds nothing.
        room: tuple[str, ...] = ("--num-gpu-blocks-override", str(pool_tokens // _VLLM_BLOCK + 1))
        room += ("--max-model-len", str(pool_tokens // _VLLM_BLOCK * _VLLM_BLOCK))
        if "vllm" in peers:
            server = vllm_cpu.start(lmcache.install(places), places, *room, kv_cache_gib=1)
            found.append(Contestant("vLLM", VLLM(stack.enter_context(server)), None))
        if "lmcache" in peers:
            server = lmcache.start(lmcache.install(places), places, *room, size_gb=2)
            found.append(Contestant("vLLM + LMCache", VLLM(stack.enter_context(server)), "vLLM"))
        yield found


def _places(model: str) -> Places:
    embedded = find_embedded(model)
    folder = Path(model) if embedded is None else prepare_embedded(embedded)
    return Places(folder, Path(), cache_home() / "peers" / "logs", 1200.0, 600.0)
