# SPDX-License-Identifier: Apache-2.0
"""Masks of grammars, token by token: what may follow, forks, tokens that are taken back, special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from grammar_trials import (
    END,
    allowed,
    start,
)
from scripted_engine import ByteTokenizer
from tiny_models import byte_fallback_tokenizer, byte_level_tokenizer

from radixkv.errors import InvalidRequestError
from radixkv.grammar.compiler import GrammarCompiler
from radixkv.grammar.masks import GrammarMask
from radixkv.grammar.vocabulary import Vocabulary
from radixkv.grammar.work import Effort, WorkAccount
from radixkv.sampling.structured import StructuredOutputs
from radixkv.text.tokenizer import Tokenizer


def test_roll_back_restores_the_masks(compiler: GrammarCompiler) -> None:
    """Also over the end token, which no matcher may get."""
    mask = start(compiler, regex="(ab)*c?")
    seen = [allowed(mask)]
    tokens = [*b"ababc", END]
    for token in tokens:
        mask.accept(token)
        seen.append(allowed(mask))
    for count in (1, 2, 3):
        mask.roll_back(count)
        assert allowed(mask) == seen[len(tokens) - count]
        assert mask.is_complete == (count == 1)  # nothing can follow the c
        for token in tokens[-count:]:
            mask.accept(token)
        assert mask.is_complete


def test_a_grammar_that_has_become_too_complex_stays_so_when_tokens_are_taken_back(
    compiler: GrammarCompiler,
) -> None:
    mask = start(compiler, regex="x{60}" + "(a?){1000}" * 99 + "a")
    for _ in range(60):
        mask.accept(ord("x"))
    num_taken = 0
    while allowed(mask):
        mask.accept(ord("a"))
        num_taken += 1
    assert num_taken > 0
    mask.roll_back(1)
    assert "too many" in str(mask.failure)
    assert allowed(mask) == set()


def test_an_answer_that_an_empty_account_ended_says_so_when_the_account_has_filled_again() -> None:
    """Between the mask and the question why it allows nothing, time passes."""
    now = 0.0
    account = WorkAccount(0.0, 1.0, clock=lambda: now)
    vocabulary = Vocabulary(ByteTokenizer(), {END})
    matcher = vocabulary.matcher(StructuredOutputs(regex="a+"))
    effort = Effort(account)
    effort.add(0.05)  # more than an empty account allows, less than an answer may take in all
    mask = GrammarMask(matcher, vocabulary, None, effort)
    assert account.is_empty
    assert allowed(mask) == set()
    now = 60.0
    assert not account.is_empty
    assert "CPU time" in str(mask.failure)
    assert "CPU time" in str(mask.fork().failure)


def test_a_fork_has_a_future_of_its_own(compiler: GrammarCompiler) -> None:
    mask = start(compiler, choice=["ax", "by"])
    other = mask.fork()
    mask.accept(ord("a"))
    other.accept(ord("b"))
    assert (allowed(mask), allowed(other)) == ({ord("x")}, {ord("y")})


def test_forced_and_allowed_tokens(compiler: GrammarCompiler) -> None:
    mask = start(compiler, json={"const": {"name": 1}})
    forced = mask.forced_tokens()
    assert bytes(forced).startswith(b'{"na')
    assert mask.num_allowed(forced) == len(forced)
    assert mask.num_allowed(list(b'{"nobody')) == 3
    assert mask.num_allowed([*b'{"name":1}', END, END]) == 10
    assert allowed(mask) == {ord("{")}


def test_a_guess_beyond_the_vocabulary_ends_there_and_harms_nothing(compiler: GrammarCompiler) -> None:
    """The logits of a padded model are wider than its tokenizer."""
    for beyond in (ByteTokenizer.vocab_size, 2**31 - 1):
        mask = start(compiler, regex="ab+")
        assert mask.num_allowed([ord("a"), beyond, ord("b")]) == 1
        assert mask.num_allowed([beyond]) == 0
        assert mask.failure is None
        assert allowed(mask) == {ord("a")}


SPELLED = "<|im_start|>"


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_the_spelling_of_a_special_token_is_a_text_like_any_other(make: Callable[[], Any]) -> None:
    """Where nothing else can follow, too: no special token stands for it, and the answer is complete."""
    tokenizer = Tokenizer(make())
    special = {token for token in range(tokenizer.vocab_size) if tokenizer.is_added_token(token)}
    ends = tokenizer.encode("</s>", add_special_tokens=False)[:1] if make is not byte_level_tokenizer else [2]
    compiler = GrammarCompiler(lambda: Vocabulary(tokenizer, set(ends)))
    for spelled in [tokenizer.token_bytes(token).decode() for token in sorted(special)]:
        for spec in (
            {"json": {"const": spelled}},
            {"json": {"const": f"a{spelled}b"}},
            {"regex": re.escape(spelled)},
            {"choice": (spelled,)},
            {"grammar": f"start: {json.dumps(spelled)}"},
        ):
            mask, said = compiler.compile(StructuredOutputs(**spec)).start(), []
            while not mask.is_complete and len(said) < 60:
                forced = mask.forced_tokens()
                assert mask.num_allowed(forced) == len(forced)
                logits = torch.zeros(1, tokenizer.vocab_size)
                type(mask).apply(logits, [0], [mask])
                said.append(int(logits[0].argmax()) if not forced else forced[0])
                mask.accept(said[-1])
            assert mask.is_complete
            assert not special & set(said) - set(ends)
            assert spelled in tokenizer.decode(said)


def test_tokens_by_name_are_still_known() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer())
    compiler = GrammarCompiler(lambda: Vocabulary(tokenizer, {2}))
    mask = compiler.compile(StructuredOutputs(grammar='start: "<|im_start|>" <|im_start|> "b"')).start()
    [special] = tokenizer.encode(SPELLED, add_special_tokens=False)
    tokens = [*tokenizer.encode(SPELLED, add_special_tokens=False, allow_special=False), special]
    assert mask.num_allowed(tokens) == len(tokens)
    with pytest.raises(InvalidRequestError, match=r'unknown special token: "<nope>".*<\|endoftext\|>'):
        compiler.compile(StructuredOutputs(grammar="start: <nope>"))


def test_bits_are_what_is_masked(compiler: GrammarCompiler) -> None:
    """For models whose logits are fewer than the ids of the vocabulary, as many, or more."""
    processor, size = start(compiler, regex="[a-f0-9]*"), ByteTokenizer.vocab_size
    for width in (40, 100, size - 1, size, size + 1, size + 70):
        logits = torch.zeros(1, width)
        GrammarMask.apply(logits, [0], [processor])
        bits = np.unpackbits(processor.bits(width).view(np.uint8), bitorder="little")
        assert len(bits) == -(-width // 32) * 32
        assert bits[:width].tolist() == (logits[0] == 0).int().tolist()
        assert not bits[width:].any()
