"""Logprobs in the shapes of both OpenAI routes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from radixkv.client import TextTokenizer
from radixkv.request import CompletionOutput, Logprob, OutputDelta, SamplingParams, TokenLogprobs
from radixkv_server.dialect import Json


class TextOffsets:
    """Where each token begins in the text of its choice, in characters.

    A token inside a character begins where the character does: its text appears with its last token.

    Args:
        start: characters of the choice's text before the first of these tokens.
    """

    def __init__(self, tokenizer: TextTokenizer, start: int, *, skip_special_tokens: bool) -> None:
        self._decoder = tokenizer.stream(skip_special_tokens=skip_special_tokens)
        self._next = start

    def take(self, token_id: int) -> int:
        """The offset of the next token."""
        offset = self._next
        self._next += len(self._decoder.push([token_id]))
        return offset


class ShownTokens:
    """The tokens of one answer whose text it shows: not what ended it, the end token or a stop string's.

    A stream may show a token's text later than it has the token.
    """

    def __init__(self, tokenizer: TextTokenizer, params: SamplingParams) -> None:
        self._decoder = tokenizer.stream(params.skip_special_tokens, kept=params.kept_special_tokens)
        self._waiting: list[tuple[int, TokenLogprobs]] = []
        self._next = self._shown = 0

    def take(self, part: CompletionOutput | OutputDelta) -> list[TokenLogprobs] | None:
        """Those that begin in the text up to here and have not been given; None: none were asked for."""
        if part.logprobs is None and not self._waiting:
            return None
        for entry in part.logprobs or ():
            self._waiting.append((self._next, entry))
            self._next += len(self._decoder.push([entry.chosen.token_id]))
        self._shown += len(part.text)
        ready = [entry for offset, entry in self._waiting if offset < self._shown]
        self._waiting = self._waiting[len(ready) :]
        return ready


class LogprobsFormat:
    """Turns TokenLogprobs into the chat and the text-completion shape.

    Args:
        as_ids: tokens are named by their ids, `token_id:42` (vLLM's `return_tokens_as_token_ids`).
    """

    def __init__(self, tokenizer: TextTokenizer, *, as_ids: bool = False) -> None:
        self.tokenizer = tokenizer
        self._as_ids = as_ids

    def chat(self, entries: Sequence[TokenLogprobs] | None) -> Json | None:
        """`{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}`."""
        if entries is None:
            return None
        content = [
            {**self._chat_token(entry.chosen), "top_logprobs": [self._chat_token(top) for top in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

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
        """Offsets of tokens that follow `start` characters."""
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
    """JSON has no infinity: a masked token gets OpenAI's -9999."""
    return max(float(logprob), -9999.0)
