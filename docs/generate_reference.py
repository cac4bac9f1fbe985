# SPDX-License-Identifier: Apache-2.0
"""Write the pages of docs/reference from the code.

    python docs/generate_reference.py [--check]        (or: make docs)

`--check` writes nothing and exits with 1 if a page would change; a test does the same.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import runpy
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_origin

from typer import Context
from typer.models import ArgumentInfo

from radixkv.cli.main import command_tree
from radixkv.cli.options import setting_helps
from radixkv.engine.config import EngineConfig
from radixkv.model.loading import checkpoint_formats
from radixkv.model.vision import families
from radixkv.option_names import TABLE_OF
from radixkv.text.chat_formats.formats import FORMATS
from radixkv_server.app import APIS
from radixkv_server.http.fields import field_rows
from radixkv_server.ray_serve.settings import ReplicaSettings
from radixkv_server.settings import ServerSettings

FOLDER = Path(__file__).parent / "reference"
ROOT = Path(__file__).parents[1]
COMMAND = "make docs"
#: Rows of the table of stored forms before the generated ones.
_FORMATS_HEAD = """| form | `quant_method` | on a CPU | on a GPU |
|---|---|---|---|
| float32, bfloat16, float16 | | yes | yes |
| GGUF | | as blocks: [below](#gguf-files-on-a-cpu) | [as blocks](#stored-weights-on-a-gpu) |
"""
_FAMILIES_HEAD = "| family | `model_type` | |\n| --- | --- | --- |\n"
_BLIND_HEAD = "| why not | `model_type` |\n| --- | --- |\n"
_FORMATS_LAST = "| any other, or tensors that no form explains |"


def cell(text: Any) -> str:
    """Text that stays within its cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def code(text: Any) -> str:
    return f"`{cell(text)}`"


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = [heads, ("---",) * len(heads), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def default_of(field: Field[Any]) -> str:
    value = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
    return "" if value is None or value == () else code(value)


@dataclass(frozen=True)
class Parameter:
    """An argument or an option of a command, as its signature declares it."""

    name: str
    is_argument: bool
    flags: tuple[str, ...]
    kind: Any
    default: Any
    help: str
    panel: str | None

    @classmethod
    def of(cls, declared: inspect.Parameter) -> Parameter:
        kind, info = get_args(declared.annotation)
        is_argument = isinstance(info, ArgumentInfo)
        flag = "--" + declared.name.replace("_", "-")
        # In `Annotated`, typer keeps the first declaration where a default would stand.
        named = [text for text in (info.default, *(info.param_decls or ())) if isinstance(text, str)]
        named = named or ([f"{flag}/--no-{flag[2:]}"] if kind is bool else [flag])
        flags = tuple(flag.strip() for text in named for flag in text.split("/") if flag.startswith("-"))
        default = MISSING if declared.default is inspect.Parameter.empty else declared.default
        return cls(declared.name, is_argument, flags, kind, default, info.help or "", info.rich_help_panel)

    def label(self) -> str:
        return code(self.name.upper()) if self.is_argument else " / ".join(map(code, self.flags))

    def value(self) -> str:
        """Return the kind of the option's value."""
        kinds = [kind for kind in get_args(self.kind) or (self.kind,) if kind is not type(None)]
        lists = [kind for kind in (self.kind, *kinds) if get_origin(kind) is list]
        kind = get_args(lists[0])[0] if lists else kinds[0]
        names = {str: "text", int: "integer", float: "number", Path: "path", bool: "flag"}
        return names.get(kind, kind.__name__) + (", repeatable" if lists else "")

    def default_text(self) -> str:
        if self.default is MISSING:
            return "required"
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return code(self.default) if self.default not in (None, []) else ""


def parameters(command: Callable[..., Any]) -> list[Parameter]:
    signature = inspect.signature(command, eval_str=True)
    return [Parameter.of(p) for p in signature.parameters.values() if p.annotation is not Context]


def settings_table(kind: type, serve: list[Parameter]) -> list[str]:
    """Each field of a class of settings, with its flag of `radixkv serve` or its table of the file."""
    helps = setting_helps(kind)
    params = {param.name: param for param in serve}
    rows = []
    for field in fields(kind):
        param = params.get(field.name)
        if field.name in TABLE_OF:
            flag = f"in the file, `[{TABLE_OF[field.name]}]`"
        else:
            flag = "" if param is None else "the argument" if param.is_argument else param.label()
        rows.append((code(field.name), flag, code(field.type), default_of(field), cell(helps[field.name])))
    return table(("setting", "`radixkv serve`", "type", "default", "meaning"), rows)


def engine_tables(serve: list[Parameter]) -> list[str]:
    """The settings of the engine, a table for each group."""
    lines: list[str] = []
    for group in reversed(EngineConfig.__bases__):
        purpose = (inspect.getdoc(group) or "").split("\n", 1)[0]
        lines += ["", f"### {group.__name__}", "", purpose, "", *settings_table(group, serve)]
    return lines[1:]


def configuration(serve: list[Parameter]) -> str:
    lines = [
        "# Configuration",
        "",
        f"Written by `{COMMAND}` from the code: change the docstrings there, not this page.",
        "",
        "Every setting of the engine is a keyword of `LLM(model, ...)` and of `EngineConfig(model, ...)`,",
        "which `AsyncEngine.from_config` takes. Those with a flag are options of the [commands](cli.md) that",
        "load a model; the others have their place in a table of the file of `radixkv serve --config FILE`",
        "([operations](../operations.md#settings)).",
        "A value out of range is a `ConfigError` that names the setting, the value and the range; for an",
        "unknown name it says which one was meant. [The Python API](../python_api.md) has examples.",
        "",
        "## The engine",
        "",
        f"`{EngineConfig.__module__}.{EngineConfig.__name__}`, which is each of these groups.",
        "",
        *engine_tables(serve),
        "",
        "## The server",
        "",
        f"`{ServerSettings.__module__}.{ServerSettings.__name__}`, for `radixkv_server.app.create_app`.",
        "",
        *settings_table(ServerSettings, serve),
        "",
        "## Replicas",
        "",
        f"`{ReplicaSettings.__module__}.{ReplicaSettings.__name__}`; see [replicas](../replicas.md).",
        "",
        *settings_table(ReplicaSettings, serve),
        "",
    ]
    return "\n".join(lines)


def options_table(params: list[Parameter]) -> list[str]:
    rows = [(p.label(), p.value(), p.default_text(), cell(p.help)) for p in params]
    return table(("option", "value", "default", "meaning"), rows)


def command_page(name: str, command: Callable[..., Any]) -> list[str]:
    params = parameters(command)
    names = {field.name for field in fields(EngineConfig)} - set(TABLE_OF)
    if not names <= {param.name for param in params}:
        names = set()
    own = [param for param in params if param.name not in names - {"model"} and param.name != "help_all"]
    positional = [param for param in own if param.is_argument]
    arguments = [p.name.upper() if p.default is MISSING else f"[{p.name.upper()}]" for p in positional]
    lines = ["", f"## radixkv {name}", "", f"    radixkv {' '.join([name, *arguments, '[OPTIONS]'])}", ""]
    lines += [inspect.getdoc(command) or "", ""]
    if own:
        lines += options_table(own)
    if names:
        lines += ["", "And the [engine options](#engine-options)."]
    return lines


def command_line(commands: dict[str, Callable[..., Any]]) -> str:
    names = {field.name for field in fields(EngineConfig)} - {"model"}
    engine = [param for param in parameters(commands["serve"]) if param.name in names]
    lines = [
        "# The command line",
        "",
        f"Written by `{COMMAND}` from the commands' declarations; `radixkv COMMAND --help` says the same.",
        "",
        "    radixkv [--version] [--verbose] COMMAND ...",
        "",
        "| command | what it does |",
        "| --- | --- |",
    ]
    for name, command in commands.items():
        summary = (inspect.getdoc(command) or "").split("\n\n")[0]
        lines.append(f"| [`radixkv {name}`](#radixkv-{name.replace(' ', '-')}) | {cell(summary)} |")
    for name, command in commands.items():
        lines += command_page(name, command)
    lines += [
        "",
        "## Engine options",
        "",
        "Of every command that loads a model; the same as [settings](configuration.md).",
        "",
    ]
    return "\n".join([*lines, *options_table(engine), ""])


def body_fields() -> str:
    """Return the page of the fields of each route's body."""
    lines = [
        "# Fields of requests",
        "",
        f"Written by `{COMMAND}` from the declarations that check the bodies. What the fields mean is told",
        "in [the HTTP API](../http_api.md), [the Messages API](../anthropic_api.md) and",
        "[the cache API](../cache_api.md),",
        "and how those that are not supported are treated under",
        "[known and unknown fields](../http_api.md#known-and-unknown-fields).",
    ]
    told: dict[type, str] = {}
    for operation, model in ((item, model) for api in APIS for item, model in api.bodies.items()):
        lines += ["", f"## {operation}", ""]
        if model in told:
            lines.append(f"As {told[model]}.")
            continue
        rows = field_rows(model)
        base = next((kind for kind in model.__mro__[1:] if kind in told), None)
        if base is not None:
            known = {(row.path, row.state) for row in field_rows(base)}
            rows = [row for row in rows if (row.path, row.state) not in known]
            lines += [f"Those of {told[base]}, and:" if rows else f"Those of {told[base]}.", ""]
        told[model] = code(operation)
        supported = [code(row.path) for row in rows if row.state == "supported"]
        if supported:
            lines += [f"Supported: {', '.join(supported)}.", ""]
        others = [(code(row.path), row.state, cell(row.why)) for row in rows if row.state != "supported"]
        if others:
            lines += table(("field", "", ""), others)
    return "\n".join([*lines, ""])


def shipped_templates() -> dict[str, tuple[str, str]]:
    """Return the tests' table of templates: the format of each, and how exact its forced calls are."""
    tree = ast.parse((ROOT / "tests" / "support" / "shipped_templates.py").read_text(encoding="utf-8"))
    reasons: dict[str, str] = {}
    found: dict[str, tuple[str, str]] = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            reasons[node.targets[0].id] = node.value.value
        elif node.targets[0].id == "TABLE" and isinstance(node.value, ast.Dict):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                assert isinstance(key, ast.Constant)
                assert isinstance(value, ast.Tuple)
                known, why = value.elts
                assert isinstance(known, ast.Constant)
                assert isinstance(why, ast.Name)
                found[str(key.value)] = (str(known.value), reasons[why.id])
    return found


def chat_formats() -> str:
    """Write a table of the chat formats: their models, a call, and the marks of reasoning."""
    lines = [
        "# Chat formats",
        "",
        f"Written by `{COMMAND}` from the declarations in `radixkv/text/chat_formats`. What they are for is",
        "told in [tools and reasoning](../tools_and_reasoning.md), how to add one in",
        "[a guide](../guide/add_a_chat_format.md).",
        "",
    ]
    rows = []
    for name, known in sorted(FORMATS.items()):
        calls = [("look", '{"city": "Paris", "days": 2}')]
        sections = (known.reasoning.opens[:1] + known.reasoning.closes[:1]) if known.reasoning else ()
        written = json.dumps(known.write_calls(calls), ensure_ascii=False)[1:-1] if known.forms else ""
        call = f"``{cell(written)}``".replace('\\"', '"') if written else ""
        rows.append((code(name), known.families, call, " ".join(map(code, sections))))
    lines += table(("`--chat-format`", "models", "a call", "reasoning"), rows)
    lines += [
        "",
        "## Templates that models ship",
        "",
        "The tests force calls with these templates, in the form that the template itself writes, and look",
        "whether the next prompt continues the answer exactly, to the last token (`make test-all`, with",
        "`RADIXKV_CHAT_TEMPLATES` naming a folder of templates).",
        "",
    ]
    templates = [(code(name), code(known), why) for name, (known, why) in sorted(shipped_templates().items())]
    lines += table(("template", "format", "a forced call in history"), templates)
    return "\n".join([*lines, ""])


def architectures() -> str:
    """Write a table of transformers' causal architectures: served, how tested, or refused and why."""
    found = json.loads((ROOT / "docs" / "architectures.json").read_text(encoding="utf-8"))
    tested = tested_architectures()
    states = [name if name in tested else each["status"] for name, each in found.items()]
    served = sum(state == "served" or state in tested for state in states)
    lines = [
        "# Architectures",
        "",
        f"Written by `{COMMAND}` from `docs/architectures.json`, which `python docs/survey_architectures.py`",
        f"finds out: of {len(found)} causal architectures of transformers, {served} are served;",
        f"{states.count('as text')} more, which read images or sound, too, are served for text.",
        "",
        "*tests*: the suite holds greedy tokens or logits to transformers', cold, hot and beside others.",
        "*checked*: its layers reach paged attention, and its logits are transformers' own on a tiny random",
        "model; each load checks it again. *not tried*: no tiny model was made by rule; a load says what",
        "holds.",
        "",
    ]
    rows = []
    for name, each in sorted(found.items()):
        how = "tests" if name in tested else "checked" if each["status"] == "served" else ""
        status = "served" if name in tested else each["status"]
        rows.append((code(name), code(each["class"]), status, how, cell("" if how else each["reason"])))
    lines += table(("`model_type`", "class", "", "held by", "why not"), rows)
    return "\n".join([*lines, ""])


def tested_architectures() -> set[str]:
    """The model types that the suite computes with, read from the tables of its tiny configurations."""
    tables = runpy.run_path(str(ROOT / "tests" / "support" / "tiny_configs.py"))
    rows = (tables[name].values() for name in ("FAMILIES", "SHAPES", "HYBRID_FAMILIES"))
    return {kind for table in rows for kind, _ in table}


def first_sentence(path: Path) -> str:
    """Of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".:")


def files() -> str:
    """Return a table of the files of each package with their purposes."""
    lines = [
        "# Files",
        "",
        f"Written by `{COMMAND}` from the first sentence of each file. What to read first is told in",
        "[the tour](../tour.md).",
    ]
    packages = [
        path.parent
        for base in ("radixkv", "kernels", "server")
        for path in (ROOT / base).rglob("__init__.py")
    ]
    for package in sorted(packages, key=lambda path: path.relative_to(ROOT).parts):
        name = package.relative_to(ROOT).as_posix()
        about = first_sentence(package / "__init__.py")
        lines += ["", f"## {name}", "", *([about + ".", ""] if about else [])]
        own = sorted(path for path in package.glob("*.py") if path.name != "__init__.py")
        lines += table(("file", "purpose"), [(code(p.name), cell(first_sentence(p))) for p in own])
    return "\n".join([*lines, ""])


def models_page() -> str:
    """The page of models, with the rows of its table of stored forms made of the code's."""
    path = FOLDER.parent / "models.md"
    before, head, rest = path.read_text(encoding="utf-8").partition(_FORMATS_HEAD)
    last = rest.index(_FORMATS_LAST)
    served = []
    refused = []
    for method, form in checkpoint_formats.FORMATS.items():
        if form.served is None:
            refused.append(form.title)
            continue
        named = f"{form.title} ({form.variants})" if form.variants else form.title
        served.append((named, code(method), form.on_cpu or form.served, form.served))
    rows = [f"| {' | '.join(line)} |" for line in served]
    rows.append(f"| {', '.join(sorted(refused, key=str.lower))} | | no | no |")
    return before + head + "".join(f"{row}\n" for row in rows) + rest[last:]


def images() -> str:
    """Return the page on images with the tables of the families that see, and of those that don't."""
    path = ROOT / "docs" / "images.md"
    before, head, rest = path.read_text(encoding="utf-8").partition(_FAMILIES_HEAD)
    rows = [
        f"| {family.name} | {code(kind.split()[0])} | {family.note} |"
        for kind, family in families.VISION_FAMILIES.items()
    ]
    text = before + head + "\n".join(rows) + "\n" + rest[rest.index("\n\n") + 1 :]
    before, head, rest = text.partition(_BLIND_HEAD)
    rows = [f"| {reason} | {', '.join(map(code, kinds))} |" for reason, kinds in families.NOT_SERVED.items()]
    return before + head + "\n".join(rows) + "\n" + rest[rest.index("\n\n") + 1 :]


def pages() -> dict[Path, str]:
    """Return the contents of the generated pages."""
    tree = command_tree()
    groups = [("", tree), *((f"{group.name} ", group.typer_instance) for group in tree.registered_groups)]
    commands = {
        prefix + (info.name or info.callback.__name__): info.callback
        for prefix, group in groups
        if group is not None
        for info in group.registered_commands
        if info.callback
    }
    return {
        FOLDER / "configuration.md": configuration(parameters(commands["serve"])),
        FOLDER / "cli.md": command_line(commands),
        FOLDER / "fields.md": body_fields(),
        FOLDER / "chat_formats.md": chat_formats(),
        FOLDER / "architectures.md": architectures(),
        FOLDER / "files.md": files(),
        FOLDER.parent / "models.md": models_page(),
        FOLDER.parent / "images.md": images(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    stale = [p for p, text in pages().items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    if check:
        sys.exit(f"out of date: {', '.join(p.name for p in stale)}; run `{COMMAND}`" if stale else 0)
    FOLDER.mkdir(exist_ok=True)
    for path in stale:
        path.write_text(pages()[path], encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
