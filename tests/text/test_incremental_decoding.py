# SPDX-License-Identifier: Apache-2.0
"""Streams of text: their pieces concatenate to the whole, whatever a tokenizer's decoder is made of."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tokenizer import _TOKENIZERS as TOKENIZERS
from test_tokenizer import FRAMES, KINDS, kinds, some_examples, texts
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from radixkv.text.tokenizer import Tokenizer

_BYTES, _FUSE = decoders.ByteLevel(), decoders.Fuse()
_SPACES, _FALLBACK = decoders.Replace("▁", " "), decoders.ByteFallback()
#: Decoders over the vocabulary of `with_decoder`.
DECODERS = {
    "none": None,
    "empty": decoders.Sequence([]),
    "byte-level, strip": decoders.Sequence([_BYTES, decoders.Strip(" ", 1, 0)]),
    "byte-level, strip both": decoders.Sequence([_BYTES, _FUSE, decoders.Strip(" ", 2, 2)]),
    "byte-level, strip end": decoders.Sequence([_BYTES, decoders.Strip("a", 0, 3)]),
    "byte-level, replace": decoders.Sequence(
        [_BYTES, decoders.Replace("aab", "ba"), decoders.Strip("b", 0, 1)]
    ),
    "byte-level in the middle": decoders.Sequence([decoders.Replace("a", "b"), _BYTES]),
    "byte-level twice": decoders.Sequence([_BYTES, _BYTES]),
    "nested": decoders.Sequence([decoders.Sequence([_BYTES]), decoders.Strip(" ", 1, 0)]),
    "regex": decoders.Sequence([_FUSE, decoders.Replace(Regex("a+b"), "x")]),
    "fuse, replace": decoders.Sequence([_SPACES, _FUSE, decoders.Replace("a a", "b")]),
    "llama": decoders.Sequence([_SPACES, _FALLBACK, _FUSE, decoders.Strip(" ", 1, 0)]),
    "llama, strip more": decoders.Sequence([_SPACES, _FALLBACK, _FUSE, decoders.Strip(" ", 3, 2)]),
    "strip each": decoders.Sequence([_SPACES, decoders.Strip(" ", 1, 0)]),
    "metaspace": decoders.Metaspace(),
    "bpe": decoders.BPEDecoder(suffix="a"),
    "ctc": decoders.CTC(pad_token="a", word_delimiter_token="b"),
    "wordpiece": decoders.WordPiece(prefix="a"),
}

#: One of each kind; the others are tested by night.
BY_DAY = {"byte-level, replace", "nested", "metaspace"}


def with_decoder(decoder: Any) -> Tokenizer:
    """All byte tokens of both schemes, and what the parts of `DECODERS` act on; one special token."""
    words = ["<s>", "▁", "▁▁", "▁a", "a", "b", "aa", "ab", "ba", " ", "  ", " a", "a ", "<0xF0>", "<0x9F>"]
    words += ["<0x9A>", "<0x80>", "<0x41>", "Ġ", "ĠĠ", *pre_tokenizers.ByteLevel.alphabet()]
    backend = Backend(
        models.WordLevel({word: i for i, word in enumerate(dict.fromkeys(words))}, unk_token="<s>")
    )
    backend.add_special_tokens(["<s>"])
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def streamed(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> str:
    """The concatenation of what a stream emits when `ids` come in pieces of the sizes `cuts`."""
    stream = tokenizer.stream(skip_special_tokens=skip)
    pieces = []
    at = 0
    for size in cuts:
        pieces.append(stream.push(ids[at : at + size]))
        at += size
    pieces.append(stream.push(ids[at:]))
    pieces.append(stream.finish())
    return "".join(pieces)


@some_examples
@given(kinds, st.data(), st.booleans())
def test_random_ids(kind: str, data: st.DataObject, skip: bool) -> None:
    """Random ids are mostly invalid UTF-8, with special and unknown tokens between."""
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 4), max_size=40))
    assert streamed(tokenizer, ids, cuts, skip) == tokenizer.decode(ids, skip)


def test_a_suffix_within_a_token() -> None:
    """It becomes a space once another token follows."""
    tokenizer = with_decoder(DECODERS["bpe"])
    assert streamed(tokenizer, [7, 1], [1], True) == tokenizer.decode([7, 1]) == " b▁"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in DECODERS]
)
@some_examples
@given(data=st.data())
def test_any_decoder(name: str, data: st.DataObject) -> None:
    """Whatever parts a decoder has: those that work on tokens, and those that work on the whole text."""
    tokenizer = with_decoder(DECODERS[name])
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=16))
    cuts = data.draw(st.lists(st.integers(0, 3), max_size=16))
    try:
        whole = tokenizer.decode(ids)
    except BaseException as error:  # the library's Strip fails on texts that are shorter than its cuts
        if type(error).__name__ == "PanicException":
            return
        raise
    assert streamed(tokenizer, ids, cuts, True) == whole


def test_character_after_an_invalid_byte() -> None:
    """The parts after `ByteLevel` see the whole text: a character's bytes may come one by one."""
    tokenizer = with_decoder(DECODERS["byte-level, strip"])
    ids: list[int] = []
    for byte in b"\xff" + "🚀".encode():
        ids += [t for t in range(tokenizer.vocab_size) if tokenizer.token_bytes(t) == bytes([byte])][:1]
    stream = tokenizer.stream()
    assert [stream.push([token]) for token in ids] == ["\ufffd", "", "", "", "🚀"]


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_ids_add_nothing(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    unknown = tokenizer.vocab_size + 50
    ids = [0, unknown, 0, unknown, unknown, 0]
    assert streamed(tokenizer, ids, [1] * 6, False) == tokenizer.decode(ids, False)


@some_examples
@given(st.lists(st.integers(3, 258), max_size=30), st.booleans())
def test_random_byte_tokens(ids: list[int], one_by_one: bool) -> None:
    """Of a byte-fallback tokenizer: the validity of a run of bytes is decided for the whole run."""
    tokenizer = TOKENIZERS["byte-fallback"]
    ids = [*ids, 300, *ids]
    assert streamed(tokenizer, ids, [1] * len(ids) if one_by_one else [], True) == tokenizer.decode(ids)


@some_examples
@given(kinds, texts)
def test_text_one_token_at_a_time(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    pieces = [stream.push([token]) for token in ids]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)
    if "\ufffd" not in text and kind == "byte-level":
        assert not any("\ufffd" in piece for piece in pieces)


@given(texts)
@some_examples
def test_round_trip_of_byte_level(text: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode(text, allow_special=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_character_comes_whole() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = [token for byte in "🚀".encode() for token in byte_ids(tokenizer, byte)]
    stream = tokenizer.stream()
    assert [stream.push([token]) for token in ids] == ["", "", "", "🚀"]
    assert stream.finish() == ""


def byte_ids(tokenizer: Tokenizer, byte: int) -> list[int]:
    return [token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == bytes([byte])][
        :1
    ]


def test_half_a_character_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    stream = tokenizer.stream()
    assert stream.push(byte_ids(tokenizer, 0xF0)) == ""
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_skipped_or_shown(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    _, end = FRAMES[kind]
    ids = [*tokenizer.encode("the", add_special_tokens=False), 2]
    assert end not in streamed(tokenizer, ids, [], True)
    assert end in streamed(tokenizer, ids, [], False)


@pytest.mark.parametrize("kind", KINDS)
def test_cost_per_token_is_constant(kind: str) -> None:
    """The second half of a long stream costs what the first did (a quadratic one would cost 3x)."""
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("The quick brown fox 東 " * 40, add_special_tokens=False)
    ids = (ids * (8_000 // len(ids) + 1))[:8_000]
    ratios = []
    for _ in range(5):
        stream = tokenizer.stream()
        halves = []
        for half in (ids[:4_000], ids[4_000:]):
            started = time.thread_time()
            for token in half:
                stream.push([token])
            halves.append(time.thread_time() - started)
        ratios.append(halves[1] / halves[0])
    assert min(ratios) < 1.7


def test_other_decoders() -> None:
    """No decoder at all: tokens are joined by spaces."""
    backend = Backend(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert (
        streamed(tokenizer, [1, 2, 0, 1], [1, 1, 1, 1], True)
        == tokenizer.decode([1, 2, 0, 1])
        == "a b <unk> a"
    )
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert streamed(tokenizer, [1, 2], [1], True) == tokenizer.decode([1, 2]) == "ab"
