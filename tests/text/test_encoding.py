# SPDX-License-Identifier: Apache-2.0
"""Long texts: the ids that the tokenizer gives, found without stopping the other threads."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import TOKENIZERS
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from radixkv.text.segments import SHORT_TEXT, encode_ids
from radixkv.text.tokenizer import Tokenizer as OurTokenizer

BACKENDS = {kind: make().backend_tokenizer for kind, make in TOKENIZERS.items()}
CHANGES: dict[str, Callable[[Tokenizer], object]] = {
    "nfc": lambda t: setattr(t, "normalizer", normalizers.NFC()),
    "nfkc-lower": lambda t: setattr(
        t, "normalizer", normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "strip": lambda t: setattr(t, "normalizer", normalizers.Strip()),
    "prepend": lambda t: setattr(t, "normalizer", normalizers.Prepend("_")),
    "digits": lambda t: setattr(
        t,
        "pre_tokenizer",
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]),
    ),
    "whitespace": lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.WhitespaceSplit()),
    "punctuation": lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Punctuation("contiguous")),
    "prefix-space": lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(True)),
    "truncating": lambda t: t.enable_truncation(50),
}
for name, change in CHANGES.items():
    BACKENDS[name] = Tokenizer.from_str(BACKENDS["byte-level"].to_str())
    change(BACKENDS[name])

pieces = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.sampled_from(
        ["<|im_start|>", "</s>", "[SEP]", " ", "  \n", "\r\n\t", "\u0301e\u0301", "the quick ", "x" * 300]
    ),
)


@pytest.mark.parametrize("kind", BACKENDS)
@settings(max_examples=25, deadline=None)
@given(parts=st.lists(pieces, min_size=1, max_size=12), special=st.booleans())
def test_a_long_text_has_the_ids_of_the_tokenizer(kind, parts, special):
    backend = BACKENDS[kind]
    once = "".join(parts) or " "
    text = once * (1 + SHORT_TEXT // len(once)) + once
    assert len(text) > SHORT_TEXT
    assert encode_ids(backend, text, add_special_tokens=special) == (
        backend.encode(text, add_special_tokens=special).ids
    )


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("route", ["text", "chat", "plain", "marked"])
def test_other_threads_go_on_meanwhile(route, quick_switches):
    tokenizer = OurTokenizer(TOKENIZERS["byte-level"]())
    words = ["the", "quick", "brown", "fox", "12345", "internationalisation", "wörld"]
    picked = random.Random(0).choices(words, k=60_000)
    text = " ".join(picked) + (" <|im_end|>" if route in ("plain", "marked") else "")
    encode: Callable[[], object] = {
        "text": lambda: tokenizer.encode(text),
        "chat": lambda: tokenizer.apply_chat_template([{"role": "user", "content": text}]),
        "plain": lambda: tokenizer.encode(text, allow_special=False),
        "marked": lambda: tokenizer.apply_chat_template([{"role": "user", "content": text}]),
    }[route]
    tokenizer.encode("<|im_end|>", allow_special=False)  # the copy for marked text is made at first use
    done = threading.Event()

    def work() -> None:
        encode()
        done.set()

    worker = threading.Thread(target=work)
    started = last = time.perf_counter()
    longest = 0.0
    worker.start()
    while not done.is_set():
        time.sleep(0.0005)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    worker.join()
    # Under the lock from beginning to end it is nearly the whole time; a busy machine takes some, too.
    assert longest < 0.6 * (last - started)
