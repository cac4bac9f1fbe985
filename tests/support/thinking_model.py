# SPDX-License-Identifier: Apache-2.0
"""A model for tests of forced calls over HTTP: noise that a grammar guides, in a real engine.

Each byte is a token, so that a text has one spelling in tokens, and each special token of the chat formats is
one. What a grammar leaves open is drawn from a hash of the context, but thoughts are short, and calls few.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import xxhash
from paged_language_model import PagedHashModel
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as TokenizerOfBytes
from transformers import PreTrainedTokenizerFast

from radixkv.engine.config import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.engine.served_model import ServedModel
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv.entrypoints.builder import engine_on_runner
from radixkv.scheduling.batch import Batch
from radixkv.text.tokenizer import Tokenizer

_BEGIN, _END = "<|begin of text|>", "<|end of text|>"


def byte_tokenizer(special: Iterable[str]) -> Tokenizer:
    """Return a tokenizer of 256 bytes, an end token and further special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    plain = TokenizerOfBytes(models.BPE(vocab=vocabulary, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(text, normalized=False) for text in (_BEGIN, _END)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token=_BEGIN, eos_token=_END, pad_token=_END
    )
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return Tokenizer(tokenizer)


class ThinkingModel(PagedHashModel):
    """Hash model whose thoughts are short.

    Args:
        tokenizer: its tokens.
        opens, closes: special tokens that open thoughts, and ones that close them.

    Attributes:
        thinks: it thinks where it may.
    """

    def __init__(
        self, num_blocks: int, block_size: int, tokenizer: Tokenizer, opens: set[str], closes: set[str]
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.thinks = True
        self._size = tokenizer.vocab_size
        texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(self._size)]
        self._break, self._brace = texts.index("\n"), texts.index("}")
        self._letters = np.array([len(text) == 1 and text.isascii() and text.islower() for text in texts])
        self._opens = np.array([text in opens for text in texts])
        self._closes = np.array([text in closes for text in texts])
        # What ends a list of calls, and a turn: by chance alone some answers would have a dozen.
        self._ends = np.array([text in ("]", "/", _END) for text in texts])

    def execute(self, batch: Batch) -> torch.Tensor:
        seeds = super().execute(batch).numpy()
        logits = np.empty((len(seeds), self._size), np.float32)
        for i, row in enumerate(batch.logit_rows.tolist()):
            noise = np.random.default_rng(xxhash.xxh3_64_intdigest(seeds[i].tobytes()))
            logits[i] = noise.normal(size=self._size)
            r = int(np.searchsorted(batch.query_starts, row, side="right")) - 1
            before, last = self._read(batch, r, int(batch.positions[row]) + 1)[-2:]
            is_break = last == self._break
            after_letter = bool(self._letters[before if is_break else last])
            logits[i] += 8.0 * self._letters + 10.0 * self._ends
            may_break = last == self._brace or (after_letter and not is_break)
            logits[i][self._break] += 20.0 if may_break else -20.0
            logits[i][self._closes] += 30.0 if after_letter else 0.0
            logits[i][self._opens] += 30.0 if self.thinks else -30.0
        return torch.from_numpy(logits)


def thinking_engine(
    special: Iterable[str], opens: set[str], closes: set[str], *, num_blocks: int = 2048, **options: Any
) -> tuple[AsyncEngine, ThinkingModel]:
    """Return an engine over a `ThinkingModel`, and the model.

    Args:
        special: special tokens of its vocabulary.
        opens, closes: see `ThinkingModel`.
        options: further fields of `EngineConfig`.
    """
    tokenizer = byte_tokenizer(special)
    model = ThinkingModel(num_blocks, 16, tokenizer, opens, closes)

    def make() -> Engine:
        return engine_on_runner(
            EngineConfig(
                block_size=16, num_blocks=num_blocks, max_num_batched_tokens=8192, seed=0, **options
            ),
            model,
            ServedModel(
                tokenizer=tokenizer,
                max_model_len=16_000,
                vocab_size=tokenizer.vocab_size,
                end_token_ids=frozenset(tokenizer.eos_token_ids),
                name="thinking",
            ),
        )

    return AsyncEngine(make), model
