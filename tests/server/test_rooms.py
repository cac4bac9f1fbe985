# SPDX-License-Identifier: Apache-2.0
"""How the server's rooms depend on each other, and on the engine, read from the imports of every file."""

from __future__ import annotations

from source_graph import imports_of, modules

SERVER = "radixkv_server"

#: From the ground up: a room imports from lower floors and from itself. Of rooms that stand around the
#: context, which holds some of what they make, the files below it are named apart.
FLOORS = (
    ("concurrency", "log_format", "response_store"),
    ("errors",),
    ("tenants",),
    ("settings", "response_file"),
    (
        *("diagnostics", "dialect"),
        *(
            "chats.applied_rules",
            "chats.call_memory",
        ),
        *("generation.background", "generation.grammar_places"),
        *("generation.prompts", "generation.request"),
    ),
    ("http", "metrics"),
    ("activity",),
    ("context", "generation.generation"),
    ("chats", "generation"),
    ("apis", "console", "openapi"),
    ("proxy",),
    ("app", "recorded_prompts"),
    ("ray_serve",),
)
#: The server knows the engine by its client's protocol and by plain data, and the whole rooms of texts, of
#: observation and of the cluster that its engines may form. It knows nothing of the heart's machinery.
ENGINE = (
    "radixkv",  # its version
    "radixkv.errors",
    *("radixkv.cluster", "radixkv.observe", "radixkv.text"),
    # The protocol, and what is asked and answered.
    *(
        "radixkv.engine.adapters",
        "radixkv.engine.cache_client",
        "radixkv.engine.client",
        "radixkv.engine.config",
        "radixkv.engine.counts",
    ),
    *("radixkv.engine.outputs", "radixkv.engine.policy_names", "radixkv.engine.input_processor"),
    *("radixkv.sampling.logprobs", "radixkv.sampling.sampling_params", "radixkv.sampling.structured"),
    *("radixkv.cache.accounts", "radixkv.cache.cache_stats", "radixkv.cache.keys", "radixkv.cache.owner"),
    *("radixkv.cache.pins", "radixkv.cache.reporting", "radixkv.scheduling.request"),
    # Checks and notations of settings and bodies, before an engine sees them.
    *("radixkv.entrypoints.extras", "radixkv.tenancy.quota", "radixkv.tiers.spec"),
    *("radixkv.grammar.ebnf", "radixkv.grammar.escaped_lark", "radixkv.grammar.limits"),
    "radixkv.grammar.schema_text",
    # Engines that Ray Serve's replicas run, and the type of a model read before.
    *("radixkv.entrypoints.async_engine", "radixkv.model.loading.loader"),
)
FILES = sorted(name for name in modules() if name.startswith(SERVER + "."))


def floor_of(module: str) -> int:
    name = module.removeprefix(SERVER + ".")
    found = [
        (len(room), height)
        for height, rooms in enumerate(FLOORS)
        for room in rooms
        if name == room or name.startswith(room + ".")
    ]
    assert found, f"{module} has no floor: name its room in FLOORS"
    return max(found)[1]


def test_rooms_import_downwards() -> None:
    wrong = [
        f"{module} must not import {name}"
        for module in FILES
        for name in imports_of(module)
        if name.startswith(SERVER + ".") and floor_of(name) > floor_of(module)
    ]
    assert not wrong


def knows(module: str) -> list[str]:
    """Files of radixkv beyond ENGINE that a file imports."""
    beyond = {name for name in imports_of(module) if name.split(".")[0] == "radixkv"} - set(ENGINE)
    return [name for name in beyond if not any(name.startswith(f"{room}.") for room in ENGINE[1:])]


def test_the_engine_is_an_engine_client() -> None:
    unknown = {module: knows(module) for module in FILES}
    assert not {module: names for module, names in unknown.items() if names}


def test_one_place_decides_what_leaves_the_event_loop() -> None:
    """Ray's replicas and the proxy, which serve other loops, wait in threads of their own."""
    users = {name for name in FILES if ".to_thread" in modules().source(name)}
    apart = {name for name in users if name.split(".")[1] in ("ray_serve", "proxy")}
    assert users - apart == {f"{SERVER}.concurrency"}


def test_http_knows_no_api() -> None:
    """Its names and shapes come by way of the dialect of the path."""
    for module in FILES:
        if module.startswith(f"{SERVER}.http."):
            assert not [name for name in imports_of(module) if ".apis" in name]
