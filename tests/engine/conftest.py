"""Settings of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator

import paged_language_model
import pytest


@pytest.fixture(autouse=True)
def nothing_was_rebuilt(request: pytest.FixtureRequest) -> Iterator[None]:
    """No engine of a test may have rebuilt its cache, unless the test injects faults."""
    paged_language_model.MADE.clear()
    yield
    made = list(paged_language_model.MADE)
    paged_language_model.MADE.clear()
    if request.node.get_closest_marker("injects_faults") is None:
        assert [engine.stats().num_rebuilds for engine in made] == [0] * len(made), "an invariant was broken"
