# SPDX-License-Identifier: Apache-2.0
"""What the pages state of the server is what the code has: flags, defaults, limits, routes without a key."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from benchmarks.cluster_simulator.commands import app as simulator
from radixkv.cache.eviction.registry import POLICIES as EVICTION
from radixkv.cache.reporting.tree_walk import SLICE_NODES
from radixkv.cli.main import command_tree
from radixkv.cluster.events import spec as events_spec
from radixkv.cluster.events.publisher import MAX_WAITING_BLOCKS
from radixkv.cluster.events.replay_log import MAX_BATCHES, MAX_BYTES
from radixkv.cluster.events.subscriber import SILENCE_S
from radixkv.cluster.replicas.engine import PATIENCE_S
from radixkv.engine.config import EngineConfig
from radixkv.entrypoints.builder import engine_on_runner
from radixkv.entrypoints.engine_thread import RestartPolicy
from radixkv.errors import InvalidRequestError
from radixkv.grammar import limits, tenants, trial, work
from radixkv.grammar.ebnf import MAX_EBNF_BYTES
from radixkv.grammar.escaped_lark import MAX_CHARS
from radixkv.observe.advisor import MIN_RUN
from radixkv.observe.audit.rule_sets import RULE_SETS
from radixkv.sampling.sampling_params import MAX_BAD_WORDS, MAX_STOP_LENGTH, MAX_STOP_STRINGS, SamplingParams
from radixkv.scheduling.admission import MANY_PROMPTS, MAX_RENEWED
from radixkv.scheduling.policy import POLICIES as SCHEDULING
from radixkv.scheduling.step_plan import MAX_LOGITS_CHUNK
from radixkv.speculation.namespace_texts import MAX_NAMESPACES, MAX_TOKENS
from radixkv.speculation.text_index import LONGEST_MATCH
from radixkv.text.chat_formats.format_parser import HELD
from radixkv.tiers.load_waits import RETRY_S
from radixkv.tiers.loads import MAX_WRITTEN_BLOCKS
from radixkv.tiers.measured_tier import FORGET_S, MAX_REST_S, REST_S
from radixkv.tiers.open_tiers import DEFAULT_TTL_S, MIN_SECRET_BYTES
from radixkv.tiers.redis.redis_tier import TIMEOUT_S
from radixkv.tiers.saves import MAX_COPIED_BLOCKS
from radixkv.tiers.selection import LONG_TOKENS
from radixkv.tiers.tier_use import ASK_TIERS_S, SAVE_AT_END_S
from radixkv_kernels.cpu.attention.attention_kernel import SEGMENT as CPU_SEGMENT
from radixkv_kernels.triton.tiles import SEGMENT as GPU_SEGMENT
from radixkv_server.activity.activity import (
    KEPT_PROMPT_TOKENS,
    KEPT_PROMPTS,
    KEPT_REQUESTS,
    KEPT_TOKENS,
)
from radixkv_server.activity.cache_feed import LINGER_S, LOG_EVENTS
from radixkv_server.apis.anthropic import context_edits
from radixkv_server.apis.anthropic.schemas import MIN_THINKING_TOKENS
from radixkv_server.apis.cache_api import pins, schemas
from radixkv_server.apis.cache_api import routes as cache_routes
from radixkv_server.apis.cache_api.events import EVENT_CHANGES
from radixkv_server.apis.common.chat_completion import ChatCompletionRequest
from radixkv_server.apis.common.fields import DEFAULT_TTL, MAX_LOGIT_BIAS, MAX_LOGPROBS
from radixkv_server.apis.openai.routes import DEFAULT_MAX_TOKENS
from radixkv_server.apis.openai.schemas import CompletionRequest
from radixkv_server.apis.responses.compaction import SUMMARY_TOKENS
from radixkv_server.apis.responses.schemas import MAX_METADATA
from radixkv_server.app import APIS
from radixkv_server.chats import call_memory
from radixkv_server.chats.breakpoints import MAX_BREAKPOINTS
from radixkv_server.context import BODY_BYTES_PER_TOKEN, OTHER_BODY_BYTES
from radixkv_server.diagnostics import fingerprint as fingerprints
from radixkv_server.http.protocol import MAX_UNSENT_BYTES
from radixkv_server.proxy.routed_relay import MAX_BODY_BYTES
from radixkv_server.proxy.serve import MAX_CONNECTIONS
from radixkv_server.response_file import MAX_WAIT_S
from radixkv_server.settings import ServerSettings

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SERVER, PARAMS, CONFIG = ServerSettings(), SamplingParams(), EngineConfig()
LOAD_DEADLINE_S = inspect.signature(engine_on_runner).parameters["load_deadline_s"].default
ANTHROPIC, OPENAI = RULE_SETS["anthropic"], RULE_SETS["openai"]
MINIMA = ANTHROPIC.minimum_tokens.values()
MIB, KIB, DAY_S = 2**20, 2**10, 86400
RESTARTS = RestartPolicy()


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


#: Page -> what it says, put together from the code.
STATED = {
    "http_api.md": (
        f"text: {DEFAULT_MAX_TOKENS} |",
        f"or up to {MAX_STOP_STRINGS}; each of 1 to {MAX_STOP_LENGTH:,} characters",
        f"-100 to 100, at most {MAX_LOGIT_BIAS:,} |",
        f"at most {MAX_BAD_WORDS:,} texts that are not generated",
        f"`logprobs` and `top_logprobs` (0 to {MAX_LOGPROBS})",
        f"at most {SERVER.max_prompts} prompts",
        f"(at most {MAX_METADATA} pairs)",
        f"{SERVER.max_stored_responses:,} of\n  a tenant's and {SERVER.max_stored_bytes // MIB} MiB",
        f"in at most {SUMMARY_TOKENS:,} tokens; the answer's `output`",
        f"nested deeper than {SERVER.max_json_depth},",
        f"headers took over {SERVER.header_timeout_s:g} s, or the body over {SERVER.body_timeout_s:g} s",
        f"body over {OTHER_BODY_BYTES // MIB} MiB + {BODY_BYTES_PER_TOKEN} bytes per token of the context",
        f"per token of {SERVER.max_prompts} contexts; at most {SERVER.max_body_bytes // MIB} MiB",
        f"more than {SERVER.max_json_parts:,} arrays, objects and fields",
        f"request line and headers over {SERVER.max_header_bytes // KIB} KiB",
        f"for {SERVER.ping_interval_s:g} s (a long queue) sends comment lines",
        f"for {SERVER.slow_client_timeout_s:g} s (`--slow-client-timeout`)",
        f"at most {MAX_UNSENT_BYTES // KIB} KiB wait for it here",
        f"`--shutdown-delay` ({SERVER.shutdown_delay_s:g} s)",
        f"at most { {5: 'five'}[RESTARTS.max_restarts] } times in "
        f"{ {600: 'ten'}[RESTARTS.within_s] } minutes",
        f"a tenant's latest {fingerprints.MAX_REQUESTS:,}, as long as they take no more\n"
        f"than {fingerprints.MAX_BYTES // MIB} MiB",
        f"program for longer than { {1: 'a second'}[MAX_WAIT_S] }",
        f"a breakpoint at the end of the prompt, and the latest {MAX_BREAKPOINTS - 1} on parts",
        f"`mode`: `explicit` | the latest {MAX_BREAKPOINTS} on parts",
        f"`ttl`: `{DEFAULT_TTL}` (default)",
        f"finish within {SERVER.shutdown_grace_s:g} s",
    ),
    "structured_output.md": (
        f"or of all choices | {limits.MAX_TEXT_BYTES // KIB} KiB |",
        f"| nesting | {limits.MAX_DEPTH} levels |",
        f"constants included | {limits.MAX_PROPERTIES:,} (",
        f"`enum` and `const` | {limits.MAX_ENUM_VALUES:,} |",
        f"an answer have at least | {limits.MAX_FORCED_BYTES // KIB} KiB |",
        f"(its numerator) | {limits.MAX_MULTIPLE:,} |",
        f"| `patternProperties` | {limits.MAX_PATTERN_PROPERTIES} |",
        f"joined by `allOf` or `$ref` | {limits.MAX_JOINED_PATTERNS} |",
        f"`&` and `~` in Lark, multiplied | {limits.MAX_JOINED_WAYS:,} |",
        f"| different `$ref` | {limits.MAX_REFERENCES};",
        f"nested in each other, multiplied | {limits.MAX_REPETITIONS:,} |",
        f"| CPU time of a trial | {trial.MAX_TRIAL_S:g} s |",
        f"what it keeps | {trial.MAX_TRIAL_BYTES // MIB} MiB, {trial.MAX_GRAMMAR_BYTES // MIB} MiB |",
        f"one token's acceptance | {trial.MAX_CALL_S * 1000:g} ms |",
        f"no more than {work.PROMISED_S * 1e6:g} us",
        f"may exceed that by {work.MAX_EXCESS_S * 1000:g} ms of CPU",
        f"where {tenants.MAX_WAITING} of its grammars wait",
        f"{tenants.COMPILING[0]:g} s at once and { {0.25: 'a quarter'}[tenants.COMPILING[1]] } of the time",
        f"{tenants.FOLLOWING[0]:g} s and\n{ {0.05: 'a twentieth'}[tenants.FOLLOWING[1]] } for its masks",
        f"{tenants.MAX_KNOWN} compiled grammars of {tenants.MAX_KNOWN_BYTES // MIB} MiB",
        f"so are grammars of more than {MAX_EBNF_BYTES // KIB} KiB",
    ),
    "tools_and_reasoning.md": (
        f"Up to {HELD} characters are held back",
        f"of at most {MAX_CHARS:,} characters",
    ),
    "kernels.md": (f"multiples of S ({GPU_SEGMENT} on GPUs, {CPU_SEGMENT} on CPU)",),
    "anthropic_api.md": (
        f"At most {MAX_BREAKPOINTS} breakpoints",
        f"up to {call_memory.MAX_CHARS // MIB} MiB for a tenant",
        f"up to {MAX_STOP_STRINGS}, each of 1 to {MAX_STOP_LENGTH:,} characters",
        f"`budget_tokens` must be at least {MIN_THINKING_TOKENS:,} ",
        f"`input_tokens` ({context_edits.TRIGGER_TOKENS:,})",
        f"the last `tool_uses` ({context_edits.KEPT_TOOL_USES})",
        f"the last `thinking_turns` ({context_edits.KEPT_THINKING_TURNS})",
        f"replaces older results of tools by `{context_edits.PLACEHOLDER}`",
    ),
    "tiers.md": (
        f"lives for `ttl` seconds ({ {DAY_S: 'a day'}[DEFAULT_TTL_S] })",
        f"`secret=FILE` ({MIN_SECRET_BYTES} bytes or more",
        f"have time-outs of {TIMEOUT_S:g} s",
        f"({MAX_WRITTEN_BLOCKS} a step at most)",
        f"asked again {RETRY_S * 1000:g} ms later",
        f"`load_deadline_s` ({LOAD_DEADLINE_S:g} s since",
        f"measured again after {FORGET_S:g} s",
        f"left alone for {REST_S:g} s, then for {2 * REST_S:g}, up to {MAX_REST_S:g}",
        f"a text of {LONG_TOKENS} tokens or more",
        f"in pieces of {MAX_COPIED_BLOCKS} by",
        f"for at most { {10: 'ten'}[SAVE_AT_END_S] } seconds",
    ),
    "kv_events.md": (
        f"The latest {MAX_BATCHES:,} batches, at most {MAX_BYTES // MIB} MiB",
        f"If more than {MAX_WAITING_BLOCKS:,} blocks wait",
        f"at least {events_spec.MIN_SECRET_BYTES} bytes",
        f"{SILENCE_S:g} seconds without a heartbeat",
    ),
    "replicas.md": (f"requests without a token wait {PATIENCE_S:g} seconds",),
    "proxy.md": (
        f"More than {MAX_CONNECTIONS:,} connections",
        f"(up to {MAX_BODY_BYTES // MIB} MiB, or `--max-body`)",
    ),
    "audit.md": (
        f"`vllm` | whole blocks, answers too: of {RULE_SETS['vllm'].block_tokens} tokens",
        f"(`cache_control`, at most {ANTHROPIC.max_breakpoints}), "
        f"looked for up to {ANTHROPIC.looks_back} blocks",
        f"{min(MINIMA):,} to {max(MINIMA):,} tokens at least",
        f"{ANTHROPIC.ttl_s / 60:g} minutes after its last use",
        f"`prompt_cache_breakpoint`; {OPENAI.minimum('gpt'):,} tokens at least",
        f"{OPENAI.ttl_s / 60:g} minutes, or {max(OPENAI.write_cost) / 3600:g} hours",
    ),
    "scheduling.md": (
        f"chunks of at most {MAX_LOGITS_CHUNK} tokens",
        f"more than {MAX_RENEWED} waiting requests, the matches of {MAX_RENEWED} are",
        f"with { {4: 'four'}[MANY_PROMPTS] } prompts in progress",
        *(f"| `{name}`" for name in SCHEDULING if name != "auto"),
    ),
    "speculation.md": (
        f"`--speculation {CONFIG.speculation}` is the default",
        f"The last {MAX_TOKENS:,} tokens of answers are kept for each of {MAX_NAMESPACES} namespaces",
        f"its last 2 to {LONGEST_MATCH} tokens",
    ),
    "eviction.md": (f"`{CONFIG.eviction_policy}` is the default", *(f"| `{name}` |" for name in EVICTION)),
    "cache_api.md": (
        f"latest {KEPT_REQUESTS} prompts",
        f"once more than {KEPT_PROMPTS:,} prompts or {KEPT_PROMPT_TOKENS:,} tokens",
        f"the prompt's first {KEPT_TOKENS} tokens",
        f"({LOG_EVENTS:,} changes, {LINGER_S:g} seconds without any reader)",
        f"most {EVENT_CHANGES} changes come in one event",
        f"more than {cache_routes.MAX_SEEN_NODES:,} nodes (or a search more than "
        f"{cache_routes.MAX_SEARCHED_TOKENS:,} tokens)",
        f"for {SLICE_NODES} nodes at a time",
        f"does not answer within {ASK_TIERS_S:g} s",
        f"in runs of {MIN_RUN} tokens and\nmore",
        f"| `limit` | {cache_routes.DEFAULT_NODES} | most nodes, 1 to {cache_routes.MAX_NODES:,} |",
        f"| `depth` | {cache_routes.MAX_DEPTH} |",
        f"1 to {cache_routes.MAX_SEARCH_CHARS} characters",
        f"at most {schemas.MAX_TTL_S / DAY_S:g} days, {schemas.DEFAULT_TTL_S:,.0f} by default",
        f"a tenant has at most {pins.MAX_PINS} pins",
        f"`limit` 1 to {cache_routes.MAX_ADVICE}, {cache_routes.DEFAULT_ADVICE} by default",
    ),
}


@pytest.mark.parametrize(("page", "words"), [(page, text) for page in STATED for text in STATED[page]])
def test_a_stated_value_is_the_codes(page: str, words: str) -> None:
    assert words in text_of(page), f"docs/{page} should say: {words}"


FLAG = r"`(--[a-z][\w-]*)[^`\n]*`"
VALUE = r"(?:default:? )?`?(on|off|auto|-?[\d.,]+(?= ?(?:s|ms|[KMG]iB|tokens|blocks)?`?[;,)]))"
#: A flag and its default: `--flag X` (30 s), `--flag` defaults to X, 30 s (`--flag`), `--flag X` is it.
STATEMENTS = (
    re.compile(rf"{FLAG}\s+\({VALUE}"),
    re.compile(rf"{FLAG}[^|.;\n]{{0,40}}\bdefaults? (?:to|is|of)?\s*{VALUE}"),
    re.compile(r"(?P<value>[\d.,]+) ?(?:s|ms|[KMG]iB|tokens|blocks)\s+\(`(?P<flag>--[\w-]+)`\)"),
    re.compile(r"`(?P<flag>--[a-z][\w-]*) (?P<value>[\w.:]+)`\s+is the default"),
)
#: Of these, the text in brackets is another thing's.
NO_DEFAULT = {("speculation.md", "--deterministic")}


def stated_defaults() -> list[tuple[str, str, str]]:
    """Page, flag and default, wherever a page's prose states one."""
    found = []
    for page in (
        *DOCS.glob("*.md"),
        *(DOCS / "guide").glob("*.md"),
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
    ):
        for pattern in STATEMENTS:
            for match in pattern.finditer(page.read_text(encoding="utf-8")):
                groups = match.groupdict()
                flag, value = (groups["flag"], groups["value"]) if groups else match.groups()
                if (page.name, flag) not in NO_DEFAULT:
                    found.append((page.name, flag, value.replace(",", "")))
    return found


