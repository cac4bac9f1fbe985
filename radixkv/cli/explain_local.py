# SPDX-License-Identifier: Apache-2.0
"""Explanations without a server: prompts sent one after the other to an empty cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError, InvalidRequestError
from radixkv.observe.explanation import SHOWN_TOKENS, sides_of


class LocalCache:
    """Empty cache with the settings of an engine, and the model's tokenizer."""

    def __init__(self, config: EngineConfig) -> None:
        from radixkv.model.loading.loader import load_tokenizer  # heavy; --url does without

        self._tokenizer = load_tokenizer(config)
        self._cache = PrefixCache(config.num_blocks or 65536, config.block_size, config.eviction_policy)

    def explain(self, path: Path, prompt: dict[str, Any]) -> dict[str, Any]:
        """Explain a prompt in the form of a server's answer; afterwards the cache holds it.

        Raises:
            ConfigError: the prompt is none, or does not fit.
        """
        try:
            token_ids = self._encode(prompt)
            report = self._cache.explain(token_ids)
            cached = self._cache.tree.continuation(token_ids, limit=SHOWN_TOKENS)
            lease = self._cache.acquire(token_ids)
        except (InvalidRequestError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: {error}") from error
        lease.commit(len(token_ids))
        lease.release()
        fields = report.to_dict()
        fields["prompt_tokens"], fields["cached_tokens"] = report.num_prompt_tokens, report.num_hit_tokens
        fields["around"] = None
        if report.reason != "hit":
            fields["around"] = self._around(token_ids, report.num_hit_tokens, cached)
        return fields

    def _encode(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            options = dict(body.get("chat_template_kwargs") or {})
            return self._tokenizer.apply_chat_template(body["messages"], tools=body.get("tools"), **options)
        if "prompt" not in body:
            raise InvalidRequestError("two prompts are compared by a server: give --url")
        prompt = body["prompt"]
        return self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _around(self, token_ids: list[int], position: int, cached: list[int]) -> dict[str, Any]:
        before, new = (token_ids[side] for side in sides_of(position))
        return {
            "position": position,
            "before": self._text(before),
            "prompt": self._text(new),
            "cached": self._text(cached) if cached else None,
        }

    def _text(self, token_ids: list[int]) -> str:
        return b"".join(map(self._tokenizer.token_bytes, token_ids)).decode("utf-8", "replace")
