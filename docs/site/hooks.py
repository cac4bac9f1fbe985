# SPDX-License-Identifier: Apache-2.0
"""Additions of the site to the pages of docs: the pages beside it, and a navigation read from index.md.

The pages are written to be read in the repository, with links to files outside of docs. Those files
(`README.md`, results of benchmarks, ...) join the site, and the links are changed to reach them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
#: Pages beside docs, and their names in the site, where `README.md` would be another index.
PAGES_BESIDE = {"README.md": "start.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
NAMES_BESIDE = {name: page for page, name in PAGES_BESIDE.items()}

LINK = re.compile(r"\[(?P<text>[^\[\]]*)\]\((?P<target>[^)\s#:]+)(?P<anchor>(?:#[^)\s]*)?)\)")
ROW = re.compile(r"^\| \[(.+?)\]\((.+?)\)", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation: a section for each table of index.md."""
    nav: list[Any] = [{"What to read": "index.md"}]
    for part in (DOCS / "index.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        title = part.splitlines()[0]
        nav.append({title: [{name: _in_site(DOCS, target)} for name, target in ROW.findall(part)]})
    nav.append({"The project": ["benchmarks/README.md", "SECURITY.md", PAGES_BESIDE["CHANGELOG.md"]]})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Files outside of docs that pages link to."""
    wanted = set(PAGES_BESIDE)
    unread = [*DOCS.rglob("*.md"), *(ROOT / name for name in PAGES_BESIDE)]
    while unread:
        page = unread.pop()
        for _, target, _ in LINK.findall(page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            if not path.is_file() or DOCS in path.parents:
                continue
            if path.suffix == ".md" and path.relative_to(ROOT).as_posix() not in wanted:
                unread.append(path)
            wanted.add(path.relative_to(ROOT).as_posix())
    for name in sorted(wanted):
        in_site = PAGES_BESIDE.get(name, name)
        files.append(File.generated(config, in_site, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are in the site; the site has no folders, so a link to one becomes plain text."""
    source = DOCS / page.file.src_uri
    folder = ROOT if page.file.src_uri in NAMES_BESIDE else source.parent
    if page.file.src_uri not in NAMES_BESIDE and not source.is_file():
        folder = (ROOT / page.file.src_uri).parent
    here = Path(page.file.src_uri).parent

    def changed(found: re.Match[str]) -> str:
        if (folder / found["target"]).is_dir():
            return found["text"]
        target = _in_site(folder, found["target"])
        to = Path(os.path.relpath(target, here)).as_posix() if target else found["target"]
        return f"[{found['text']}]({to}{found['anchor']})"

    return LINK.sub(changed, markdown)


def _in_site(folder: Path, target: str) -> str:
    """Return the target of a link in `folder`, from the site's root; empty: no file of the project."""
    path = (folder / target).resolve()
    if not path.is_file():
        return ""
    if DOCS in path.parents:
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return PAGES_BESIDE.get(name, name)
