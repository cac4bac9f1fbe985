# SPDX-License-Identifier: Apache-2.0
"""The directions in which the server's files depend on the engine and on each other, read from imports."""

from __future__ import annotations

from source_graph import imports_of, modules

SERVER = "radixkv_server"
FILES = sorted(name for name in modules() if name.startswith(SERVER + "."))

#: The machinery behind an `EngineClient`. The server serves any engine that speaks the client's protocol.
MACHINERY = (
    "radixkv.cache.prefix_cache",
    "radixkv.engine.engine",
    "radixkv.model.runner",
    "radixkv.sampling.sampler",
    "radixkv.scheduling.scheduler",
    "radixkv_kernels",
)


def starts(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def test_the_engine_is_an_engine_client() -> None:
    reached = {module: [name for name in imports_of(module) if starts(name, MACHINERY)] for module in FILES}
    assert not {module: names for module, names in reached.items() if names}


def test_http_knows_no_api() -> None:
    """Its names and shapes come by way of the dialect of the path."""
    for module in FILES:
        if module.startswith(f"{SERVER}.http."):
            assert not [name for name in imports_of(module) if starts(name, (f"{SERVER}.apis",))], module
