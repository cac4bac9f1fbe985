# SPDX-License-Identifier: Apache-2.0
"""The README's example of the cache alone prints what its comments say."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_example_of_the_cache_alone() -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    (source,) = [block for block in blocks if "PrefixCache(" in block]
    (stated,) = re.findall(r"^print\(cache\.match.*# (\d+)$", source, re.MULTILINE)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, str(README), "exec", dont_inherit=True), {})
    tokens, detail = printed.getvalue().splitlines()
    assert tokens == stated
    assert detail.startswith("60 of 63 tokens were cached; at token 60 ")
