# SPDX-License-Identifier: Apache-2.0
"""How the packages may depend on each other, read from the imports of every file.

radixkv_kernels <- radixkv <- radixkv_server, and the floors within radixkv; no circles, not for type checking
either; no file reaches a private attribute of another file's objects.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from blocked_imports import without_extras
from source_graph import (
    PACKAGES,
    cycles,
    facts,
    foreign_private_attributes,
    imports_of,
    modules,
    private_attributes_in_tests,
)

#: What each package may import of ours.
PACKAGE_IMPORTS = {
    "radixkv_kernels": {"radixkv_kernels"},
    "radixkv": {"radixkv_kernels", "radixkv"},
    "radixkv_server": {"radixkv", "radixkv_server"},
}
#: The command line sits on top of everything, the server included.
COMMAND_LINE = "radixkv.cli"

#: Rooms of radixkv, from the ground up: a room imports from lower floors and from itself, not from its
#: neighbours. A part of a room that stands on another floor than the rest is named apart.
FLOORS = (
    ("errors", "helper_process", "regular_file"),
    ("channel", "option_names"),
    ("engine.config", "entrypoints.extras"),
    ("cache", "images", "text", "cluster.loop_thread"),
    ("text.chat_formats", "sampling.structured"),
    ("sampling",),
    ("scheduling",),
    ("model",),
    ("engine",),
    ("grammar", "speculation", "tiers", "observe", "cluster.events"),
    ("observe.audit", "cluster.routing"),
    ("entrypoints",),
    ("cluster",),
    ("",),
    ("cli",),
    ("__main__",),
)
HEIGHT = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}

#: Rooms that `pip install radixkv` without extras can use: they do without torch, tokenizers, numpy and the
#: rest of `radixkv.entrypoints.extras.SERVING`, except inside functions that nobody needs there.
BASE = (
    "radixkv.cache",
    "radixkv.images",
    "radixkv.observe",
    "radixkv.observe.audit",
    "radixkv.cli.audit_command",
    "radixkv.cli.proxy_command",
    "radixkv_server.console",
    "radixkv_server.proxy",
)
NOT_IN_BASE = (
    "radixkv.cache.eviction.adaptive",  # the one policy that computes with numpy
    "radixkv.cache.eviction.reuse_statistics",
)
TORCH_FREE = (
    "radixkv.cache",
    "radixkv.images",
    "radixkv.tiers",
    "radixkv.cluster.events",
    "radixkv.cluster.routing",
    "radixkv.scheduling",
    "radixkv.speculation",
    "radixkv.cli.replay",
    "radixkv.observe.audit",
    "radixkv.sampling.sampling_params",
    "radixkv.engine.config",
)


def package_of(module: str) -> str:
    return module.split(".")[0]


def room_of(module: str) -> str:
    """The room of a module of radixkv: the longest name in FLOORS that it begins with."""
    parts = module.split(".")[1:]
    found = [".".join(parts[:n]) for n in range(len(parts), -1, -1)]
    return next(name for name in found if name in HEIGHT)


def starts(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def wrong_imports(module: str) -> Iterator[str]:
    """What a file must not import, and why."""
    package, room = package_of(module), room_of(module)
    for name in imports_of(module):
        if package_of(name) not in PACKAGES:
            continue
        if not starts(module, COMMAND_LINE) and package_of(name) not in PACKAGE_IMPORTS[package]:
            yield f"{module} must not import {name}"
        if package == package_of(name) == "radixkv":
            target = room_of(name)
            if target != room and HEIGHT[target] >= HEIGHT[room]:
                yield f"{module} must not import {name}: {target} is not below {room}"
    if any(starts(module, part) for part in TORCH_FREE):
        for name in {package_of(name) for name in imports_of(module)} & {"torch", "triton"}:
            yield f"{module} must do without {name}"


def test_imports_go_one_way() -> None:
    assert not [fault for module in modules() for fault in wrong_imports(module)]


def test_no_import_cycles() -> None:
    assert not cycles(), "files that import each other in a circle"


def test_no_private_attributes_of_other_files() -> None:
    found = [f"{module}:{line} {text}" for module, line, text in foreign_private_attributes()]
    assert not found, "private attributes of other files"


def test_tests_use_public_attributes() -> None:
    # `_request_id` is what Anthropic's SDK documents.
    found = [where for where in private_attributes_in_tests() if not where.endswith("._request_id")]
    assert not found, "private attributes in tests"


def test_the_base_imports_nothing_of_the_extras() -> None:
    base = [
        name for name in modules() if any(starts(name, room) for room in BASE) and name not in NOT_IN_BASE
    ]
    code = without_extras(f"import importlib\nfor name in {base}: importlib.import_module(name)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"see BASE:\n{done.stderr}"


def test_an_engine_without_a_model_loads_no_compiler() -> None:
    # torch's takes longer to import than the rest, once for each process of an engine.
    code = "import sys, radixkv.entrypoints.builder; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_no_two_classes_share_a_name() -> None:
    owners: dict[str, list[str]] = {}
    for module, found in facts().items():
        for name in found.classes:
            owners.setdefault(name, []).append(module)
    assert not {name: found for name, found in owners.items() if len(found) > 1}


def test_no_two_test_files_share_a_name() -> None:
    # pytest imports them by their names alone: of two, one would not be collected.
    names = Counter(path.stem for path in Path(__file__).parent.rglob("test_*.py"))
    assert not [name for name, files in names.items() if files > 1]
