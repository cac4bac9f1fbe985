# SPDX-License-Identifier: Apache-2.0
"""A report as one offline page, with the console's modules and styles and the report's data inside.

The page contains the modules unchanged; an import map names each by its file's name.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from radixkv.cache.reporting.tree_walk import TreeSnapshot
from radixkv.errors import ConfigError
from radixkv_server.activity.node_names import NodeNames
from radixkv_server.apis.cache_api.caller import Onlooker
from radixkv_server.apis.cache_api.tree import TreeJson
from radixkv_server.console.page_files import page_files

_ENTRY = "offline.js"
_STYLES = ("vendor/uPlot.min.css", "style.css", "tree.css")
_IMPORT = re.compile(r'(from |import )"\./([\w.]+)"')
_BANNER = re.compile(r"\A/\*!.*?\*/", re.DOTALL)  # it has an address; the licence is given whole
_SHOWN_NODES = 2000
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)


def tree_json(snapshot: TreeSnapshot, token_bytes: Callable[[int], bytes]) -> dict[str, Any]:
    """Return the heaviest nodes of a cache, with their texts, for the console's tree.

    Args:
        token_bytes: returns the bytes of a token.
    """

    def text_of(token_ids: Sequence[int]) -> str:
        return b"".join(map(token_bytes, token_ids)).decode("utf-8", "replace")

    shown = TreeJson(snapshot, Onlooker(), NodeNames(), text_of)
    return shown.heaviest(_SHOWN_NODES, 10**9)


def page_of(report: Mapping[str, Any], snapshot: Mapping[str, Any]) -> str:
    """Return the whole page, which loads nothing from the network."""
    files = page_files()

    def read(name: str) -> str:
        return files[name].decode()

    modules: dict[str, str] = {}
    todo = [_ENTRY]
    while todo:
        name = todo.pop()
        if name not in modules:
            source = read(name)
            modules[name] = _IMPORT.sub(r'\1"console/\2"', source)
            todo += [found[1] for found in _IMPORT.findall(source)]
    imports = {f"console/{name}": _data_url("text/javascript", text) for name, text in modules.items()}
    data = json.dumps({"report": report, "snapshot": snapshot}).replace("<", "\\u003c")
    styles = "\n".join(map(read, _STYLES))
    licence = read("vendor/uPlot.LICENSE.txt").strip()
    icon = _data_url("image/svg+xml", read("icon.svg"))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Cache audit · radixkv</title>
<link rel="icon" href="{icon}">
<style>
{styles}
</style>
<script type="application/json" id="data">{data}</script>
<script type="importmap">{json.dumps({"imports": imports})}</script>
<script>
/*! {licence}
*/
{_BANNER.sub("", read("vendor/uPlot.iife.min.js"))}
</script>
</head>
<body>
<header>
  <span class="brand"><img src="{icon}" alt="" width="22" height="22">radixkv</span>
</header>
<main id="view" tabindex="-1"></main>
<script type="module">import "console/{_ENTRY}";</script>
</body>
</html>
"""


def write_page(
    path: Path, report: Mapping[str, Any], snapshot: TreeSnapshot, token_bytes: Callable[[int], bytes]
) -> None:
    """Write the page of a report.

    Raises:
        ConfigError: it can't be written.
    """
    try:
        path.write_text(page_of(report, tree_json(snapshot, token_bytes)), "utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: {error.strerror or error}") from error


def _data_url(media_type: str, text: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(text.encode()).decode()}"
