# SPDX-License-Identifier: Apache-2.0
"""Settings as command-line options, made from a class of settings; all commands share the engine's.

The help text of an option is the setting's paragraph in the class's docstring, so the two can't differ.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from radixkv.cli.brief_help import HELP_ALL, PANEL_OF
from radixkv.cli.config_file import CONFIG_FILE, with_entries
from radixkv.engine.config import EMBEDDED_MODEL, EngineConfig, parse_size
from radixkv.engine.policy_names import check_policies
from radixkv.errors import ConfigError
from radixkv.option_names import ENGINE_FLAGS, TABLE_OF

# Settings that are not options under their own name.
_NOT_OPTIONS = ("model",)


def parse_names(flag: str, text: str, known: Collection[str]) -> list[str]:
    """Names separated by commas, each once; `all` stands for every one.

    Raises:
        ConfigError: one of them is not known, or there is none.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if names == ["all"]:
        return list(known)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ConfigError(
            f"{flag}: unknown {', '.join(unknown) or 'empty list'}; use {', '.join(known)}, or all"
        )
    return names


#: The panel of `--help` that lists the engine's settings.
ENGINE_PANEL = "Engine"


def setting_helps(settings: type) -> dict[str, str]:
    """Setting -> its sentence in the docstring of a class of settings, or of the group that declares it."""
    texts: dict[str, str] = {}
    for group in reversed(settings.__mro__):
        part = inspect.cleandoc(group.__doc__ or "").partition("Args:")[2].partition("Raises:")[0]
        name = ""
        for line in part.splitlines():
            found = re.match(r"^\s{4}(\w+): (.*)$", line)
            if found:
                name, texts[found[1]] = found[1], found[2]
            elif name and line.strip():
                texts[name] += " " + line.strip()
    return {name: _REGISTRY.sub(_names_in_registry, text) for name, text in texts.items()}


# Docstrings of settings that name a table of code; its names stand in the table alone.
_REGISTRY = re.compile(r"`(radixkv[\w.]+)\.(POLICIES|FORMATS)`(; checked when the engine is made)?\.")


def _names_in_registry(found: re.Match[str]) -> str:
    """`lru`, `lfu`, ... or FP8, MXFP4, ... in the place of the table that has them."""
    table = getattr(importlib.import_module(found[1]), found[2])
    if found[2] == "FORMATS":
        titles = (form.title.partition(",")[0] for form in table.values() if form.served is not None)
        return f"{', '.join(dict.fromkeys(titles))}."
    return f"{', '.join(f'`{name}`' for name in table)}."


def _in_users_words(text: str, flags: Mapping[str, str]) -> str:
    """The sentence of a setting for the command line: defaults and flags in the place of Python's words.

    >>> _in_users_words("KV blocks, see `kv_memory`; None: sized from memory.", {"kv_memory": "--kv-memory"})
    'KV blocks, see `--kv-memory`; default: sized from memory.'
    """
    text = re.sub(r"(; |^)None\b:", lambda found: f"{found[1]}{'default' if found[1] else 'Default'}:", text)
    text = re.sub(r"\bNone:", "Default:", text)
    return re.sub(
        r"`(\w+)`",
        lambda found: f"`{flags[found[1]].partition('/')[0]}`" if found[1] in flags else found[0],
        text,
    )


#: Settings that are written as texts with a unit.
_SIZES = ("kv_cache_memory", "state_memory", "window_memory")


def _type_of(name: str, annotation: str) -> Any:
    if name in _SIZES:
        return str | None
    if annotation == "tuple[str, ...]":
        return list[str] | None
    kinds = {"str": str, "int": int, "float": float, "bool": bool}
    optional = annotation.endswith("| None")
    kind = kinds[annotation.removesuffix("| None").strip()]
    return kind | None if optional else kind


