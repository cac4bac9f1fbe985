# SPDX-License-Identifier: Apache-2.0
"""TextTokenizer and TextDecoder: the interface of tokenizers, in this process or another."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol


class TextDecoder(Protocol):
    """The text of one growing sequence of token ids; its pieces concatenate to the whole text."""

    def push(self, token_ids: list[int]) -> str:
        """Add ids and return the text that they complete, possibly empty."""

    def finish(self) -> str:
        """Return the text that was held back, possibly empty; no more ids come."""


class TextTokenizer(Protocol):
    """A tokenizer as callers see it; any thread. For long texts use the client's own methods."""

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer knows."""

    @property
    def has_chat_template(self) -> bool:
        """True if `apply_chat_template` works without a template."""

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template; None: there is none, or it can't be read."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Entries of a tokenizer_config.json, as JSON data: class, special tokens, added tokens.

        `bos_token`, `eos_token`, `pad_token` and `unk_token` are always there, null where there is none.
        """

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return token ids of a text."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""

    def stream(self, skip_special_tokens: bool = True, *, kept: Collection[str] = ()) -> TextDecoder:
        """Return a decoder for one output; its pieces concatenate to the result of `decode` for all ids.

        Args:
            kept: spellings of special tokens that are not skipped.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to a text; none for unknown ids."""

    def token_text(self, token_id: int) -> str:
        """Return `token_bytes` as text, with U+FFFD for incomplete characters."""

    def is_added_token(self, token_id: int) -> bool:
        """Return whether a token was added to the vocabulary, special or not.

        To grammars each such token is a symbol that no text matches.
        """

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[int]:
        """Return token ids of a conversation.

        Raises:
            InvalidRequestError: there is no chat template, or it refuses the messages.
        """
