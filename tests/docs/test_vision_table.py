# SPDX-License-Identifier: Apache-2.0
"""Every architecture of transformers that reads images is served with sight, or refused by name."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from tiny_vision_models import TINY_VISION_MODELS
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from radixkv.model.vision.families import NOT_SERVED, VISION_FAMILIES

DOCS = Path(__file__).parents[2] / "docs"
REFUSED = [kind for kinds in NOT_SERVED.values() for kind in kinds]


def test_every_architecture_is_served_or_refused() -> None:
    pins = (DOCS.parent / "constraints.txt").read_text(encoding="utf-8")
    if f"transformers=={metadata.version('transformers')}" not in pins.splitlines():
        pytest.skip("the table is that of the pinned transformers")
    known = {kind.split()[0] for kind in VISION_FAMILIES} | set(REFUSED)
    assert set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) == known


def test_nothing_is_in_the_tables_twice() -> None:
    assert len(REFUSED) == len(set(REFUSED))
    assert not set(REFUSED) & {kind.split()[0] for kind in VISION_FAMILIES}


def test_every_served_family_is_tested() -> None:
    tested = set(TINY_VISION_MODELS) | {kind.split()[0] for kind in TINY_VISION_MODELS}
    assert set(VISION_FAMILIES) <= tested


def test_the_page_names_them_all() -> None:
    page = (DOCS / "images.md").read_text(encoding="utf-8")
    for kind in [*REFUSED, *(kind.split()[0] for kind in VISION_FAMILIES)]:
        assert f"`{kind}`" in page
