# SPDX-License-Identifier: Apache-2.0
"""Check before a release that all files name the version of its tag, and write the release's notes.

python .github/check_release.py v0.2.0 --notes notes.md
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Exit with 1 and a line for each file that disagrees with the tag."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tag", help="vX.Y.Z")
    parser.add_argument("--notes", type=Path, help="write the changelog's section of this version there")
    options = parser.parse_args()
    version = options.tag.removeprefix("v")
    notes = changelog_section(version)
    faults = [
        f"{place} says {said or 'nothing'}" for place, said in stated_versions().items() if said != version
    ]
    if not notes:
        faults.append(f"CHANGELOG.md has no section `## [{version}] - YYYY-MM-DD`")
    if faults:
        sys.exit(f"the tag {options.tag} can't be released:\n" + "\n".join(faults))
    if options.notes:
        options.notes.write_text(notes, encoding="utf-8")
    print(f"every file says {version}")


def stated_versions() -> dict[str, str]:
    """Return the version that each file states, by the file's name; empty where it states none."""
    chart = read("docs/deploy/helm/radixkv/Chart.yaml")
    return {
        "pyproject.toml": tomllib.loads(read("pyproject.toml"))["project"]["version"],
        "radixkv/__init__.py": found(r'^__version__ = "(.+)"', read("radixkv/__init__.py")),
        "the chart's version": found(r'^version: "?([^"\s]+)', chart),
        "the chart's appVersion": found(r'^appVersion: "?([^"\s]+)', chart),
        "README.md's wheel": found(r"radixkv-(\d[\w.]*)-py3", read("README.md")),
    }


def changelog_section(version: str) -> str:
    """Return the text of the version's section of CHANGELOG.md; empty: there is none."""
    parts = re.split(r"^## ", read("CHANGELOG.md"), flags=re.MULTILINE)
    dated = re.compile(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n")
    return next((dated.sub("", part, count=1).strip() + "\n" for part in parts if dated.match(part)), "")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1] if match else ""


if __name__ == "__main__":
    main()
