# SPDX-License-Identifier: Apache-2.0
"""Marks of torch's compiler that are put off to the first call."""

from __future__ import annotations

import pytest
import torch

from radixkv.model.loading.lean_imports import without_compiler


def test_a_mark_is_put_off_to_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[object] = []

    def disable(function: object, **options: object) -> object:
        marked.append((function, options))
        return function

    monkeypatch.setattr(torch.compiler, "disable", disable)

    def double(x: int) -> int:
        """Documented."""
        return 2 * x

    with without_compiler():
        plain = torch.compiler.disable(double)
        with_options = torch.compiler.disable(recursive=False)(double)
    assert torch.compiler.disable is disable
    assert not marked
    assert plain.__doc__ == "Documented."
    assert [plain(2), plain(3), with_options(4)] == [4, 6, 8]
    assert marked == [(double, {}), (double, {"recursive": False})]
