# SPDX-License-Identifier: Apache-2.0
"""Tokenizers built from GGUF files, held to those that transformers builds from them."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
from tiny_models import add_byte_level_tokenizer, byte_level_tokenizer, finish_gguf
from transformers import PreTrainedTokenizerFast

from radixkv.errors import ModelLoadError
from radixkv.model.loading.gguf_file import open_gguf
from radixkv.model.loading.gguf_tokenizer import tokenizer_of

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
PIECES = [
    "Hello", " world", "the", " The", "DON'T", "we'll", "I'M", " 1", "2", "34567", "3.5", "x2", "\n", "\r\n",
    "\n\n", " ", "  ", "   ", "\t", "naïve", "Straße", " É", "東京", "は", "Привет", "👩‍🚀", "e\u0301",
    "a_b", "def f(x):", "!?", "...", "/*", "//\n", "$", "<s>", "<|im_end|>", "<think>", "‽", "\u00a0",
    "HTTPServer",
]  # fmt: skip


def texts(count: int = 400) -> list[str]:
    chance = random.Random(0)
    made = ("".join(chance.choices(PIECES, k=chance.randrange(1, 9))) for _ in range(count))
    return ["", *PIECES, *made]


def file_of(path: Path, architecture: str, tokens: list[tuple[str, float, int]], **values: Any) -> Path:
    """A GGUF file without tensors with a vocabulary of characters."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_tokenizer_model(values.pop("model", "llama"))
    writer.add_token_list([token for token, _, _ in tokens])
    writer.add_token_scores([score for _, score, _ in tokens])
    writer.add_token_types([kind for _, _, kind in tokens])
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)
    finish_gguf(writer)
    return path


def vocabulary(space: str = "\u2581") -> list[tuple[str, float, int]]:
    """Tokens, scores and types of a tiny vocabulary as SentencePiece makes it."""
    words = [
        "hello",
        "Hello",
        "world",
        "the",
        "The",
        "def",
        "1",
        "12",
        "345",
        "東京",
        "Привет",
        "naïve",
        "Server",
    ]
    pieces = {word[:end] for word in words for end in range(1, len(word) + 1)}
    pieces |= {f"\u2581{piece}" for piece in pieces} | {"\u2581", *(char for each in words for char in each)}
    chance = random.Random(1)
    found = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    found += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    found += [("<think>", 0.0, USER_DEFINED), (space * 2, 0.0, NORMAL), (space * 4, 0.0, NORMAL)]
    return found + [(piece, -chance.randrange(100) / 10, NORMAL) for piece in sorted(pieces)]


def check(path: Path) -> None:
    """Hold ids of texts, and texts of ids, to transformers'."""
    expected = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
    found = tokenizer_of(open_gguf(path))
    for text in texts():
        ids = expected(text).input_ids
        assert found(text).input_ids == ids, text
        assert found.decode(ids) == expected.decode(ids)
        for first, last in itertools.pairwise(range(0, len(ids), 3)):
            assert found.decode(ids[first:last]) == expected.decode(ids[first:last])
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "chat_template"):
        assert getattr(found, name) == getattr(expected, name)


@pytest.mark.parametrize(
    "split", ["default", "gpt-2", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "falcon3"]
)
def test_merges_of_bytes(split: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_pre(split)
    add_byte_level_tokenizer(writer)
    finish_gguf(writer)
    check(path)


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_merges_of_characters_by_their_scores(architecture: str, tmp_path: Path) -> None:
    check(file_of(tmp_path / "model.gguf", architecture, vocabulary(), bos_token_id=1, eos_token_id=2))


def test_no_begin_token_where_the_file_says_so(tmp_path: Path) -> None:
    path = file_of(
        tmp_path / "model.gguf", "llama", vocabulary(), bos_token_id=1, eos_token_id=2, add_bos_token=False
    )
    check(path)
    assert 1 not in tokenizer_of(open_gguf(path))("hello").input_ids


def test_no_space_before_a_text_where_the_file_says_so(tmp_path: Path) -> None:
    path = file_of(
        tmp_path / "model.gguf", "llama", vocabulary(), add_space_prefix=False, add_bos_token=False
    )
    tokenizer = tokenizer_of(open_gguf(path))
    for text in texts():
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.tokenize("hello world") == ["hello", "\u2581world"]


def gemma_vocabulary(space: str = "\u2581") -> list[tuple[str, float, int]]:
    """`vocabulary` with the names of Gemma's control tokens."""
    names = {"<s>": "<bos>", "</s>": "<eos>"}
    own = [(names.get(token, token), score, kind) for token, score, kind in vocabulary(space)]
    return [*own, ("<pad>", 0.0, CONTROL), ("<mask>", 0.0, CONTROL)]


@pytest.mark.parametrize("architecture", ["gemma", "gemma2", "gemma3"])
def test_gemma_s_merges_in_the_order_of_its_tokens(architecture: str, tmp_path: Path) -> None:
    tokens = gemma_vocabulary(" ")
    check(file_of(tmp_path / "model.gguf", architecture, tokens, bos_token_id=1, eos_token_id=2))


def test_listed_merges_of_characters(tmp_path: Path) -> None:
    merges = ["h e", "he l", "hel l", "hell o", "\u2581 hello", "w o", "wo r"]
    path = tmp_path / "model.gguf"
    file_of(path, "gemma4", gemma_vocabulary(), model="gemma4", token_merges=merges, eos_token_id=2)
    check(path)


def test_tokens_of_users_keep_their_spaces(tmp_path: Path) -> None:
    """llama.cpp matches them whole; transformers loses those that the alphabet of bytes does not spell."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    plain = byte_level_tokenizer()
    vocab = sorted(plain.get_vocab(), key=plain.get_vocab().__getitem__)
    merges = json.loads(plain.backend_tokenizer.to_str())["model"]["merges"]
    own = ["    ", "<｜begin▁of▁text｜>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*vocab, *own])
    writer.add_token_types([*([NORMAL] * len(vocab)), USER_DEFINED, CONTROL])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(len(vocab) + 1)
    finish_gguf(writer)
    tokenizer = tokenizer_of(open_gguf(path))
    assert len(tokenizer) == len(vocab) + 2
    assert tokenizer("a    <｜begin▁of▁text｜>").input_ids[1:] == [len(vocab), len(vocab) + 1]
    assert tokenizer.bos_token == "<｜begin▁of▁text｜>"


def test_special_tokens_beyond_the_vocabulary_are_none(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    file_of(path, "llama", vocabulary(), bos_token_id=1, eos_token_id=2**31, pad_token_id=2**32 - 1)
    tokenizer = tokenizer_of(open_gguf(path))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", None, None)


@pytest.mark.parametrize("kind", ["t5", "plamo2", "bert"])
def test_a_kind_that_can_t_be_built_is_named(kind: str, tmp_path: Path) -> None:
    path = file_of(tmp_path / "model.gguf", "llama", vocabulary(), model=kind)
    with pytest.raises(
        ModelLoadError, match=rf"tokenizer of the kind '{kind}', .* These can: gemma4, gpt2, ll"
    ):
        tokenizer_of(open_gguf(path))


def test_a_split_that_is_unknown_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_pre("of-tomorrow")
    add_byte_level_tokenizer(writer)
    finish_gguf(writer)
    tokenizer_of(open_gguf(path))
    assert "splits text in a way unknown here (of-tomorrow)" in caplog.text
