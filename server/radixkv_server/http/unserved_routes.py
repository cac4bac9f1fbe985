# SPDX-License-Identifier: Apache-2.0
"""Hints for 404s: routes of other servers, and the replacements that this server has."""

from __future__ import annotations

import re

_ONE_MODEL = "this server runs the model that it was started with; GET /v1/models names it"
_NO_VECTORS = "this server generates text and computes no vectors or scores of texts"
_NO_BATCHES = "send the requests themselves, as many at once as you like: the server queues them"
_NO_STATE = "this server keeps no assistants; POST /v1/responses keeps conversations"
_CACHE = "POST /v1/cache/reset empties the prefix cache, GET /v1/cache tells what it holds"
_GENERATE = "POST /v1/completions generates from a text or token ids"

#: Pattern of a path -> one clause; the first match counts.
_HINTS: tuple[tuple[str, str], ...] = (
    (r"(/v1|/v2|/api)?/(rerank|score|classify|pooling|encode|embed(dings?)?|similarity)", _NO_VECTORS),
    (r"/v1/(moderations|audio/.*|images/.*|videos.*)", "this server takes and gives text only"),
    (r"/v1/(messages/)?batches.*", _NO_BATCHES),
    (
        r"/v1/(files|uploads|vector_stores|containers).*",
        "this server keeps no files: put the text into the prompt",
    ),
    (r"/v1/fine_tuning.*", "this server trains no models"),
    (r"/v1/(assistants|threads).*", _NO_STATE),
    (r"/v1/realtime.*", "the WebSocket here is /v1/responses, and takes text"),
    (r"/api/(pull|push|create|copy|delete|blobs.*)", _ONE_MODEL),
    (
        r"/lora-adapters|/(un)?load_lora_adapter",
        "POST /v1/load_lora_adapter and /v1/unload_lora_adapter do it, GET /v1/models lists them",
    ),
    (r"/(reset_prefix_cache|flush_cache|reset_mm_cache)", _CACHE),
    (r"/(completion|completions|infill|generate|generate_stream|api/v1/generate)", _GENERATE),
    (r"/chat/completions|/responses|/messages", "its path here begins with /v1"),
    (
        r"/(slots.*|(get_)?server_info|info|is_sleeping|get_load)",
        "GET /load and GET /v1/cache tell how busy it is",
    ),
    (r"/(get_)?model_info", "GET /v1/models and GET /props tell of the model"),
    (r"/get_tokenizer_info", "GET /tokenizer_info tells it"),
    (r"/health_generate|/healthz|/readyz|/livez|/ready", "GET /health and GET /health/ready tell it"),
    (
        r"/(update_weights.*|sleep|wake_up|start_profile|stop_profile|abort_request)",
        "this server has no such control",
    ),
)
_COMPILED = [(re.compile(pattern), hint) for pattern, hint in _HINTS]


def hint_of(path: str) -> str | None:
    """Return the replacement of another server's route; None: the route is not known."""
    plain = path.rstrip("/")
    return next((hint for pattern, hint in _COMPILED if pattern.fullmatch(plain)), None)
