# SPDX-License-Identifier: Apache-2.0
"""The soak for some seconds: right answers while clients come and go and blocks are evicted; nothing held."""

from __future__ import annotations

import pytest
from soak import CANCELLED, soak


@pytest.mark.nightly
def test_answers_are_right_and_nothing_is_held_while_clients_come_and_go() -> None:
    findings = soak(8.0, readings=4)
    total = findings.endings.total()
    assert total > 20
    assert 0.3 * CANCELLED < findings.endings["left"] / total < 3 * CANCELLED
    assert findings.evicted_blocks > 0, "the pool is full"
    assert findings.held_blocks == 0
    # A leak of a request's objects shows within minutes: `make soak` allows 1 %.
    assert findings.growth < 0.2
