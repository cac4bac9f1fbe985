# SPDX-License-Identifier: Apache-2.0
"""One table has words for every cause of a miss, and names of breakers in APIs stay as they are."""

from __future__ import annotations

from radixkv.cache.reporting.reasons import Reason
from radixkv.observe.causes import CAUSES, make_breaker

KINDS = """
client_metadata model tools_reordered tools_changed schema_keys_reordered tool_warning working_directory
timestamp id user_name examples thinking_stripped arguments_reserialised attachment_moved compaction
tools_by_mode compaction_request
whitespace another_image image_resized image_replaced evicted evicted_by_others pool_too_small ttl_passed
reset concurrent unknown
""".split()  # noqa: SIM905


def test_every_reason_has_a_label_and_every_cause_words() -> None:
    reasons = [cause for cause in CAUSES.values() if cause.below is None]
    assert [cause.code for cause in reasons] == list(Reason)
    assert all(cause.label and cause.sentence.endswith(".") for cause in reasons)
    assert len({cause.meaning for cause in CAUSES.values()}) == len(CAUSES)
    assert all(cause.advice for cause in CAUSES.values() if cause.below is not None)


def test_names_of_breakers_stay() -> None:
    kinds = {make_breaker(code).kind for code in CAUSES}
    assert kinds >= set(KINDS)
    assert make_breaker("expired").kind == "ttl_passed"


def test_a_reason_and_its_breaker_say_the_same() -> None:
    for reason in (Reason.EVICTED, Reason.EXPIRED, Reason.RESET, Reason.CONCURRENT):
        assert make_breaker(reason).detail == CAUSES[reason].advice_sentence
