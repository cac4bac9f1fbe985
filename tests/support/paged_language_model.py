# SPDX-License-Identifier: Apache-2.0
"""A model for engine tests: tiny, deterministic, and unforgiving about paged memory.

Its "K/V" of a token is the token's id, its position and a hash of all tokens up to it (as a real layer's K/V
depends on them), written to the slot the batch names. Its next-token distribution is a hash of the whole
context *as read back through the block table*: a wrong block, a missing copy or an unwritten slot changes the
output. Every entry of every step is also compared with its request at once, sampled or not; what differs is
noted in `violations`, which `tests/conftest.py` looks at after each test: the engine itself would take it for
a failed step, and try again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import xxhash

from radixkv.engine.config import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.engine.served_model import ServedModel
from radixkv.entrypoints.builder import engine_on_runner
from radixkv.model.block_copy import BlockCopy
from radixkv.scheduling.batch import Batch, Copy
from radixkv.speculation.step_costs import StepCosts

VOCAB = 97
END = 0

#: Engines made by `make_engine` in the running test; `tests/conftest.py` looks at them after it.
MADE: list[Engine] = []


# One random odd weight a position: the hash of a prefix is the sum of (token + 1) * weight, modulo 2**64.
_WEIGHTS = np.random.default_rng(0).integers(0, 2**63, 1 << 14, dtype=np.uint64) * 2 + 1


def prefix_hashes(tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """uint64 [n]: a hash of tokens[: i + 1] for every i."""
    with np.errstate(over="ignore"):
        return np.cumsum((tokens.astype(np.uint64) + 1) * _WEIGHTS[: len(tokens)], dtype=np.uint64)


def next_logits(context: np.ndarray[Any, Any], salt: int = 0) -> np.ndarray[Any, Any]:
    """Logits [VOCAB] for the token after `context`; the plain reference that engine output is held to."""
    seed = xxhash.xxh3_64_intdigest(np.ascontiguousarray(context, dtype=np.int64).tobytes(), seed=salt)
    return np.random.Generator(np.random.Philox(key=seed)).normal(size=VOCAB).astype(np.float32) * 3


def greedy_reference(prompt: list[int], max_tokens: int) -> list[int]:
    """What greedy decoding gives, computed without any engine."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(next_logits(np.asarray(tokens)).argmax()))
        if tokens[-1] == END:
            break
    return tokens[len(prompt) :]


class LetterTokenizer:
    """Text for the paged hash model: a token is one letter.

    Args:
        on_encode: called with each text before it is encoded, in the thread that encodes it.
        on_decode: called with each token before it is decoded.
    """

    vocab_size = VOCAB
    has_chat_template = True
    chat_template: str | None = None

    def __init__(
        self,
        *,
        on_encode: Callable[[str], object] = id,
        on_decode: Callable[[int], object] = id,
    ) -> None:
        self.on_encode = on_encode
        self.on_decode = on_decode

    def encode(self, text: str, add_special_tokens: bool = True, *, allow_special: bool = True) -> list[int]:
        self.on_encode(text)
        return [1 + ord(letter) % (VOCAB - 1) for letter in text]

    @property
    def facts(self) -> dict[str, Any]:
        return dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token", "chat_template"))

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()

    def token_text(self, token_id: int) -> str:
        self.on_decode(token_id)
        return chr(33 + token_id)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(self.token_text, token_ids))

    def is_added_token(self, token_id: int) -> bool:
        return False

    def grammar_source(self) -> LetterGrammarSource:
        return LetterGrammarSource()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: object = None,
        add_generation_prompt: bool = True,
        **options: object,
    ) -> list[int]:
        parts = (message["content"] for message in messages)
        return self.encode("".join(part if isinstance(part, str) else "" for part in parts))

    def stream(self, skip_special_tokens: bool = True, *, kept: object = ()) -> LetterDecoder:
        return LetterDecoder(self)


class LetterGrammarSource:
    """The letters as llguidance takes a tokenizer."""

    is_tokenizer_wrapper = True
    tokens: ClassVar = [chr(33 + token).encode() for token in range(VOCAB)]
    special_token_ids: ClassVar = [END]
    eos_token_id, bos_token_id = END, None

    def __call__(self, text: str | bytes) -> list[int]:
        return [ord(letter) - 33 for letter in (text.decode() if isinstance(text, bytes) else text)]


