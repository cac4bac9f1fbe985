"""How the server's rooms depend on each other, and on the engine, read from the imports of every file."""

from __future__ import annotations

import ast

import pytest
from source_graph import imports_of, modules

SERVER = "radixkv_server"

#: From the ground up: a room imports from lower floors and from itself. Of rooms that stand around the
#: context, which holds some of what they make, the files below it are named apart.
FLOORS = (
    ("log_format", "off_loop", "response_store"),
    ("errors",),
    ("tenants",),
    ("settings", "response_file"),
    (
        *("diagnostics", "dialect"),
        *(
            "chats.applied_rules",
            "chats.call_memory",
            "chats.message_places",
            "chats.structured",
            "chats.templates",
        ),
        *("generation.background", "generation.concurrency", "generation.grammar_places"),
        *("generation.progress", "generation.prompts", "generation.request", "generation.usage"),
    ),
    ("http", "metrics"),
    ("generation.metering", "activity"),
    ("context", "generation.generation"),
    ("chats", "generation"),
    ("apis", "console", "openapi"),
    ("proxy",),
    ("app", "recorded_prompts"),
    ("ray_serve",),
)
#: All that the server knows of the engine: how to ask it, and what is asked and answered.
ENGINE = {
    "radixkv.observe.audit.exchange",  # the proxy's requests, as an audit reads them
    "radixkv.observe.audit.prices",
    "radixkv.observe.audit.record",
    "radixkv.observe.audit.request_bodies",
    "radixkv.observe.audit.response_bodies",
    "radixkv.observe.audit.rule_sets",
    "radixkv.observe.audit.rules",
    "radixkv.cache.cache_stats",  # the type of a tree's figures
    "radixkv",  # its version
    "radixkv.observe.audit.prompt_units",  # what counts the prompts of a log
    "radixkv.cache.reporting.divergence",  # the type of a hint
    "radixkv.cache.reporting.events",  # the types of events
    "radixkv.cache.reporting.ages",  # bounds of counted ages
    "radixkv.cache.reporting.explain",  # the type of a miss report
    "radixkv.cache.reporting.reasons",  # the words for each reason
    "radixkv.observe.similarity",  # what two prompts have in common further on
    "radixkv.engine.cache_client",
    "radixkv.entrypoints.async_engine",  # what each replica on Ray Serve runs, and how its clients reach it
    "radixkv.cluster.loop_thread",
    "radixkv.text.text_tokenizer",  # the type of an engine's tokenizer
    "radixkv.cluster.remote.fork_server",
    "radixkv.model.loading.loader",  # the type of a model that has been read
    "radixkv.cluster.remote.tcp",
    "radixkv.cluster.replicas.engine",
    "radixkv.tiers.spec",
    "radixkv.cache.keys",  # how tokens are encoded
    "radixkv.cache.reporting.tree_walk",  # the type of a node
    "radixkv.cache.pins",  # the type of a pin
    "radixkv.cache.accounts",  # what a tenant is granted
    "radixkv.tenancy.quota",  # bounds of all tenants together
    "radixkv.text.chat_formats.answer",
    "radixkv.observe.breaker",
    "radixkv.observe.history_difference",
    "radixkv.observe.message_difference",
    "radixkv.observe.message_names",
    "radixkv.observe.prompt_difference",
    "radixkv.observe.prompt_parts",
    "radixkv.text.chat_formats.answer_grammar",
    "radixkv.text.chat_formats.canonical_tools",
    "radixkv.text.chat_formats.client_rules",
    "radixkv.text.chat_formats.format",
    "radixkv.text.chat_formats.formats",
    "radixkv.text.chat_formats.hints",
    "radixkv.text.chat_formats.history",
    "radixkv.text.chat_formats.template_form",
    "radixkv.text.chat_formats.template_traits",
    "radixkv.text.chat_formats.thinking",
    "radixkv.engine.client",
    "radixkv.engine.config",
    "radixkv.engine.prompt_limits",  # what prompts must keep to
    "radixkv.errors",
    "radixkv.entrypoints.extras",
    "radixkv.sampling.logprobs",
    "radixkv.sampling.sampling_params",
    "radixkv.scheduling.request",
    "radixkv.engine.outputs",
    "radixkv.grammar.limits",  # whether a tool's grammar is within bounds
    "radixkv.engine.counts",
    "radixkv.tiers.measured_tier",  # TierCounts, a part of the statistics
    "radixkv.observe.audit.body_limits",
    "radixkv.cluster.events.block_keys",  # of several upstreams what each holds, and which one gets a request
    "radixkv.cluster.events.follower",
    "radixkv.cluster.events.spec",
    "radixkv.cluster.events.subscriber",
    "radixkv.cluster.routing.learned_blocks",
    "radixkv.engine.policy_names",  # that a setting is wrong, before replicas start
    "radixkv.cluster.routing.prompt_blocks",
    "radixkv.cluster.routing.replica",
    "radixkv.cluster.routing.router",
    "radixkv.sampling.structured",
    "radixkv.grammar.schema_text",  # a schema as a part of a larger grammar
    "radixkv.grammar.ebnf",  # a second notation of grammars
    "radixkv.grammar.escaped_lark",  # the grammar of a tool whose input is written as a JSON string
    "radixkv.text.json_text",  # arguments of tool calls as they were written
    "radixkv.text.text_owner",
    "radixkv.text.text_size",
}
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


@pytest.mark.parametrize("module", FILES)
def test_rooms_import_downwards(module: str) -> None:
    for name in imports_of(module):
        if name.startswith(SERVER + "."):
            assert floor_of(name) <= floor_of(module), f"{module} must not import {name}"


@pytest.mark.parametrize("module", FILES)
def test_the_engine_is_an_engine_client(module: str) -> None:
    ours = {name for name in imports_of(module) if name.split(".")[0] == "radixkv"}
    if module == f"{SERVER}.app":
        ours.discard("radixkv.entrypoints.async_engine")  # what serves when nobody says otherwise
    assert ours <= ENGINE, f"{module} must not know {sorted(ours - ENGINE)}"


def test_one_place_decides_what_leaves_the_event_loop() -> None:
    """Ray's replicas and the proxy, which serve other loops, wait in threads of their own."""
    users = {
        name
        for name in FILES
        if any(getattr(node, "attr", "") == "to_thread" for node in ast.walk(modules()[name]))
    }
    apart = {name for name in users if name.split(".")[1] in ("ray_serve", "proxy")}
    assert users - apart == {f"{SERVER}.off_loop"}


def test_http_knows_no_api() -> None:
    """Its names and shapes come by way of the dialect of the path."""
    for module in FILES:
        if module.startswith(f"{SERVER}.http."):
            assert not [name for name in imports_of(module) if ".apis" in name]
