# SPDX-License-Identifier: Apache-2.0
"""Requests that the OpenAPI document allows, and such that it does not: none may get a 5xx.

    python tests/server/fuzz_api.py --cases 10000

serves an engine without a model, generates the requests with schemathesis, and asks each operation for a good
answer now and then. The same in small is a test (`test_openapi.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from live_server import live_server
from scripted_engine import ScriptedEngine

# It sends events for as long as the client stays.
ENDLESS = ("GET /v1/cache/events",)

# What each operation needs. Every body holds this much or mutations of it, and a few of the other fields as
# the schema draws them: all fields at once would cost a second a body, and end at the first that is wrong.
TEXT = "What is longer than a block can be kept. say:hello"
CHAT = [{"role": "user", "content": TEXT}]
GOOD: dict[str, dict[str, Any]] = {
    "POST /v1/chat/completions": {"messages": CHAT},
    "POST /v1/completions": {"prompt": TEXT},
    "POST /v1/responses": {"input": "say:hello"},
    "POST /v1/messages": {"messages": CHAT, "max_tokens": 8},
    "POST /v1/messages/count_tokens": {"messages": CHAT},
    "POST /tokenize": {"prompt": "hello"},
    "POST /detokenize": {"tokens": [104, 105]},
    "POST /apply-template": {"messages": CHAT},
    "POST /v1/cache/explain": {"prompt": TEXT},
    "POST /v1/cache/pins": {"prompt": TEXT},
    "POST /v1/cache/public": {"prompt": TEXT},
    "DELETE /v1/cache/pins": {"prompt": TEXT},
    "DELETE /v1/cache/public": {"prompt": TEXT},
}
FIELDS = 2
BODIES = 8  # a round: that many with the same fields, two thirds of them as the schema has it
Statuses = Counter[tuple[str, int]]


def fuzz(url: str, cases: int, number: int = 0) -> Statuses:
    """Send `cases` requests or some more, in rounds over all operations; how often each got which status.

    Args:
        number: of the random numbers; the same requests each time.

    Raises:
        AssertionError: one got a 5xx; says which. Or a good one is not answered any more.
    """
    chance = random.Random(number)
    statuses: Statuses = Counter()
    with httpx.Client(base_url=url, timeout=60) as client, requests.Session() as session:
        document = client.get("/openapi.json").json()
        while statuses.total() < cases:
            for operation in _operations(_with_few_fields(document, chance)):
                has_body = operation.label in GOOD
                for mode, share in ((GenerationMode.POSITIVE, 2), (GenerationMode.NEGATIVE, 1)):
                    if mode == GenerationMode.NEGATIVE and not has_body and not len(operation.query):
                        continue  # nothing can be wrong with a route that takes nothing
                    count = BODIES * share // 3 if has_body else 1
                    _send(session, url, operation, mode, count, chance.getrandbits(32), statuses)
            answer = client.post("/v1/completions", json=GOOD["POST /v1/completions"])
            assert answer.status_code == 200, answer.text
    return statuses


def _operations(document: dict[str, Any]) -> Iterator[Any]:
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = found.ok()
        if operation.label not in ENDLESS:
            yield operation


def _with_few_fields(document: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """The document with bodies of what is needed, and a few other fields that are drawn."""
    document = copy.deepcopy(document)
    schemas = document["components"]["schemas"]
    for label, good in GOOD.items():
        method, path = label.split()
        content = document["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]
        schema = content["schema"]
        while "$ref" in schema:
            schema = schemas[schema["$ref"].rpartition("/")[2]]
        # A model that is not served, or another form of the prompt, would end it before it has begun.
        others = sorted(set(schema["properties"]) - {*good, "model", "prompt", "messages", "node", "id"})
        drawn = chance.sample(others, min(FIELDS, len(others)))
        content["schema"] = {
            "type": "object",
            "required": list(good),
            "properties": {
                **{name: {"enum": [value]} for name, value in good.items()},
                **{name: schema["properties"][name] for name in drawn},
            },
            "additionalProperties": False,
        }
    return document


def _send(
    session: requests.Session,
    url: str,
    operation: Any,
    mode: Any,
    count: int,
    number: int,
    statuses: Statuses,
) -> None:
    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        answer = case.call(base_url=url, session=session, timeout=60)
        statuses[operation.label, answer.status_code] += 1
        assert answer.status_code < 500, f"{case.as_curl_command()}\n{answer.text}"

    with contextlib.suppress(Unsatisfiable):
        send()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.monotonic()
    with live_server(ScriptedEngine(max_model_len=512, caches=True)) as server:
        statuses = fuzz(server.url, args.cases, args.seed)
    for (operation, status), count in sorted(statuses.items()):
        print(f"{count:6d} {status} {operation}")
    print(f"{statuses.total()} requests in {time.monotonic() - started:.0f} s, none got a 5xx")


if __name__ == "__main__":
    main()
