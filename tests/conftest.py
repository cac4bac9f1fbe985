"""Settings for the whole suite."""

from __future__ import annotations

import os

from hypothesis import settings

# Two threads that share two cores with a server under test only wait for each other.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile("default", deadline=None)
settings.register_profile("soak", deadline=None, max_examples=5000)
settings.load_profile("default")
