# SPDX-License-Identifier: Apache-2.0
"""Flags, defaults, ranges and routes that pages state are those of the commands and the API."""

from __future__ import annotations

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
from radixkv.cli.main import command_tree
from radixkv.errors import InvalidRequestError
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.policy import POLICIES as SCHEDULING
from radixkv_server.apis.openai.schemas import ChatCompletionRequest, CompletionRequest
from radixkv_server.app import APIS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PARAMS = SamplingParams()


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


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
    known = {*of_commands, *(flag for found in of_scripts for flag in found), "--help", "--extra-index-url"}
    for page in (*DOCS.rglob("*.md"), ROOT / "README.md"):
        text = page.read_text(encoding="utf-8")
        if page.name == "coming_from_vllm.md":  # the first column of its table is the other engine's
            text = re.sub(r"^\| [^|]*\|", "|", text, flags=re.MULTILINE)
        if page.name == "agents.md":  # so are all flags beside the agents' own names
            text = re.sub(r"`(?!radixkv)[^`\n]+`|^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        if page.name == "kubernetes.md":
            text = re.sub(r"^(?:kubectl|helm)(?:.*\\\n)*.*", "", text, flags=re.MULTILINE)
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
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    routes = {route.path for api in APIS for route in api.router.routes}
    for path in routes:
        shown = re.sub(r"\{\w+(:path)?\}", "{id}", path)
        assert f"{shown}`" in pages or f"{shown} " in pages or f"{shown}," in pages, shown


@pytest.mark.parametrize(
    ("page", "names"),
    [("eviction.md", sorted(EVICTION)), ("scheduling.md", sorted(set(SCHEDULING) - {"auto"}))],
)
def test_every_policy_has_its_row(page: str, names: list[str]) -> None:
    text = text_of(page)
    assert not [name for name in names if f"| `{name}`" not in text]


def test_a_heading_stands_once() -> None:
    for page in DOCS.glob("*.md"):
        prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        headings = re.findall(r"^## (.*)$", prose, re.MULTILINE)
        assert len(set(headings)) == len(headings), page.name
