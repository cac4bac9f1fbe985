# SPDX-License-Identifier: Apache-2.0
"""Texts encoded by their segments: equal ids for every kind of tokenizer, a budget, owners apart."""

from __future__ import annotations

import json
import os
import random
import threading
import time

import numpy as np
import pytest
from tiny_models import byte_level_tokenizer
from tokenizer_kinds import PIECES, tokenizer_kinds

from radixkv.text.cutters import find_cutters
from radixkv.text.segments import KnownSegments, SegmentEncoder, text_owner
from radixkv.text.tokenizer import Tokenizer

KINDS = tokenizer_kinds()
SECONDS = float(os.environ.get("RADIXKV_FUZZ_SECONDS", 3))
MARKS = "<|im_start|>", "<|im_end|>"


def test_there_are_thirty_kinds_and_most_have_cutters():
    assert len(KINDS) >= 30
    assert sum(bool(find_cutters(kind).ids) for kind in KINDS.values()) >= 25


def test_ids_equal_those_of_the_whole_text():
    rng = random.Random(int(os.environ.get("RADIXKV_FUZZ_SEED", 1)))
    kinds = []
    for name, backend in KINDS.items():
        spellings = [token["content"] for token in json.loads(backend.to_str())["added_tokens"]][:40]
        encoders = [SegmentEncoder(backend, KnownSegments(size)) for size in (1 << 20, 3000)]
        kinds.append((name, backend, spellings, encoders, [""]))
    end, count = time.monotonic() + SECONDS, 0
    while time.monotonic() < end or not count:
        for name, backend, spellings, encoders, known in kinds:
            if len(known) < 200 or rng.random() < 0.3:
                known.append("".join(rng.choices(PIECES, k=rng.randrange(12))))
            parts = [
                rng.choice(known) + (rng.choice(spellings) if rng.random() < 0.8 else "")
                for _ in range(rng.randrange(1, 7))
            ]
            text = "".join(parts)
            expected = backend.encode(text, add_special_tokens=False).ids
            for encoder in encoders:
                assert encoder.begin(text)[1]().tolist() == expected, (name, text)
            count += 1


def encoder_of(max_bytes: int = 1 << 20) -> tuple[SegmentEncoder, KnownSegments]:
    store = KnownSegments(max_bytes)
    return SegmentEncoder(KINDS["byte_level"], store), store


def chat_text(*texts: str) -> str:
    return "".join(f"{MARKS[0]}{text}{MARKS[1]}\n" for text in texts)


def test_a_longer_conversation_is_new_in_its_last_message_only():
    encoder, store = encoder_of()
    messages = [f"message {i} " * 50 for i in range(20)]
    num_unknown, encode = encoder.begin(chat_text(*messages[:19]))
    assert num_unknown > 19 * 400
    encode()
    num_unknown, encode = encoder.begin(chat_text(*messages))
    assert num_unknown == len(messages[19])
    assert encode().dtype == np.int32
    assert encoder.begin(chat_text(*messages))[0] == 0
    store.check()


def test_owners_find_their_own_segments_only_and_the_one_with_most_gives_way():
    encoder, store = encoder_of(20_000)
    text = chat_text("the same text for both " * 10)
    tenant_a, tenant_b = ("a", ""), ("b", "")

    def begin(owner, text):
        token = text_owner.set(owner)
        try:
            return encoder.begin(text)
        finally:
            text_owner.reset(token)

    begin(tenant_a, text)[1]()
    assert begin(tenant_b, text)[0] > 200
    assert begin(("a", "salt"), text)[0] > 200
    assert begin(tenant_a, text)[0] == 0
    for i in range(100):  # far more than the budget
        begin(tenant_b, chat_text(f"message {i} " * 30))[1]()
        store.check()
    assert begin(tenant_a, text)[0] == 0, "b's own segments give way"


def test_many_threads_share_a_store():
    encoder, store = encoder_of(30_000)
    texts = [chat_text(*(f"message {i} of {j} " * 20 for i in range(j % 7 + 1))) for j in range(40)]
    expected = [KINDS["byte_level"].encode(text, add_special_tokens=False).ids for text in texts]
    failures: list[object] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            i = rng.randrange(len(texts))
            if encoder.begin(texts[i])[1]().tolist() != expected[i]:
                failures.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    store.check()


@pytest.mark.parametrize("said", ["plain", "it spells <|im_end|> and <|im_start|>system", "ends with <|im_"])
def test_a_conversation_that_spells_control_tokens_is_kept_as_others_are(said):
    hf_tokenizer = byte_level_tokenizer()
    hf_tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    fresh, kept = Tokenizer(hf_tokenizer), Tokenizer(hf_tokenizer)
    messages = [{"role": "user", "content": f"{said} {i} {said}"} for i in range(6)]
    for end in range(1, 7):
        ids = kept.apply_chat_template(messages[:end])
        assert ids == Tokenizer(hf_tokenizer).apply_chat_template(messages[:end])
    assert kept.prepare_chat(messages)[0] == 0
    assert fresh.prepare_chat(messages)[0] > 0
    first, last = (fresh.encode(mark, add_special_tokens=False)[0] for mark in MARKS)
    assert (ids.count(first), ids.count(last)) == (6, 6)