def defaults_of(flag: str) -> set[str]:
    """The defaults of a flag in all commands that have it, by the generated page."""
    rows = re.findall(r"^\| (`--.*?) \| .*? \| (.*?) \| .* \|$", text_of("reference/cli.md"), re.MULTILINE)
    return {default.strip("`") for names, default in rows if f"`{flag}`" in names.split(" / ")}


@pytest.mark.parametrize(("page", "flag", "stated"), stated_defaults())
def test_a_default_in_prose_is_the_flags(page: str, flag: str, stated: str) -> None:
    defaults = defaults_of(flag)
    numbers = {float(default) for default in defaults if re.fullmatch(r"-?[\d.]+", default)}
    is_number = re.fullmatch(r"-?[\d.]+", stated) is not None
    assert float(stated) in numbers if is_number else stated in defaults, (page, flag, stated, defaults)


def test_defaults_are_found_in_prose() -> None:
    flags = {flag for _, flag, _ in stated_defaults()}
    assert flags >= {
        "--shutdown-delay",
        "--slow-client-timeout",
        "--tensor-parallel-timeout",
        "--normalize-clients",
        "--canonical-tools",
        "--speculation",
    }


def options_of(command: click.Command) -> Iterator[str]:
    for param in command.params:
        yield from (name for name in (*param.opts, *param.secondary_opts) if name.startswith("--"))
    for inner in getattr(command, "commands", {}).values():
        yield from options_of(inner)


