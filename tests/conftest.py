"""Settings for the whole suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Two threads that share two cores with a server under test only wait for each other.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile("default", deadline=None)
settings.register_profile("soak", deadline=None, max_examples=5000)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def nothing_was_rebuilt(request: pytest.FixtureRequest) -> Iterator[None]:
    """No engine that a test made may have rebuilt its cache, unless the test injects faults."""
    yield
    support = sys.modules.get("paged_language_model")  # loads torch: only what uses it pays for that
    if support is None:
        return
    made = list(support.MADE)
    support.MADE.clear()
    if request.node.get_closest_marker("injects_faults") is None:
        assert [engine.stats().num_rebuilds for engine in made] == [0] * len(made), "an invariant was broken"
