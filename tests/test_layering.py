"""Data flows server -> radixkv -> kernels, never back: this test reads the imports of every file."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Layer -> (folder, what it may import of our own packages). Longer prefixes come first.
LAYERS: dict[str, tuple[str, ...]] = {
    "radixkv.errors": (),
    "radixkv.config": ("radixkv.errors",),
    "radixkv.cache": ("radixkv.errors", "radixkv.cache"),
    "radixkv.request": ("radixkv.errors", "radixkv.cache"),
    "radixkv.text": ("radixkv.errors", "radixkv.text"),
    "radixkv.scheduling": ("radixkv.errors", "radixkv.request", "radixkv.cache", "radixkv.scheduling"),
    "radixkv.sampling": ("radixkv.errors", "radixkv.request", "radixkv.sampling"),
    "radixkv.model": (
        "radixkv.errors",
        "radixkv.config",
        "radixkv.model",
        "radixkv.text",
        "radixkv.scheduling.batch",
        "radixkv_kernels",
    ),
    "radixkv.engine": (
        "radixkv.errors",
        "radixkv.config",
        "radixkv.request",
        "radixkv.text",
        "radixkv.cache",
        "radixkv.scheduling",
        "radixkv.sampling",
        "radixkv.model",
        "radixkv.engine",
        "radixkv_kernels",
    ),
    "radixkv.tools.replay": ("radixkv.errors", "radixkv.cache", "radixkv.tools.replay", "radixkv.text"),
    "radixkv": ("radixkv", "radixkv_kernels"),
    "radixkv_kernels": ("radixkv_kernels",),
    "radixkv_server": ("radixkv_server", "radixkv"),
}
# The command line starts the server: the one place where radixkv names radixkv_server.
EXCEPTIONS = {("radixkv.tools.cli", "radixkv_server")}
OURS = ("radixkv", "radixkv_kernels", "radixkv_server")
TORCH_FREE = (
    "radixkv.cache",
    "radixkv.scheduling",
    "radixkv.tools.replay",
    "radixkv.request",
    "radixkv.config",
)


def modules() -> dict[str, Path]:
    found = {}
    for folder in (ROOT, ROOT / "kernels", ROOT / "server"):
        for package in OURS:
            for path in (folder / package).rglob("*.py"):
                parts = list(path.relative_to(folder).with_suffix("").parts)
                if parts[-1] == "__init__":
                    parts.pop()
                found[".".join(parts)] = path
    return found


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            names.add(node.module or "")
    return names


def starts(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_go_one_way(module):
    layer = max((name for name in LAYERS if starts(module, name)), key=len)
    for name in imports_of(modules()[module]):
        if name.split(".")[0] not in OURS or name == "radixkv":
            continue
        if any(starts(module, a) and starts(name, b) for a, b in EXCEPTIONS):
            continue
        assert any(starts(name, allowed) for allowed in LAYERS[layer]), f"{module} must not import {name}"
    if any(starts(module, part) for part in TORCH_FREE):
        assert not {name.split(".")[0] for name in imports_of(modules()[module])} & {"torch", "triton"}


def test_the_cache_works_without_torch():
    code = (
        "import sys; from radixkv import PrefixCache; cache = PrefixCache(num_blocks=4, block_size=4);"
        "lease = cache.acquire([1, 2, 3, 4, 5]); lease.commit(5); lease.release();"
        "assert cache.match([1, 2, 3, 4, 5]).num_tokens == 5;"
        "assert not {'torch', 'transformers', 'triton'} & set(sys.modules), 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
