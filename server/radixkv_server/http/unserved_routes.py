# SPDX-License-Identifier: Apache-2.0
"""Hints for 404s: routes of other servers, and the replacements that this server has."""

from __future__ import annotations

import re

_ONE_MODEL = "this server runs the model that it was started with; GET /v1/models names it"
_NO_VECTORS = (
    "this server generates text and computes no vectors of texts; use a model made for that. "
    "POST /v1/completions with echo and logprobs tells how likely a text is"
)
_BATCHES = "POST /v1/files and POST /v1/batches answer files of requests, /v1/messages among them"
_NO_STATE = "this server keeps no assistants; POST /v1/responses and /v1/conversations keep conversations"
_NO_ANSWERS = "chat completions are not stored here; POST /v1/responses stores answers"
_CACHE = "POST /v1/cache/reset empties the prefix cache, GET /v1/cache tells what it holds"
_GENERATE = "POST /v1/completions generates from a text or token ids"
_BUSY = "GET /load and GET /v1/cache tell how busy it is"
_READ = "POST /v1/chat/completions gives calls and reasoning as fields of their own"

#: Pattern of a path -> one clause; the first match counts.
_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"(/v1|/v2|/api)?/(classify|pooling|encode|similarity|predict|embed.*)",
        _NO_VECTORS,
    ),
    (
        r"(/v1|/api)?/reranking|/api/(rerank|score)|/v2/score",
        "POST /v1/rerank and POST /v1/score judge documents",
    ),
    (r"/v1/(moderations|audio/.*|images/.*|videos.*)", "this server takes and gives text only"),
    (r"/v1/messages/batches.*", _BATCHES),
    (
        r"/v1/(uploads|vector_stores|containers|skills).*",
        "this server keeps files of batches only (POST /v1/files): put the text into the prompt",
    ),
    (r"/v1/fine_tuning.*", "this server trains no models"),
    (r"/v1/(evals|organization|projects|usage).*", "GET /metrics and the console at / tell what was used"),
    (r"/v1/prompts.*", "this server keeps no prompts: send the text, and its beginning is cached"),
    (r"/v1/(assistants|threads|chatkit).*", _NO_STATE),
    (r"/v1/chat/completions/.+", _NO_ANSWERS),
    (r"/v1/realtime.*", "the WebSocket here is /v1/responses, and takes text"),
    (r"/v1/complete", "POST /v1/messages is Anthropic's route of today"),
    (r"/v1/edits", "POST /v1/chat/completions answers instructions"),
    (r"/v1/engines.*", "engines are models now: GET /v1/models, and the field model of a request"),
    (r"/v1beta/.*", "Gemini's API is not spoken here; POST /v1/chat/completions is what most clients speak"),
    (r"/api/(pull|push|create|copy|delete|blobs.*)|/models/(un)?load", _ONE_MODEL),
    (r"/api/(web_search|web_fetch|me|signout|signin)", "that is a service of Ollama's cloud"),
    (r"/api(/.*)?/generate", _GENERATE),
    (
        r"/lora-adapters|/(un)?load_lora_adapter",
        "POST /v1/load_lora_adapter and /v1/unload_lora_adapter do it, GET /v1/models lists them",
    ),
    (r"/reset_(prefix|mm|encoder)_cache|/flush_cache|/clear_hicache.*|/freeze_gc", _CACHE),
    (r"(/v1|/inference/v1)?/(completion|infill|generate|generate_stream|invocations)", _GENERATE),
    (r"/(completions|chat/completions|responses|messages|models)", "its path here begins with /v1"),
    (r"(/.+)?/chat/completions?|/v1/chat|/chat", "its path here is /v1/chat/completions"),
    (r"(/.+)?/(responses|messages|completions)", "its path here begins with /v1, and nothing before"),
    (r"/(v1/)?(slots.*|(get_)?server_info|info|is_sleeping|is_paused|(get_)?loads?)", _BUSY),
    (r"/(get_)?model_info", "GET /v1/models and GET /props tell of the model"),
    (
        r"/apply_template|/chat_tokenize",
        "POST /apply-template gives a chat's text, POST /tokenize its tokens",
    ),
    (r"/v1/(tokenize|detokenize|tokenizer_info|load|version|ping|metrics|props)", "its path here has no /v1"),
    (r"/get_tokenizer_info", "GET /tokenizer_info tells it"),
    (
        r"/health_generate|/healthz|/readyz|/livez|/ready|/v1/health",
        "GET /health and GET /health/ready tell it",
    ),
    (r"/parse_function_call|/separate_reasoning", _READ),
    (r"/docs|/redoc", "GET /openapi.json describes the routes"),
    (r"/(v1|api)?", "it is a base URL; GET /v1/models and POST /v1/chat/completions lie below /v1"),
    (
        r"/(update_weights_from_.*|update_weight_version|(release|resume)_memory_occupation|init_weights_.*|"
        r"start_draft_weight_update|release_kv_cache_memory)",
        "POST /update_weights, /sleep and /wake_up change weights and give memory back",
    ),
    (
        r"/((start|stop)_profile|abort_requests?|slow_down|weight_info|weight_checker|pause_generation|"
        r"get_weights_.*|set_internal_state|collective_rpc|"
        r"configure_logging|continue_generation|(is_)?scal(e|ing)_elastic_ep|.*_expert_distribution_record)",
        "this server has no such control",
    ),
)
_COMPILED = [(re.compile(pattern), hint) for pattern, hint in _HINTS]


def hint_of(path: str) -> str | None:
    """Return the replacement of another server's route; None: the route is not known."""
    plain = path.rstrip("/")
    return next((hint for pattern, hint in _COMPILED if pattern.fullmatch(plain)), None)
