# SPDX-License-Identifier: Apache-2.0
"""Requests compared with others that run, end, fail to fit or are left by their clients, in a tiny pool."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from compared_prompts import shared_by
from fuzzing import examples
from live_server import live_server
from paged_language_model import LetterTokenizer, make_engine

from radixkv.entrypoints.async_engine import AsyncEngine

KEYS = {"ada": "key-a", "bob": "key-b"}
TAIL = 16  # tokens: what a template may write otherwise at a prompt's end


class Tokenizer(LetterTokenizer):
    """A letter a token; nothing stands between messages but their roles."""

    def apply_chat_template(
        self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, **options: object
    ) -> list[int]:
        said = "".join(f"<{message['role'][0]}>{message['content']}" for message in messages)
        return self.encode(said + ("<a>" if add_generation_prompt else ""))


@dataclass(frozen=True)
class Sent:
    """A request whose id is known."""

    tenant: str
    salt: str
    system: str
    said: tuple[str, ...]
    whole: bool

    @property
    def prompt(self) -> list[int]:
        roles = ("user", "assistant")
        chat = [{"role": roles[at % 2], "content": text} for at, text in enumerate(self.said)]
        return Tokenizer().apply_chat_template([{"role": "system", "content": self.system}, *chat])


def change_of(one: Sent, two: Sent) -> tuple[str, int | None] | None:
    """What the second one changed first."""
    if one.system != two.system:
        return "system", 0
    for at, text in enumerate(one.said):
        if at >= len(two.said) or two.said[at] != text:
            return "messages", at
    return None if one.salt == two.salt else ("cache_salt", None)


def some_request(rng: random.Random, tenant: str) -> Sent:
    words = ["one", "two", "three and four", "five, six and seven are more"]
    said = tuple(rng.choice(words) for _ in range(rng.choice([1, 1, 3, 3, 5])))
    system = rng.choice(["be brief", "be brief", "be a harbour"])
    return Sent(tenant, rng.choice(["", "", "", "s"]), system, said, whole=rng.random() < 0.7)


def body_of(sent: Sent, earlier: str | None) -> dict[str, Any]:
    roles = ("user", "assistant")
    body: dict[str, Any] = {
        "max_tokens": 3,
        "system": sent.system,
        "messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(sent.said)],
        "diagnostics": {"previous_message_id": earlier},
        "stream": not sent.whole,
    }
    return {**body, "cache_salt": sent.salt} if sent.salt else body


def check(sent: Sent, earlier: Sent | None, answer: dict[str, Any], *, ended: bool) -> str:
    """The answer says what the two requests are; gives what it said."""
    own, told = answer["cache_diagnosis"], answer["diagnostics"]
    if earlier is None or earlier.tenant != sent.tenant:
        assert own["state"] == "not_found"
        assert told["cache_miss_reason"]["type"] == "previous_message_not_found"
        return "not_found"
    if own["state"] == "running":
        assert not ended
        assert told == {"cache_miss_reason": None}
        return "running"
    change, usage = change_of(earlier, sent), answer["usage"]
    shared, prompt = shared_by(earlier.prompt, sent.prompt), sent.prompt
    assert (own["changed"], own["index"]) == (change or (None, None))
    counts = (own["prompt_tokens"], own["compared_tokens"], own["shared_tokens"])
    assert counts == (len(prompt), len(earlier.prompt), shared)
    cached = usage["cache_read_input_tokens"]
    reused = shared if cached >= len(prompt) - 1 else min(shared, cached)
    assert (own["reused_tokens"], own["missed_tokens"]) == (reused, len(earlier.prompt) - reused)
    if change is None:
        assert told is None
        return "same"
    if change[0] == "cache_salt":
        assert told == {"cache_miss_reason": {"type": "unavailable"}}
    else:
        reason = {"type": f"{change[0]}_changed", "cache_missed_input_tokens": own["missed_tokens"]}
        assert told == {"cache_miss_reason": reason}
    return change[0]


async def ask(
    client: httpx.AsyncClient, rng: random.Random, known: dict[str, Sent], ended: set[str], seen: set[str]
) -> None:
    tenant = rng.choice(list(KEYS))
    sent = some_request(rng, tenant)
    earlier = rng.choice([*list(known)[-30:], "msg_unknown"])
    before = known.get(earlier)
    if before is not None and before.tenant == tenant and len(before.said) < 5 and rng.random() < 0.5:
        sent = replace(before, said=(*before.said, "yes", "go on"), whole=sent.whole)  # the next turn
    was_over = earlier in ended or earlier == "msg_unknown"
    headers = {"x-api-key": KEYS[tenant]}
    body = body_of(sent, earlier)
    if sent.whole:
        answer = (await client.post("/v1/messages", json=body, headers=headers)).raise_for_status().json()
        seen.add(check(sent, known.get(earlier), answer, ended=was_over))
        known[answer["id"]] = sent
        ended.add(answer["id"])
        return
    async with client.stream("POST", "/v1/messages", json=body, headers=headers) as stream:
        assert stream.status_code == 200
        async for line in stream.aiter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if event["type"] == "message_start":
                answer = event["message"]
                seen.add(check(sent, known.get(earlier), answer, ended=was_over))
                known[answer["id"]] = sent
                if rng.random() < 0.3:
                    return  # the client leaves
            elif event["type"] == "message_stop":
                ended.add(answer["id"])


@pytest.mark.parametrize("seed", range(1))
def test_every_answer_says_what_the_requests_are(seed: int) -> None:
    rng, known, ended = random.Random(seed), dict[str, Sent](), set[str]()
    seen: set[str] = set()
    engine = AsyncEngine(make_engine(num_blocks=40, block_size=8, tokenizer=Tokenizer())[0])

    async def worker(client: httpx.AsyncClient, count: int) -> None:
        for _ in range(count):
            await ask(client, rng, known, ended, seen)

    async def run(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client, asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(worker(client, examples(10)))

    async def check_and_close() -> None:
        await engine.call(lambda inner: inner.check())
        await engine.close()

    keys = tuple(f"{name}={key}" for name, key in KEYS.items())
    with live_server(engine, api_keys=keys) as server:
        asyncio.run(run(server.url))
    assert {"same", "not_found"} < seen
    asyncio.run(check_and_close())
