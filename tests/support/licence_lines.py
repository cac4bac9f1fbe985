# SPDX-License-Identifier: Apache-2.0
"""Put the licence's line on top of each Python file that lacks it:  python tests/support/licence_lines.py"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("radixkv", "kernels", "server", "benchmarks", "tests", "docs")
LINE = "# SPDX-License-Identifier: Apache-2.0\n"


def sources() -> Iterator[Path]:
    """The project's Python files."""
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def has_line(text: str) -> bool:
    """Return whether a source text begins with the line, after a line that names its interpreter."""
    lines = text.splitlines(keepends=True)
    return LINE in lines[: 2 if text.startswith("#!") else 1] or not text


def main() -> None:
    for path in sources():
        text = path.read_text(encoding="utf-8")
        if has_line(text):
            continue
        first, rest = text.split("\n", 1) if text.startswith("#!") else ("", text)
        path.write_text((first + "\n" if first else "") + LINE + rest, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
