# SPDX-License-Identifier: Apache-2.0
"""Serving scores: a prompt for each document, its prefill, and the likelihood of the labels after it.

The prompt is that of Qwen3-Reranker, through the model's own chat template: the model is told to answer yes
or no, and thinks nothing. A score is the probability of the first label among the labels. No token is
generated. All prompts of a query begin alike: the query and what stands before it is computed once.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.engine.outputs import RequestOutput
from radixkv.errors import ContextLengthExceededError
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import Request
from radixkv.text.chat_formats.thinking import Thinking
from radixkv_server.apis.common.usage_json import usage_details
from radixkv_server.apis.rerank.schemas import JudgeFields, RerankRequest, ScoreRequest
from radixkv_server.chats.chat import Chat
from radixkv_server.chats.render import chat_prompt
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json
from radixkv_server.errors import bad_request
from radixkv_server.generation.generation import Generation, WholeRenderer
from radixkv_server.generation.progress import Usage
from radixkv_server.generation.request import new_id
from radixkv_server.http.request_record import RequestRecord

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
LABELS = ("yes", "no")
_PLACE = re.compile(r"\{(query|document|instruction)\}")
MESSAGES: tuple[Mapping[str, str], ...] = (
    {
        "role": "system",
        "content": "Judge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".',
    },
    {"role": "user", "content": "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"},
)


async def prepare_rerank(
    context: ServerContext, body: RerankRequest, record: RequestRecord
) -> Generation[WholeRenderer]:
    """Return the work that ranks documents."""
    model = context.resolve_model(body.model)
    pairs = [(body.query, text) for text in body.texts]
    labels, requests = await _requests(context, body, pairs)
    renderer = RerankRenderer(new_id("rerank-"), model, labels, body)
    return _generation(context, record, renderer, requests, "documents")


async def prepare_scores(
    context: ServerContext, body: ScoreRequest, record: RequestRecord
) -> Generation[WholeRenderer]:
    """Return the work that scores pairs of texts."""
    model = context.resolve_model(body.model)
    labels, requests = await _requests(context, body, body.pairs)
    renderer = ScoreRenderer(new_id("score-"), model, labels)
    return _generation(context, record, renderer, requests, "text_2")


def _generation(
    context: ServerContext,
    record: RequestRecord,
    renderer: RerankRenderer | ScoreRenderer,
    requests: Sequence[Request],
    prompt_param: str,
) -> Generation[WholeRenderer]:
    return Generation(
        context, record, renderer.id, requests, renderer, prompt_param=prompt_param, operation="rerank"
    )


async def _requests(
    context: ServerContext, body: JudgeFields, pairs: Sequence[tuple[str, str]]
) -> tuple[list[int], list[Request]]:
    """Return the labels' tokens, and a request for each pair that computes its prompt.

    Raises:
        ApiError: there are too many pairs, or a label is not one token.
        ContextLengthExceededError: a pair is too long.
    """
    most = context.settings.max_prompts
    if len(pairs) > most:
        raise bad_request(f"At most {most} documents are allowed (max_prompts).", param="documents")
    labels = [await _label(context, label) for label in body.labels or LABELS]
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprob_token_ids=labels)
    prompts = [_messages(body, query, document) for query, document in pairs]
    options = body.request_options()
    return labels, [
        Request(await _prompt(context, number, messages), params, **options)
        for number, messages in enumerate(prompts)
    ]


async def _label(context: ServerContext, label: str) -> int:
    ids = await context.prompts.tokenize(label, param="labels", add_special_tokens=False, allow_special=False)
    if len(ids) != 1:
        count = f"{len(ids)} tokens of this model; a label must be one"
        raise bad_request(f"The label {label[:80]!r} is {count}.", param="labels")
    return ids[0]


def _messages(body: JudgeFields, query: str, document: str) -> list[dict[str, Any]]:
    values = {"query": query, "document": document, "instruction": body.instruction or INSTRUCTION}
    given = MESSAGES if body.messages is None else [message.model_dump() for message in body.messages]
    return [{**message, "content": _filled(message["content"], values)} for message in given]


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Put values into their places; braces inside them stay."""
    return _PLACE.sub(lambda place: values[place[1]], text)


async def _prompt(context: ServerContext, number: int, messages: Sequence[dict[str, Any]]) -> Any:
    """Return a pair's tokens, with room for one label.

    Raises:
        ContextLengthExceededError: there is none; the message names the document by its index.
    """
    chat = Chat(source=messages, convert=lambda: list(messages), thinking=Thinking(enabled=False))
    try:
        prompt = await chat_prompt(context, chat)
        return await context.prompts.accept(prompt.ids, "documents")
    except ContextLengthExceededError as error:
        raise ContextLengthExceededError(f"documents[{number}]: {error}", param="documents") from None


class RerankRenderer(WholeRenderer):
    """Renderer of ranked documents, the most relevant first; equal ones in the order of the request."""

    def __init__(self, answer_id: str, model: str, labels: Sequence[int], body: RerankRequest) -> None:
        self.id = answer_id
        self._model, self._labels, self._body = model, labels, body

    def answer(self, outputs: Sequence[RequestOutput], usage: Usage) -> Json:
        scores = [score(output, self._labels) for output in outputs]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._body.top_n]
        texts = self._body.texts
        shown = self._body.return_documents is not False
        results = [
            {
                "index": index,
                **({"document": {"text": texts[index]}} if shown else {}),
                "relevance_score": scores[index],
            }
            for index in order
        ]
        return {"id": self.id, "model": self._model, "results": results, "usage": _usage_json(usage)}


class ScoreRenderer(WholeRenderer):
    """Renderer of scores in the order of the pairs."""

    def __init__(self, answer_id: str, model: str, labels: Sequence[int]) -> None:
        self.id = answer_id
        self._model, self._labels = model, labels

    def answer(self, outputs: Sequence[RequestOutput], usage: Usage) -> Json:
        data = [
            {"index": index, "object": "score", "score": score(output, self._labels)}
            for index, output in enumerate(outputs)
        ]
        return {
            "id": self.id,
            "object": "list",
            "created": int(time.time()),
            "model": self._model,
            "data": data,
            "usage": _usage_json(usage),
        }


def score(output: RequestOutput, labels: Sequence[int]) -> float:
    """Return the probability of the first label among the labels, in [0, 1]."""
    (places,) = [sample.logprobs for sample in output.outputs]
    assert places
    named = places[0].named
    most = max(named[label] for label in labels)
    weights = [math.exp(named[label] - most) for label in labels]
    return weights[0] / sum(weights)


def _usage_json(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "prompt_tokens_details": usage_details(usage),
    }