class LetterDecoder:
    """One growing output of a `LetterTokenizer`."""

    def __init__(self, tokenizer: LetterTokenizer) -> None:
        self.tokenizer = tokenizer

    def push(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids)

    def finish(self) -> str:
        return ""


class PagedHashModel:
    """Stands where the model runner stands.

    Args:
        fail_if: called with each batch; True makes the step fail after its K/V has been half written.
        nan_for: request ids whose logits are NaN.
    """

    backend_name, dtype_name, device_name = "hash", "int64", "cpu"
    states: Any = None
    windows: Any = None
    images: Any = None

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        fail_if: Callable[[Batch], bool] | None = None,
        nan_for: set[str] | None = None,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tokens = np.full(num_blocks * block_size, -1, dtype=np.int64)
        self.positions = np.full(num_blocks * block_size, -1, dtype=np.int64)
        self.hashes = np.zeros(num_blocks * block_size, dtype=np.uint64)
        self.violations: list[str] = []
        self.fail_if = fail_if
        self.nan_for = nan_for or set()
        self.batches: list[list[tuple[str, int, int]]] = []
        self.num_computed = 0

    @property
    def bytes_per_block(self) -> int:
        """Tokens, positions and hashes, 8 bytes each."""
        return 24 * self.block_size

    @property
    def failure(self) -> None:
        return None

    def on_failure(self, call: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        pass

    def warm_up(self, *, thorough: bool = True) -> None:
        """What is in the memory now is nobody's."""
        self.tokens[: self.block_size] = self.positions[: self.block_size] = -2

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        reads = [self._slots(source, count) for source, _, count in copies]
        for memory in (self.tokens, self.positions, self.hashes):
            values = [memory[slots].copy() for slots in reads]
            for (_, target, count), value in zip(copies, values, strict=True):
                memory[self._slots(target, count)] = value

    def contents(self, blocks: Sequence[int]) -> np.ndarray[Any, Any]:
        """What blocks hold now: uint8 [len(blocks), bytes_per_block]."""
        slots = np.array([self._slots(block, self.block_size) for block in blocks], dtype=np.int64)
        slots = slots.reshape(len(blocks), self.block_size)
        memories = (self.tokens, self.positions, self.hashes.view(np.int64))
        return np.concatenate([memory[slots] for memory in memories], axis=1).view(np.uint8)

    def save(self, blocks: Sequence[int]) -> BlockCopy:
        return BlockCopy(self.contents(blocks))

    def load(self, blocks: Sequence[int], data: Sequence[Any]) -> None:
        rows = [np.frombuffer(row, np.int64) for row in data]
        if [len(row) for row in rows] != [3 * self.block_size] * len(blocks):
            raise ValueError("the K/V of other blocks")
        for block, row in zip(blocks, rows, strict=True):
            slots = self._slots(block, self.block_size)
            self.tokens[slots], self.positions[slots], hashes = row.reshape(3, -1)
            self.hashes[slots] = hashes.view(np.uint64)

    def execute(self, batch: Batch) -> torch.Tensor:
        for group in batch.copy_groups:
            self.copy_blocks(group)
        if batch.fed_tokens is not None:
            batch.token_ids[:] = batch.fed_tokens.numpy()
        rows = np.arange(batch.num_tokens) if batch.write_rows is None else batch.write_rows
        if self.fail_if is not None and self.fail_if(batch):
            half = len(rows) // 2
            self.tokens[batch.write_slots[:half]] = batch.token_ids[rows[:half]]
            raise RuntimeError("injected fault")
        self.tokens[batch.write_slots] = batch.token_ids[rows]
        self.positions[batch.write_slots] = batch.positions[rows]
        expected = [self._expected(batch, r) for r in range(len(batch.entries))]
        starts = batch.query_starts.tolist()
        own = [e.start + np.arange(e.count) for e in batch.entries]
        hashes = [prefix_hashes(tokens)[at] for tokens, at in zip(expected, own, strict=True)]
        self.hashes[batch.write_slots] = np.concatenate(hashes)[rows]
        for r, tokens in enumerate(expected):
            assert starts[r + 1] - starts[r] == len(own[r])
            self._compare(batch, r, tokens)
        self.batches.append([(e.request.request_id, e.start, e.count) for e in batch.entries])
        self.num_computed += batch.num_tokens
        logits = np.empty((len(batch.logit_rows), VOCAB), dtype=np.float32)
        for i, row in enumerate(batch.logit_rows.tolist()):
            r = int(np.searchsorted(batch.query_starts, row, side="right")) - 1
            length = int(batch.positions[row]) + 1
            context = self._read(batch, r, length)
            logits[i] = next_logits(context)
            if batch.entries[r].request.request_id in self.nan_for:
                logits[i] = np.nan
        return torch.from_numpy(logits)

    def _slots(self, block: int, count: int) -> np.ndarray[Any, Any]:
        return block * self.block_size + np.arange(count)

    def _read(self, batch: Batch, r: int, length: int) -> np.ndarray[Any, Any]:
        table = batch.block_tables[r]
        at = np.arange(length)
        slots = table[at // self.block_size].astype(np.int64) * self.block_size + at % self.block_size
        return self.tokens[slots]

    @staticmethod
    def _expected(batch: Batch, r: int) -> np.ndarray[Any, Any]:
        """The tokens of an entry's context, those that it computes in this step included."""
        entry = batch.entries[r]
        fed = () if batch.fed_tokens is None or r >= batch.num_rows else batch.token_ids[r : r + 1]
        own = entry.request.tokens(0, entry.end - len(fed))
        known = np.concatenate([own, entry.draft, fed]).astype(np.int64)
        return known[: entry.start + entry.count]

    def _compare(self, batch: Batch, r: int, tokens: np.ndarray[Any, Any]) -> None:
        at = np.arange(len(tokens))
        table = batch.block_tables[r]
        slots = table[at // self.block_size].astype(np.int64) * self.block_size + at % self.block_size
        for what, stored, expected in (
            ("slots of other positions", self.positions, at),
            ("another's tokens", self.tokens, tokens),
            ("tokens computed after others", self.hashes, prefix_hashes(tokens)),
        ):
            differ = np.flatnonzero(stored[slots] != expected)
            if len(differ):
                text = f"{batch.entries[r]!r} reads {what} at {differ[:8].tolist()}"
                self.violations.append(text)
                raise AssertionError(text)


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 8,
    budget: int = 64,
    max_model_len: int | None = None,
    model: PagedHashModel | None = None,
    clock: Callable[[], float] = time.monotonic,
    tokenizer: Any = None,
    step_costs: StepCosts | None = None,
    tier: Any = None,
    load_deadline_s: float = 0.2,
    model_fingerprint: str = "",
    image_processor: Any = None,
    **options: Any,
) -> tuple[Engine, PagedHashModel]:
    """An engine over a `PagedHashModel`; options are fields of `EngineConfig`."""
    config = EngineConfig(
        block_size=block_size, num_blocks=num_blocks, max_num_batched_tokens=budget, seed=0, **options
    )
    runner = model or PagedHashModel(num_blocks, block_size)
    engine = engine_on_runner(
        config,
        runner,
        ServedModel(
            tokenizer=tokenizer,
            max_model_len=max_model_len or num_blocks * block_size,
            vocab_size=VOCAB,
            end_token_ids=frozenset({END}),
            name="paged-hash",
            fingerprint=model_fingerprint,
            image_processor=image_processor,
        ),
        step_costs=step_costs,
        tier=tier,
        load_deadline_s=load_deadline_s,
        clock=clock,
    )
    MADE.append(engine)
    return engine, runner


def run_all(engine: Engine, *, check: bool = True, max_steps: int = 10_000) -> dict[str, Any]:
    """Step until nothing is left; outputs by request id."""
    outputs: dict[str, Any] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            break
        result = engine.step()
        if check:
            engine.check()
        outputs.update({output.request_id: output for output in result.finished})
    assert not engine.has_work, "the engine does not come to an end"
    return outputs
