# SPDX-License-Identifier: Apache-2.0
"""Adapters loaded, reloaded with other weights and unloaded under traffic, over HTTP, above two tiers.

    python tests/server/fuzz_adapters.py --requests 10000 [--states [--ranks 2]]

Three tenants ask at once, one of them for half of the names only, in a pool that preempts, with guesses; some
clients leave, the cache is reset now and then, and some weight sets are activated adapters. Every answer must
be the fresh answer of a weight set that its name stood for while the request ran. No token may be found that
these weights have not computed before for this tenant, in the pool, in a tier, or in a tier after a restart;
and no block's identity may be told of two weight sets or tenants. In the end nothing is held. The same in
small is a test (`test_adapters_over_http.py`).

The base may have states: its prompts are longer, and no adapter is activated. Over several ranks there are no
adapters. Answers are constrained by a regular expression now and then, or have several samples.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from tiny_adapters import peft_model, save_adapter
from tiny_models import VOCAB_SIZE, save_tiny_model

from radixkv import LLM, AsyncEngine, SamplingParams
from radixkv.engine.config import EngineConfig
from radixkv_server.app import create_app
from radixkv_server.settings import ServerSettings
from radixkv_server.tenants.api_keys import stored_form

COUNT = 40  # tokens of the longest answers
BASE = -1  # in the place of a weight set
GONE = -2
LETTERS = {"regex": "[a-z ]{60}"}
HYBRID_TARGETS = ["q_proj", "k_proj", "up_proj", "down_proj"]
LEAVE, LEFT = "x-leave-after", 499
INVOCATION = [5, 6, 7]
TENANTS = ("ada", "bob", "cat")
RESTRICTED = "cat"
ADMIN = {"authorization": "Bearer root-secret"}


class Leaving:
    """An application whose clients leave: after as many seconds as the header LEAVE of a request says."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        seconds = dict(scope.get("headers", ())).get(LEAVE.encode())
        if seconds is None:
            await self._app(scope, receive, send)
            return
        started = False

        async def receive_or_leave() -> Any:
            try:
                async with asyncio.timeout(float(seconds)):
                    return await receive()
            except TimeoutError:
                return {"type": "http.disconnect"}

        async def noted_send(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        await self._app(scope, receive_or_leave, noted_send)
        if not started:
            await send({"type": "http.response.start", "status": LEFT, "headers": []})
            await send({"type": "http.response.body", "body": b""})


@dataclass
class Names:
    """What each name has stood for: weight sets in order, the last ones from `sure` on perhaps now."""

    bound: dict[str, list[int]]
    sure: dict[str, int] = field(default_factory=dict)

    def since(self, name: str, place: int) -> set[int]:
        """The weight sets that a name may have stood for since a place in its history."""
        return set(self.bound[name][place:])


@dataclass
class Fuzz:
    """One run; `counts` tells what happened.

    Args:
        folder: gets the base, the adapters and the disk tier.
        num_names, num_sets: names, and the different weights that they stand for in turn.
        num_prompts: prompts that have no token in common at their beginning.
        num_workers: requests at a time, `max_num_seqs` of them in a step.
        states: the base has states.
        ranks: of the engine; with several there must be no `num_names`.
    """

    folder: Path
    seed: int = 0
    num_names: int = 20
    num_sets: int = 30
    num_prompts: int = 8
    num_blocks: int = 28
    num_workers: int = 40
    max_num_seqs: int = 24
    states: bool = False
    ranks: int = 1
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        targets: dict[str, Any] = {}
        if self.states:
            self.base = save_tiny_model(self.folder / "tiny", "qwen3_5_text")
            targets["target_modules"] = HYBRID_TARGETS
        else:
            self.base = save_tiny_model(self.folder / "tiny", "llama", num_hidden_layers=2)
        # Every fourth weight set, but for the first.
        self.activated = {n for n in range(1, self.num_sets) if n % 4 == 3 and not self.states}
        self.sets: list[Path] = []
        if self.num_sets:
            trained = peft_model(self.base, self.seed, **targets)
            first = save_adapter(trained, self.folder / "adapters" / "0")
            self.sets = [first, *(self._varied(first, number) for number in range(1, self.num_sets))]
        self.prompts = [self._prompt(number) for number in range(self.num_prompts)]
        self.fresh = self._fresh_answers()
        self.names = Names({f"a{number}": [GONE] for number in range(self.num_names)} | {"tiny": [BASE]})
        self.names.sure = dict.fromkeys(self.names.bound, 0)
        # (tenant, weight set, prompt) -> requests that may have computed it
        self.asked: Counter[tuple[str, int, int]] = Counter()
        self.granted = {"tiny", *list(self.names.bound)[: self.num_names // 2]}  # to the restricted tenant
        self.admin = asyncio.Lock()
        self.identities: dict[str, int] = {}
        self.told: dict[bytes, tuple[str, ...]] = {}

    def _prompt(self, number: int) -> list[int]:
        """Every other one invokes the activated adapters, and every third repeats itself, to be guessed."""
        tokens = [self.chance.randrange(10, VOCAB_SIZE) for _ in range(self.chance.randrange(8, 26))]
        if number % 3 == 2:
            tokens = (tokens[:5] * 6)[: len(tokens)]
        if self.states:
            return [3 + number, *(tokens * 12)[: self.chance.randrange(60, 210)]]
        if number % 2:
            at = self.chance.randrange(1, len(tokens))
            tokens[at:at] = INVOCATION
        return [3 + number, *tokens]

    def _varied(self, first: Path, number: int) -> Path:
        folder = shutil.copytree(first, self.folder / "adapters" / str(number))
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        for name, tensor in tensors.items():
            tensors[name] = 0.15 * torch.randn(tensor.shape, generator=generator)
        save_file(tensors, path)
        if number in self.activated:
            config = folder / "adapter_config.json"
            config.write_text(
                json.dumps(json.loads(config.read_text()) | {"alora_invocation_tokens": INVOCATION})
            )
        return folder

    def _fresh_answers(self) -> dict[tuple[int, int, bool], list[int]]:
        """Each prompt's answer by each weight set and by the base, of an engine without a prefix cache.

        By weight set, prompt, and whether it is constrained.
        """
        specs = tuple(f"s{number}={folder}" for number, folder in enumerate(self.sets))
        params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
        constrained = replace(params, structured=LETTERS)
        found = {}
        with LLM(
            str(self.base),
            lora=specs,
            num_blocks=512,
            threads=1,
            warm_up="off",
            enable_prefix_caching=False,
            speculation="off",
        ) as llm:
            for number in range(BASE, self.num_sets):
                lora = "" if number == BASE else f"s{number}"
                for is_constrained in (False, True):
                    wanted = constrained if is_constrained else params
                    outputs = llm.generate(self.prompts, wanted, lora=lora, progress=False)
                    for prompt, output in enumerate(outputs):
                        found[number, prompt, is_constrained] = list(output.outputs[0].token_ids)
        return found

    # ------------------------------------------------------------------ the server

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[httpx.AsyncClient]:
        """A server over a small pool, a host tier and a disk tier; the disk stays for the next one."""
        config = EngineConfig(
            model=str(self.base),
            num_blocks=self.num_blocks,
            block_size=8,
            max_num_seqs=self.max_num_seqs,
            threads=1,
            warm_up="off",
            kv_tier=("host:1MiB" if self.states else "host:64KiB", f"disk:{self.folder / 'tier'},max=64MiB"),
            **({"max_loras": 8, "lora_dir": str(self.folder / "adapters")} if self.sets else {}),
            **({"tensor_parallel": self.ranks} if self.ranks > 1 else {}),
        )
        engine = await asyncio.to_thread(AsyncEngine.from_config, config)
        keys = self.folder / "keys.toml"
        tables = [f'[tenants.{name}]\nkeys = ["{stored_form(f"{name}-secret")}"]\n' for name in TENANTS]
        tables[-1] += f"adapters = {sorted(self.granted - {'tiny'})}\n"
        tables.append(f'[tenants.root]\nrole = "admin"\nkeys = ["{stored_form("root-secret")}"]\n')
        keys.write_text("".join(tables))
        settings = ServerSettings(keys_file=str(keys), allowed_hosts=("testserver",), access_log=False)
        app = create_app(engine, settings)
        transport = httpx.ASGITransport(Leaving(app))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=transport, base_url="http://testserver", timeout=600, headers=ADMIN
            ) as client,
        ):
            events = asyncio.create_task(self._follow(engine))
            try:
                yield client
            finally:
                events.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await events
            await engine.call(lambda inner: inner.check())
            held = await engine.call(lambda inner: (inner.cache.stats.held_blocks, len(inner.requests)))
            assert held == (0, 0), f"{held[0]} blocks are held, {held[1]} requests are left"
        await engine.close()

    async def _follow(self, engine: AsyncEngine) -> None:
        """Each identity of a block belongs to one adapter and tenant, and to tokens that were asked of it."""
        async for changes in engine.cache.events():
            for run in changes.stored:
                tenant, _, adapter = run.namespace[:3]
                for identity in run.block_hashes:
                    assert self.told.setdefault(identity, run.namespace) == run.namespace
                number = self.identities.get(adapter) if adapter else BASE
                if run.parent_hash is None and number is not None:
                    prompt = run.token_ids[0] - 3
                    assert self.asked[tenant, number, prompt], "a block of a prompt that was not asked"
                self.counts["blocks told"] += len(run.block_hashes)

    async def bind(self, client: httpx.AsyncClient, name: str, number: int) -> None:
        """Have a name stand for a weight set, or for none."""
        history = self.names.bound[name]
        was_there = history[-1] != GONE
        history.append(number)
        if number == GONE:
            response = await client.post("/v1/unload_lora_adapter", json={"lora_name": name})
            assert response.status_code == (200 if was_there else 404), response.text
        else:
            body = {"lora_name": name, "lora_path": str(number), "load_inplace": True}
            response = await client.post("/v1/load_lora_adapter", json=body)
            assert response.status_code == 200, response.text
            self.identities[response.json()["identity"]] = number
        self.names.sure[name] = len(history) - 1
        self.counts["unloaded" if number == GONE else "reloaded" if was_there else "loaded"] += 1

    async def ask(
        self,
        client: httpx.AsyncClient,
        name: str,
        prompt: int,
        tenant: str = "ada",
        count: int = 8,
        leave: float = 0.0,
    ) -> int:
        """Send a request and check its answer; returns its cached tokens.

        Args:
            count: tokens of the answer.
            leave: seconds after which the client leaves, if it has no answer by then; 0: it stays.
        """
        is_constrained = self.chance.random() < 0.2
        place = self.names.sure[name]
        self._note(tenant, self.names.since(name, place), prompt)
        known = len(self.names.bound[name])
        body = {
            "model": name,
            "prompt": self.prompts[prompt],
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "n": self.chance.choice((1, 1, 1, 2, 3)),
            **({"structured_outputs": LETTERS} if is_constrained else {}),
        }
        key = {"authorization": f"Bearer {tenant}-secret", **({LEAVE: str(leave)} if leave else {})}
        response = await client.post("/v1/completions", json=body, headers=key)
        self._note(tenant, self.names.since(name, known), prompt)
        possible = self.names.since(name, place)
        self.counts["requests"] += 1
        if response.status_code == LEFT:
            self.counts["clients left"] += 1
            return 0
        if tenant == RESTRICTED and name not in self.granted:
            assert response.status_code == 404, response.text
            self.counts["not granted"] += 1
            return 0
        if response.status_code == 404:
            assert GONE in possible, f"{name} was there all the time: {response.text}"
            self.counts["not found"] += 1
            return 0
        assert response.status_code == 200, response.text
        answer = response.json()
        samples = [choice["token_ids"] for choice in answer["choices"]]
        by = [n for n in possible if n != GONE]
        by = [n for n in by if [self.fresh[n, prompt, is_constrained][:count]] * len(samples) == samples]
        assert by, f"{name} answered {samples}; it stood for {possible}"
        self.counts["constrained"] += is_constrained
        self.counts["several samples"] += len(samples) > 1
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        if cached:
            assert any(self.asked[tenant, self._owner(n), prompt] > 1 for n in by), (
                f"{name}: {cached} tokens of nobody's were found"
            )
            self.counts["hits"] += 1
            self.counts["hits of activated"] += by[0] in self.activated
        return cached

    def _owner(self, number: int) -> int:
        """The weight set with whose prefixes a weight set's are shared."""
        return BASE if number in self.activated else number

    def _note(self, tenant: str, numbers: set[int], prompt: int) -> None:
        for number in {self._owner(each) for each in numbers}:
            self.asked[tenant, number, prompt] += 1

    # ------------------------------------------------------------------ the run

    async def traffic(self, client: httpx.AsyncClient, num_requests: int) -> None:
        """Requests of several clients at once, while an admin changes the names."""
        left = num_requests

        async def worker() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                name = self.chance.choice(list(self.names.bound))
                tenant, prompt = self.chance.choice(TENANTS), self.chance.randrange(self.num_prompts)
                leave = self.chance.uniform(0.001, 0.2) if self.chance.random() < 0.1 else 0.0
                await self.ask(client, name, prompt, tenant, self.chance.choice((2, 8, COUNT)), leave)
                if self.chance.random() < 0.15:
                    await self.administer(client)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.num_workers):
                group.create_task(worker())

    async def administer(self, client: httpx.AsyncClient) -> None:
        """Load, replace or unload an adapter, or reset the cache; one at a time."""
        async with self.admin:
            if self.chance.random() < 0.02:
                assert (await client.post("/v1/cache/reset")).status_code == 200
                self.counts["resets"] += 1
                return
            names = [name for name in self.names.bound if name != "tiny"]
            if not names:
                return
            name = self.chance.choice(names)
            gone = self.names.bound[name][-1] != GONE and self.chance.random() < 0.15
            await self.bind(client, name, GONE if gone else self.chance.randrange(self.num_sets))

    async def sharing(self, client: httpx.AsyncClient) -> None:
        """Equal weights share under two names; other weights under the same name find nothing."""
        unused, *others = [n for n in range(self.num_sets) if n not in self.activated]
        cached = len(self.prompts[0]) - 1
        if self.states:
            cached -= cached % 64
        for name in ("a0", "a1"):
            await self.bind(client, name, unused)
        assert await self.ask(client, "a0", 0) == 0
        assert await self.ask(client, "a1", 0) == cached
        assert await self.ask(client, "a1", 0, "bob") == 0
        await self.bind(client, "a0", others[0])
        assert await self.ask(client, "a0", 0) == 0
        assert await self.ask(client, "a1", 0) == cached
        self.counts["reloads without a hit"] += 1

    async def run(self, num_requests: int) -> None:
        """Two servers, one after the other, over the same disk."""
        for start, share in enumerate((0.7, 0.3)):
            async with self.serving() as client:
                for name, history in self.names.bound.items():  # a new server knows the base alone
                    if name != "tiny":
                        history.append(GONE)
                        self.names.sure[name] = len(history) - 1
                for name in [name for name in self.names.bound if name != "tiny"][1:]:
                    await self.bind(client, name, self.chance.randrange(self.num_sets))
                if start == 0 and self.sets:
                    await self.sharing(client)
                await self.traffic(client, round(num_requests * share))
                metrics = (await client.get("/metrics")).text
                self.counts["blocks loaded from tiers"] += _total(metrics, "radixkv_tier_loaded_blocks_total")
                self.counts["states loaded from tiers"] += _total(metrics, "radixkv_tier_loaded_states_total")
                self.counts["evicted blocks"] += _total(metrics, "radixkv_evicted_blocks_total")
                self.counts["preemptions"] += _total(metrics, "radixkv_preemptions_total")
                self.counts["tokens guessed rightly"] += _total(
                    metrics, "radixkv_spec_decode_accepted_tokens_total"
                )


def _total(metrics: str, name: str) -> int:
    return round(sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run with a seed and a number of requests, and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--states", action="store_true", help="the base has states")
    parser.add_argument("--ranks", type=int, default=1, help="without adapters")
    options = parser.parse_args(arguments)
    shape: dict[str, Any] = {"states": options.states, "ranks": options.ranks}
    if options.states:
        shape |= {"num_blocks": 150, "num_names": 10, "num_sets": 12}
    if options.ranks > 1:
        shape |= {"num_names": 0, "num_sets": 0}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        fuzz = Fuzz(Path(folder), options.seed, **shape)
        try:
            asyncio.run(fuzz.run(options.requests))
        finally:
            print(f"{time.perf_counter() - began:.0f} s, seed {options.seed}:", dict(fuzz.counts))


if __name__ == "__main__":
    main()