def test_every_flag_on_a_page_is_one() -> None:
    """Of a command, or of one of the scripts that pages speak of."""
    scripts = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    declared = re.compile(r'add_argument\(\s*"(--[\w-]+)"')
    of_scripts = (declared.findall(path.read_text(encoding="utf-8")) for path in scripts)
    commands = (typer.main.get_command(app) for app in (command_tree(), simulator))
    of_commands = (flag for command in commands for flag in options_of(command))
    known = {*of_commands, *(flag for found in of_scripts for flag in found), "--help"}
    for page in (*DOCS.rglob("*.md"), ROOT / "README.md"):
        text = page.read_text(encoding="utf-8")
        if page.name == "coming_from_vllm.md":  # the first column of its table is the other engine's
            text = re.sub(r"^\| [^|]*\|", "|", text, flags=re.MULTILINE)
        flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text))
        assert flags <= known, (page.name, sorted(flags - known))


def field_table() -> list[tuple[str, str, str]]:
    """Rows of the fields that completions share: name, default, range and meaning."""
    section = text_of("http_api.md").partition("## Fields of both completions")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \| (.*) \|$", section, re.MULTILINE)
    return [(name, default, says) for names, default, says in rows for name in re.findall(r"`(.+?)`", names)]


OFF = {"top_k": 0, "min_p": 0, "repetition_penalty": 1}
IN_PARAMS = {field.name for field in fields(SamplingParams)} - {"max_tokens"}


