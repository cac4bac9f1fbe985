# SPDX-License-Identifier: Apache-2.0
"""Reranking beside chats, in small pools: ceilings of tenants, clients that leave, several engines."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from fuzzing import examples
from paged_language_model import LetterTokenizer, make_engine

from radixkv import AsyncEngine
from radixkv.cluster.replicas.engine import ReplicatedEngine
from radixkv.engine.client import EngineClient
from radixkv_server.app import create_app
from radixkv_server.settings import ServerSettings
from radixkv_server.tenants.api_keys import stored_form

TEMPLATE = [{"role": "user", "content": "{instruction}|{query}|{document}"}]
TENANTS = {"ada": "key-of-ada-1234", "bob": "key-of-bob-1234"}
SEEDS = range(examples(2))


def keys_file(folder: Path) -> str:
    path = folder / "keys.toml"
    lines = []
    for name, key in TENANTS.items():
        lines += [f"[tenants.{name}]", f'keys = ["{stored_form(key)}"]']
        lines += ["ceiling_blocks = 40"] if name == "ada" else []
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return str(path)


def body_of(chance: random.Random) -> dict[str, Any]:
    query = chance.choice(["tea and cake", "what floats"]) + "?" * chance.randrange(3)
    documents = [
        f"{chance.randrange(6)} " + "boats" * chance.randrange(1, 12) for _ in range(chance.randrange(1, 20))
    ]
    given = {"query": query, "documents": documents, "instruction": "I", "messages": TEMPLATE}
    return {**given, "labels": ["y", "n"], "return_documents": False}


async def rerank(client: httpx.AsyncClient, tenant: str, body: dict[str, Any]) -> dict[int, float]:
    answer = await client.post(
        "/v1/rerank", json=body, headers={"Authorization": f"Bearer {TENANTS[tenant]}"}
    )
    assert answer.status_code == 200, answer.text
    return {one["index"]: one["relevance_score"] for one in answer.json()["results"]}


async def leaves(client: httpx.AsyncClient, tenant: str, body: dict[str, Any], after: int) -> None:
    """Ask, and go away after so many turns of the loop."""
    task = asyncio.create_task(rerank(client, tenant, body))
    for _ in range(after):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=60)


def engine(num_blocks: int) -> AsyncEngine:
    made, _ = make_engine(
        num_blocks=num_blocks, block_size=8, tokenizer=LetterTokenizer(), scheduling_policy="fair"
    )
    return AsyncEngine(made)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_engines", [1, 2])
async def test_scores_are_those_of_a_large_pool_whatever_else_happens(
    num_engines: int, seed: int, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    asked = [(chance.choice(list(TENANTS)), body_of(chance)) for _ in range(10)]
    left = [(chance.choice(list(TENANTS)), body_of(chance), chance.randrange(400)) for _ in range(6)]
    settings = ServerSettings(keys_file=keys_file(tmp_path), console=False, access_log=False)
    reference = engine(2000)
    app = create_app(reference, ServerSettings(api_keys=tuple(f"{n}={k}" for n, k in TENANTS.items())))
    async with reference, app.router.lifespan_context(app), client_of(app) as client:
        alone = [await rerank(client, tenant, body) for tenant, body in asked]

    members = {f"engine-{i}": engine(80) for i in range(num_engines)}
    served: EngineClient = members["engine-0"] if num_engines == 1 else ReplicatedEngine(members)
    app = create_app(served, settings)
    try:
        async with app.router.lifespan_context(app), client_of(app) as client:
            answers = [asyncio.create_task(rerank(client, tenant, body)) for tenant, body in asked]
            others = [asyncio.create_task(leaves(client, *one)) for one in left]
            assert await asyncio.gather(*answers) == alone
            await asyncio.gather(*others)
            while served.stats().num_running or served.stats().num_waiting:
                await asyncio.sleep(0.01)
        counts = served.stats().cache
        assert counts.held_blocks == 0, "blocks leaked"
        assert counts.free_blocks + counts.cached_blocks == counts.total_blocks
    finally:
        await served.close()
