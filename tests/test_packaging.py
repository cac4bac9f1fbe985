"""What the wheel holds: the three packages, typed, and nothing importable by a generic name."""

from __future__ import annotations

import tomllib

from source_graph import PACKAGES, ROOT


def test_the_wheel_holds_the_three_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {ROOT / path for path in listed} == set(PACKAGES.values())
    for folder in PACKAGES.values():
        assert (folder / "py.typed").exists(), f"{folder.name} says nothing about its types"
    for source_root in ("kernels", "server"):
        assert not (ROOT / source_root / "__init__.py").exists(), f"`import {source_root}` would find ours"
