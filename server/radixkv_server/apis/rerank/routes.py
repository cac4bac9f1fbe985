# SPDX-License-Identifier: Apache-2.0
"""The routes of reranking (Cohere's and Jina's shape) and of scores (vLLM's)."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from radixkv_server.apis.common.openai_errors import OPENAI
from radixkv_server.apis.rerank.schemas import RerankRequest, ScoreRequest
from radixkv_server.apis.rerank.serving import prepare_rerank, prepare_scores
from radixkv_server.dialect import Api
from radixkv_server.generation.generation import respond, respond_with_tokens

router = APIRouter()


@router.post("/v1/rerank")
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/rerank", include_in_schema=False)
async def rerank(request: Request) -> Response:
    """Rank documents by how likely the model calls each relevant to a query."""
    return await respond(request, OPENAI, RerankRequest, prepare_rerank, takes_many_prompts=True)


@router.post("/v1/score")
@router.post("/score", include_in_schema=False)
async def scores(request: Request) -> Response:
    """Score pairs of texts."""
    return await respond(request, OPENAI, ScoreRequest, prepare_scores, takes_many_prompts=True)


@router.post("/tokenize/v1/rerank")
async def rerank_tokens(request: Request) -> Response:
    """Return the tokens of the longest prompt of POST /v1/rerank."""
    return await respond_with_tokens(request, RerankRequest, prepare_rerank, takes_many_prompts=True)


@router.post("/tokenize/v1/score")
async def score_tokens(request: Request) -> Response:
    """Return the tokens of the longest prompt of POST /v1/score."""
    return await respond_with_tokens(request, ScoreRequest, prepare_scores, takes_many_prompts=True)


API = Api(
    router,
    bodies={
        "POST /v1/rerank": RerankRequest,
        "POST /v1/score": ScoreRequest,
        "POST /tokenize/v1/rerank": RerankRequest,
        "POST /tokenize/v1/score": ScoreRequest,
    },
    generating=frozenset({"/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"}),
)
