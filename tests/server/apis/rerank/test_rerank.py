# SPDX-License-Identifier: Apache-2.0
"""Reranking and scores over real HTTP, by a model whose logits are known, and what they cost."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from live_server import LiveServer, live_server
from paged_language_model import LetterTokenizer, make_engine, next_logits

from radixkv import AsyncEngine

LABELS = ["y", "n"]
TOKENIZER = LetterTokenizer()


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    made = AsyncEngine(make_engine(num_blocks=600, block_size=8, tokenizer=LetterTokenizer())[0])
    yield made
    asyncio.run(made.close())


@pytest.fixture
def server(engine: AsyncEngine) -> Iterator[LiveServer]:
    with live_server(engine) as running:
        yield running


def post(server: LiveServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with server.http() as client:
        answer = client.post(path, json={"labels": LABELS, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def score_of(server: LiveServer, body: dict[str, Any]) -> float:
    """The score by the model's own rule, of the prompt that the server says it renders."""
    with server.http() as client:
        ids = client.post("/tokenize", json=body).json()["tokens"]
    logits = next_logits(np.array(ids))
    yes, no = (float(logits[TOKENIZER.encode(label)[0]]) for label in LABELS)
    return 1 / (1 + math.exp(no - yes))


def judged(query: str, document: str, instruction: str = "I") -> dict[str, Any]:
    """The prompt as a chat."""
    return {"messages": [{"role": "user", "content": f"{instruction}|{query}|{document}"}]}


TEMPLATE = [{"role": "user", "content": "{instruction}|{query}|{document}"}]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_ranked_by_the_label_after_their_prompt(server: LiveServer, path: str) -> None:
    documents = [f"document number {i} is about {'cats' * (i % 3)}" for i in range(9)]
    documents[4] = "with {query} and {document} in braces"
    query = "what is {document}?"
    body = {"query": query, "documents": documents, "instruction": "I", "messages": TEMPLATE}
    answer = post(server, path, body)
    expected = [score_of(server, judged(query, text)) for text in documents]
    assert [result["index"] for result in answer["results"]] == sorted(range(9), key=lambda i: -expected[i])
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(expected[result["index"]], rel=1e-5)
        assert result["document"] == {"text": documents[result["index"]]}
    assert answer["id"].startswith("rerank-")
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 0

    short = post(
        server,
        path,
        {**body, "documents": [{"text": text} for text in documents], "top_n": 2, "return_documents": False},
    )
    ranked = [(one["index"], one["relevance_score"]) for one in answer["results"]]
    assert [(one["index"], one["relevance_score"]) for one in short["results"]] == ranked[:2]
    assert all("document" not in result for result in short["results"])


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_one_text_is_scored_against_others_and_pairs_by_pairs(server: LiveServer, path: str) -> None:
    ask = {"messages": TEMPLATE, "instruction": "I"}
    one = post(server, path, {**ask, "text_1": "a", "text_2": ["b", "c"]})
    pairs = post(server, path, {**ask, "queries": ["a", "a"], "documents": ["b", "c"]})
    scores = [item["score"] for item in one["data"]]
    assert scores == [item["score"] for item in pairs["data"]]
    assert scores == pytest.approx([score_of(server, judged("a", text)) for text in "bc"], rel=1e-5)
    assert [item["index"] for item in one["data"]] == [0, 1]
    assert one["object"] == "list"


def test_a_hundred_documents_cost_their_query_once(server: LiveServer, engine: AsyncEngine) -> None:
    query = "".join(chr(65 + i * i % 50) for i in range(2000))
    documents = [f"{i}: " + "d" * 20 for i in range(100)]
    before = engine.stats().computed_tokens
    answer = post(server, "/v1/rerank", {"query": query, "documents": documents, "messages": TEMPLATE})
    computed = engine.stats().computed_tokens - before
    prompt = answer["usage"]["prompt_tokens"]
    tails = sum(len(text) for text in documents)
    ideal = prompt - 99 * (prompt - tails) // 100
    assert computed <= 1.1 * ideal
    assert engine.stats().generated_tokens <= 100, "no label is computed with, only read"


def test_scores_do_not_depend_on_the_cache_or_on_the_pool(server: LiveServer) -> None:
    documents = [f"text {i}" for i in range(12)]
    body = {"query": "a question", "documents": documents, "messages": TEMPLATE}
    cold, hot = (post(server, "/v1/rerank", body)["results"] for _ in range(2))
    assert cold == hot
    small = AsyncEngine(make_engine(num_blocks=14, block_size=8, tokenizer=LetterTokenizer())[0])
    with live_server(small) as running:
        assert post(running, "/v1/rerank", body)["results"] == cold
    asyncio.run(small.close())


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("/v1/rerank", {"documents": []}, "documents", "at least 1"),
        ("/v1/rerank", {"labels": ["yes", "no"]}, "labels", "is 3 tokens of this model"),
        ("/v1/rerank", {"labels": ["y"]}, "labels", "2 to 16"),
        ("/v1/rerank", {"top_n": 0}, "top_n", "at least 1"),
        ("/v1/rerank", {"stream": True}, "stream", "leave stream out"),
        ("/v1/rerank", {"messages": [{"role": "user", "content": "{query}"}]}, "messages", "{document}"),
        ("/v1/rerank", {"rank_fields": ["a"]}, "rank_fields", "join them"),
        ("/v1/rerank", {"documents": ["x"] * 300}, "documents", "At most 256"),
        ("/v1/rerank", {"documents": ["short", "x" * 9000]}, "documents", "documents[1]"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2", "give one, or as many"),
        ("/v1/score", {"text_1": "a"}, "text_1", "must not be empty"),
    ],
)
def test_what_can_not_be_judged_is_named(
    server: LiveServer, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    usual = {"query": "q", "documents": ["d"]} if path == "/v1/rerank" else {}
    with server.http() as client:
        answer = client.post(path, json={"labels": LABELS, **usual, **fields})
    assert answer.status_code == httpx.codes.BAD_REQUEST, answer.text
    error = answer.json()["error"]
    assert (error["param"] or "").startswith(param)
    assert words in error["message"]


def test_the_longest_prompt_is_told(server: LiveServer) -> None:
    body = {"query": "q", "documents": ["short", "a longer one"], "messages": TEMPLATE, "labels": LABELS}
    with server.http() as client:
        told = client.post("/tokenize/v1/rerank", json=body).json()
        longest = client.post("/tokenize", json=judged("q", "a longer one", instruction="")).json()
    assert told["count"] > longest["count"], "with the usual instruction"