@pytest.mark.parametrize(("name", "default", "says"), field_table())
def test_a_stated_default_is_the_one(name: str, default: str, says: str) -> None:
    """A field that is not given is that of SamplingParams, or nothing."""
    for body, given in (
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}]}),
        (CompletionRequest, {"prompt": "a"}),
    ):
        value: Any = body.model_validate(given)
        for part in name.split("."):
            assert part in type(value).model_fields if value is not None else True, name
            value = getattr(value, part) if value is not None else None
        assert value is None, "not given"
    if name in IN_PARAMS:
        value = getattr(PARAMS, name)
        stated = {
            "none": None,
            "all": None,
            "random": None,
            "false": False,
            "true": True,
            "off": OFF.get(name),
        }
        expected = stated[default] if default in stated else float(default)
        assert value == expected or (expected is None and not value), (name, value)


RANGES = [
    (name, *map(float, found))
    for name, _, says in field_table()
    for found in re.findall(r"^(-?[\d.]+) to (-?[\d.]+)\b", says)
    if name in IN_PARAMS - {"prompt_logprobs"}
]


@pytest.mark.parametrize(("name", "least", "most"), RANGES)
def test_a_stated_range_is_the_one(name: str, least: float, most: float) -> None:
    number = int if isinstance(getattr(PARAMS, name), int) else float
    for good in (least, most):
        SamplingParams(**{name: number(good)})
    for bad in (least - 1, most + 1):
        with pytest.raises(InvalidRequestError, match=name):
            SamplingParams(**{name: number(bad)})


def test_ranges_are_stated() -> None:
    assert {name for name, _, _ in RANGES} >= {"temperature", "n", "presence_penalty", "frequency_penalty"}


def test_routes_without_a_key_are_the_ones() -> None:
    rows = re.findall(r"^\| (.*?) \| .*needs no key.* \|$", text_of("http_api.md"), re.MULTILINE)
    stated = {path for row in rows for path in re.findall(r"(/[\w/]*)`", row)}
    assert stated == {path for api in APIS for path in api.open_paths}


def test_every_route_is_on_a_page() -> None:
    pages = "".join(text_of(page) for page in STATED)
    routes = {route.path for api in APIS for route in api.router.routes}
    for path in routes:
        shown = re.sub(r"\{\w+(:path)?\}", "{id}", path)
        assert f"{shown}`" in pages or f"{shown} " in pages or f"{shown}," in pages, shown


@pytest.mark.parametrize("page", STATED)
def test_a_heading_stands_once(page: str) -> None:
    headings = re.findall(r"^## (.*)$", text_of(page), re.MULTILINE)
    assert len(set(headings)) == len(headings)
