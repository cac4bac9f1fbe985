"""Requests that the OpenAPI document allows, and such that it does not: none may get a 5xx.

    python tests/server/fuzz_api.py --cases 10000

serves an engine without a model, generates the requests with schemathesis, and asks for a good answer now and
then. The same in small is a test (`test_openapi.py`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from live_server import live_server
from scripted_engine import ScriptedEngine

# It sends events for as long as the client stays.
ENDLESS = ("GET /v1/cache/events",)
GOOD = {"prompt": "say:hello", "max_tokens": 8}


def fuzz(url: str, cases: int, first_seed: int = 0) -> Counter[tuple[str, int]]:
    """Send about `cases` requests, each operation its share; how often each got which status.

    Raises:
        AssertionError: one got a 5xx; says which.
    """
    document = httpx.get(url + "/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    operations = [found.ok() for found in schema.get_all_operations()]
    operations = [operation for operation in operations if operation.label not in ENDLESS]
    # What takes a body has far more to go wrong.
    weights = [10 if operation.body else 1 for operation in operations]
    statuses: Counter[tuple[str, int]] = Counter()
    with httpx.Client(base_url=url, timeout=60) as client:
        for operation, weight in zip(operations, weights, strict=True):
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                share = max(1, cases * weight // (2 * sum(weights)))
                try:
                    _fuzz_operation(url, operation, mode, share, first_seed, statuses)
                except (Unsatisfiable, schemathesis.errors.InvalidSchema):
                    continue  # nothing can be wrong with a route that takes nothing
            answer = client.post("/v1/completions", json=GOOD)
            assert answer.status_code == 200, f"after {operation.label}: {answer.text}"
    return statuses


def _fuzz_operation(
    url: str, operation: Any, mode: GenerationMode, count: int, number: int, statuses: Counter[Any]
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
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # a name that is not served ends it before it has begun
        answer = case.call(base_url=url)
        statuses[operation.label, answer.status_code] += 1
        assert answer.status_code < 500, f"{case.as_curl_command()}\n{answer.text}"

    send()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.monotonic()
    with live_server(ScriptedEngine(max_model_len=512)) as server:
        statuses = fuzz(server.url, args.cases, args.seed)
    for (operation, status), count in sorted(statuses.items()):
        print(f"{count:6d} {status} {operation}")
    print(f"{statuses.total()} requests in {time.monotonic() - started:.0f} s, none got a 5xx")


if __name__ == "__main__":
    main()