def settings_parameters(
    settings: type, panel: str, *, renamed: Mapping[str, str], left_out: Sequence[str] = ()
) -> list[inspect.Parameter]:
    """Make a parameter of a command, an option of the field's name, for each field of a class of settings.

    Settings that have their place in a table of the configuration file get none.

    Args:
        panel: of the help text, for settings that `PANELS` does not name.
        renamed: field -> name of the option, where it is not the field's name.
        left_out: fields without an option.
    """
    flags = {
        item.name: renamed.get(item.name, "--" + item.name.replace("_", "-")) for item in fields(settings)
    }
    helps = {name: _in_users_words(text, flags) for name, text in setting_helps(settings).items()}
    parameters = []
    for item in fields(settings):
        if item.name in left_out or item.name in TABLE_OF:
            continue
        option = typer.Option(
            flags[item.name], help=helps[item.name], rich_help_panel=PANEL_OF.get(item.name, panel)
        )
        kind = _type_of(item.name, str(item.type))
        parameters.append(
            inspect.Parameter(
                item.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None if item.default == () else item.default,
                annotation=Annotated[kind, option],
            )
        )
    return parameters


def with_options(
    command: Callable[..., Any],
    replaced: str,
    make: Callable[..., Any],
    parameters: Sequence[inspect.Parameter] = (),
) -> Callable[..., Any]:
    """Return a command that takes `parameters` in the place of its own `replaced`; `make` makes one of these.

    A parameter that the command has as well, by its name, goes to both.

    Args:
        parameters: of `make`; none: as it declares them.
    """
    parameters = parameters or [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(make, eval_str=True).parameters.values()
    ]

    signature = inspect.signature(command, eval_str=True)
    own = {
        name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if name != replaced
    }
    merged = own | {parameter.name: parameter for parameter in parameters}

    @functools.wraps(command)
    def wrapper(**values: Any) -> Any:
        made = make(**{parameter.name: values[parameter.name] for parameter in parameters})
        return command(**{replaced: made}, **{name: values[name] for name in own})

    ordered = sorted(merged.values(), key=lambda parameter: parameter.kind)  # positional ones first
    wrapper.__signature__ = signature.replace(parameters=ordered)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
    return wrapper


_CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def settings_options(
    command: Callable[..., Any],
    replaced: str,
    make: Callable[..., Any],
    parameters: Sequence[inspect.Parameter],
) -> Callable[..., Any]:
    """Return a command with the options of a class of settings: `with_options`, and the file of `--config`.

    The settings that have no flag come from the file.
    """

    def make_with_entries(context: typer.Context, **given: Any) -> Any:
        return with_entries(context, make(**given))

    return with_options(command, replaced, make_with_entries, [_CONTEXT, *parameters])


def engine_options(command: Callable[..., Any], *, model_flag: bool = False) -> Callable[..., Any]:
    """Give a typer command a `model` argument, the engine's settings as options, and `--config`.

    The command must take `config: EngineConfig`; its other parameters stay as they are. To be registered with
    the class `BriefHelp`.

    Args:
        model_flag: the model is an option, `--model`: the command has arguments of its own.
    """
    helps = setting_helps(EngineConfig)
    options = settings_parameters(EngineConfig, ENGINE_PANEL, renamed=ENGINE_FLAGS, left_out=_NOT_OPTIONS)
    model = inspect.Parameter(
        "model",
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=EMBEDDED_MODEL,
        annotation=Annotated[
            str,
            typer.Option("--model", help=helps["model"], rich_help_panel="Model")
            if model_flag
            else typer.Argument(help=helps["model"], metavar="[MODEL]"),
        ],
    )
    return settings_options(command, "config", _make_config, [model, *options, CONFIG_FILE, HELP_ALL])


def _make_config(*, config_file: Path | None, help_all: bool, **settings: Any) -> EngineConfig:
    for name in _SIZES:
        if settings[name] is not None:
            settings[name] = parse_size(settings[name])
    for name in ("kv_tier", "lora"):
        settings[name] = tuple(settings[name] or ())
    if settings["chat_template"] is not None:
        settings["chat_template"] = _read_template(settings["chat_template"])
    config = EngineConfig(**settings)
    check_policies(config)
    return config


def _read_template(value: str) -> str:
    """A chat template as text: the content of the file of that name, or the value itself if it is Jinja."""
    if "{" in value:
        return value
    try:
        with open(value, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(
            f"--chat-template {value}: {error.strerror or error}; give a file or Jinja text"
        ) from error
