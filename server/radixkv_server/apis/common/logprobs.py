# SPDX-License-Identifier: Apache-2.0
"""Logprobs of an answer's tokens, in the forms of chats and of completions."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Sequence

from radixkv.sampling.logprobs import Logprob, TokenLogprobs
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.text.chat_formats.answer import ContentDelta
from radixkv.text.text_tokenizer import TextTokenizer
from radixkv_server.dialect import Json


class TextOffsets:
    """Offsets at which tokens begin in the text of their choice, in characters.

    A token inside a character begins where the character does: its text appears with its last token.

    Args:
        start: characters of the choice's text before the first of these tokens.
    """

    def __init__(self, tokenizer: TextTokenizer, start: int, *, skip_special_tokens: bool) -> None:
        self._decoder = tokenizer.stream(skip_special_tokens=skip_special_tokens)
        self._next = start

    def take(self, token_id: int) -> int:
        """Return the offset of the next token."""
        offset = self._next
        self._next += len(self._decoder.push([token_id]))
        return offset


class ContentTokens:
    """Tokens of an answer's content, found by their offsets in its text.

    Left out are tokens of reasoning, tool calls and marks, and tokens that end the answer or add no text. A
    stream may have a token before it has the token's text.
    """

    def __init__(self, tokenizer: TextTokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._new_decoder = functools.partial(
            tokenizer.stream, params.skip_special_tokens, kept=params.kept_special_tokens
        )
        self._decoder = self._new_decoder()
        self._waiting: deque[tuple[int, int, TokenLogprobs]] = deque()  # start, end, token
        self._at = 0

    def add(self, logprobs: Sequence[TokenLogprobs] | None) -> None:
        """Add tokens of the answer. O(tokens)."""
        for entry in logprobs or ():
            token_id = entry.chosen.token_id
            text = self._decoder.push([token_id])
            start, self._at = self._at, self._at + len(text)
            if text:
                # It may complete a character that tokens before it have begun.
                own = self._own_text(token_id)
                start = self._at - len(own) if own and text.endswith(own) else start
                self._waiting.append((start, self._at, entry))
            elif not self._adds_nothing(token_id):
                self._waiting.append((start, start + 1, entry))  # the character comes with a later token

    def take(self, event: ContentDelta) -> list[TokenLogprobs]:
        """Return the logprobs of a piece of content, without any returned before. O(tokens up to there)."""
        end = event.start + len(event.text)
        taken = []
        while self._waiting and self._waiting[0][0] < end:
            _, token_end, entry = self._waiting.popleft()
            if token_end > event.start:
                taken.append(entry)
        return taken

    def _own_text(self, token_id: int) -> str:
        try:
            return self._tokenizer.token_bytes(token_id).decode("utf-8")
        except UnicodeDecodeError:
            return ""

    def _adds_nothing(self, token_id: int) -> bool:
        if not self._tokenizer.is_added_token(token_id):
            return False
        decoder = self._new_decoder()
        return not decoder.push([token_id]) and not decoder.finish()


class LogprobsFormat:
    """Converter of a request's TokenLogprobs into the forms of chat and text completions.

    Args:
        as_ids: tokens are named by their ids, `token_id:42` (vLLM's `return_tokens_as_token_ids`).

    Attributes:
        are_wanted: the request asks for them.
    """

    def __init__(self, tokenizer: TextTokenizer, params: SamplingParams, *, as_ids: bool = False) -> None:
        self.tokenizer = tokenizer
        self.are_wanted = params.logprobs is not None
        self._params = params
        self._as_ids = as_ids

    def content_tokens(self) -> ContentTokens:
        """Make the tokens of a sample's content."""
        return ContentTokens(self.tokenizer, self._params)

    def chat(self, entries: Sequence[TokenLogprobs]) -> Json:
        """`{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}`."""
        return {"content": self.tokens(entries), "refusal": None}

    def tokens(self, entries: Sequence[TokenLogprobs]) -> list[Json]:
        """`[{token, logprob, bytes, top_logprobs}]`."""
        return [
            {**self._chat_token(entry.chosen), "top_logprobs": [self._chat_token(top) for top in entry.top]}
            for entry in entries
        ]

    def _chat_token(self, item: Logprob) -> Json:
        raw = self.tokenizer.token_bytes(item.token_id)
        return {
            "token": _id_name(item.token_id) if self._as_ids else item.text or raw.decode("utf-8", "replace"),
            "logprob": finite(item.logprob),
            "bytes": list(raw),
        }

    def text(
        self,
        entries: Iterable[TokenLogprobs | None],
        ids: Sequence[int],
        offsets: Iterable[int],
        num_top: int,
    ) -> Json:
        """`{tokens, token_logprobs, top_logprobs, text_offset}`, offsets in characters of the choice's text.

        An entry of None is the first prompt token, which nothing precedes. The chosen token is among its
        `top_logprobs` even when it is not among the likeliest: with `num_top` 0 it is the only one.
        """
        tokens: list[str] = []
        chosen: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for entry, token_id in zip(entries, ids, strict=True):
            tokens.append(self._text_token(token_id))
            chosen.append(None if entry is None else finite(entry.chosen.logprob))
            tops.append(self._text_top(entry, num_top) if entry is not None else None)
        return {
            "tokens": tokens,
            "token_logprobs": chosen,
            "top_logprobs": tops,
            "text_offset": list(offsets),
        }

    def offsets(self, start: int, *, skip_special_tokens: bool) -> TextOffsets:
        """Make the offsets of tokens after `start` characters."""
        return TextOffsets(self.tokenizer, start, skip_special_tokens=skip_special_tokens)

    def _text_top(self, entry: TokenLogprobs, num_top: int) -> dict[str, float]:
        best: dict[str, float] = {}
        for item in (*entry.top[:num_top], entry.chosen):
            # Two tokens can have the same text: keep the likelier one.
            text = self._text_token(item.token_id)
            best[text] = max(finite(item.logprob), best.get(text, -9999.0))
        return best

    def _text_token(self, token_id: int) -> str:
        """The token's text; bytes that are not whole characters as `bytes:\\xe2\\x80`, as OpenAI does."""
        if self._as_ids:
            return _id_name(token_id)
        raw = self.tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def finite(logprob: float) -> float:
    """Replace infinity, which JSON lacks: a masked token gets OpenAI's -9999."""
    return max(float(logprob), -9999.0)
