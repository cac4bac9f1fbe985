# SPDX-License-Identifier: Apache-2.0
"""Explanations without a server: prompts sent one after the other to an empty cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.cache.keys import TOKEN_BYTES, encode_tokens, shared_bytes
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.reporting.explain import MissReport
from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError, InvalidRequestError
from radixkv.observe.explanation import SHOWN_TOKENS, MissPlace, Predecessor, explain, sides_of
from radixkv.observe.prompt_parts import PromptParts
from radixkv.observe.recoverable import recoverable_tokens


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Prompt of one file: its tokens, and its fields in the request."""

    token_ids: list[int]
    fields: dict[str, Any]

    def parts(self, as_text: str | None) -> PromptParts:
        """Return the parts to compare; `as_text`: the prompt as text, where the other one is no chat."""
        if as_text is not None:
            return PromptParts.of_text(as_text)
        return PromptParts.of_chat(self.fields["messages"], self.fields.get("tools") or ())


class LocalCache:
    """Empty cache with the settings of an engine, and the model's tokenizer."""

    def __init__(self, config: EngineConfig) -> None:
        from radixkv.model.loading.loader import load_tokenizer  # heavy; --url does without

        self._tokenizer = load_tokenizer(config)
        self._cache = PrefixCache(config.num_blocks or 65536, config.block_size, config.eviction_policy)
        self._block_size = config.block_size
        self._earlier: list[_Prompt] = []

    def explain(self, path: Path, fields: dict[str, Any]) -> dict[str, Any]:
        """Explain a prompt in the form of a server's answer; afterwards the cache holds it.

        Raises:
            ConfigError: the prompt is none, or does not fit.
        """
        try:
            prompt = _Prompt(self._encode(fields), fields)
            report = self._cache.explain(prompt.token_ids)
            cached = self._cache.tree.continuation(prompt.token_ids, limit=SHOWN_TOKENS)
            lease = self._cache.acquire(prompt.token_ids)
        except (InvalidRequestError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: {error}") from error
        lease.commit(len(prompt.token_ids))
        lease.release()
        told = report.to_dict() | self._cause(report, prompt, cached)
        self._earlier.append(prompt)
        return told

    def _encode(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            options = dict(body.get("chat_template_kwargs") or {})
            return self._tokenizer.apply_chat_template(body["messages"], tools=body.get("tools"), **options)
        if "prompt" not in body:
            raise InvalidRequestError("two prompts are compared by a server: give --url")
        prompt = body["prompt"]
        return self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _cause(self, report: MissReport, prompt: _Prompt, cached: list[int]) -> dict[str, Any]:
        """Return the texts around the place where the match ends, the cause and the advice."""
        shared, earlier = self._nearest(prompt.token_ids)
        place = self._place(report, prompt.token_ids, cached, earlier)
        predecessor = None
        are_texts = earlier is not None and not ("messages" in earlier.fields and "messages" in prompt.fields)
        if earlier is not None:
            predecessor = Predecessor(
                lambda: earlier.parts(self._text(earlier.token_ids) if are_texts else None),
                shared,
                is_whole=shared == len(earlier.token_ids),
            )
        explanation = explain(
            report,
            lambda: prompt.parts(self._text(prompt.token_ids) if are_texts else None),
            predecessor,
            place,
            block_size=self._block_size,
        )
        breaker = explanation.breaker
        around = None
        if place is not None:
            around = {
                "position": place.position,
                "before": place.before,
                "prompt": place.new,
                "cached": place.old or None,
            }
        return {
            "prompt_tokens": report.num_prompt_tokens,
            "cached_tokens": report.num_hit_tokens,
            "around": around,
            "breaker": None if breaker is None else {"kind": breaker.kind, "place": breaker.place or None},
            "advice": explanation.advice,
        }

    def _nearest(self, token_ids: list[int]) -> tuple[int, _Prompt | None]:
        """Return the prompt before that shares most, the latest of equals, and how many tokens it shares."""
        own, found, most = encode_tokens(token_ids), None, 0
        for prompt in self._earlier:
            shared = shared_bytes(own, encode_tokens(prompt.token_ids)) // TOKEN_BYTES
            if shared >= most and shared:
                found, most = prompt, shared
        return most, found

    def _place(
        self, report: MissReport, token_ids: list[int], cached: list[int], earlier: _Prompt | None
    ) -> MissPlace | None:
        """Return the place where the match ends; None: it does not."""
        if report.reason == "hit":
            return None
        position = report.num_hit_tokens
        before, new = (token_ids[side] for side in sides_of(position))
        others = [] if earlier is None else earlier.token_ids[position:]
        return MissPlace(
            position,
            report.num_missed_tokens,
            recoverable_tokens(token_ids[position:], others),
            before=self._text(before),
            new=self._text(new),
            old=self._text(cached),
        )

    def _text(self, token_ids: list[int]) -> str:
        return b"".join(map(self._tokenizer.token_bytes, token_ids)).decode("utf-8", "replace")
