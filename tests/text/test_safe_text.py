# SPDX-License-Identifier: Apache-2.0
"""Lone surrogates leave texts of any length, in time for what else the process does."""

from __future__ import annotations

import random
import time

import pytest

from radixkv.text.safe_text import without_surrogates

CHARS = "\ud800\udbff\udc00\udfff\0a\u00e9\uffff\U0001f600"


@pytest.mark.parametrize("length", [1, 2, 7, 1024, 1025, 3000])
def test_texts_of_any_length_are_repaired_alike(length: int) -> None:
    rng = random.Random(length)
    for _ in range(20):
        text = "".join(rng.choices(CHARS, k=length))
        plain = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        assert without_surrogates({text: [text]}) == {plain: [plain]}


def test_a_long_text_of_surrogates_does_not_hold_the_interpreter() -> None:
    """For as long as it takes, no stream of the same process goes on."""
    text = "\ud800" * 1_400_000
    before = time.thread_time()
    assert without_surrogates(text) == "\ufffd" * len(text)
    assert time.thread_time() - before < 0.3
