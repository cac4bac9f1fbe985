# SPDX-License-Identifier: Apache-2.0
"""The configuration file of `radixkv serve`: TOML with the names of the flags, which win over it."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperArgument, TyperOption

from radixkv.errors import ConfigError

Parameter = TyperArgument | TyperOption

SECTIONS = ("server", "engine")


def take_config_file(context: typer.Context, path: Path | None) -> Path | None:
    """Make the values of a file the defaults of a command's options; called before they are read.

    Raises:
        ConfigError: the file can't be read, is no TOML, or has a name or a value that no option takes.
    """
    if path is not None:
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"--config {path}: {getattr(error, 'strerror', None) or error}") from error
        try:
            context.default_map = dict(_defaults(context, tables))
        except ConfigError as error:
            raise ConfigError(f"--config {path}: {error}") from error
    return path


def _defaults(context: typer.Context, tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Parameter -> value, for each name in the file."""
    params = [p for p in context.command.params if isinstance(p, TyperArgument | TyperOption)]
    known = {name: param for param in params for name in _names(param)}
    seen: dict[str, str] = {}
    for where, name, value in _flat(tables):
        param = known.get(name.replace("_", "-"))
        if param is None:
            near = difflib.get_close_matches(name.replace("_", "-"), known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "the names are those of the flags"
            raise ConfigError(f"{where}{name} is not known; {hint}")
        assert param.name is not None
        if param.name in seen:
            raise ConfigError(f"{where}{name} and {seen[param.name]} say the same twice")
        seen[param.name] = where + name
        yield param.name, _written(context, param, where + name, value)


def _names(param: Parameter) -> list[str]:
    """Return the name of an option or argument in a file: its flag, without the dashes."""
    if isinstance(param, TyperArgument):
        return [str(param.name)]
    return [flag[2:] for flag in param.opts if flag.startswith("--") and flag not in ("--config", "--help")]


def _flat(tables: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The section, as `[server] ` or empty, the name and the value of each entry."""
    for name, value in tables.items():
        if name in SECTIONS and isinstance(value, dict):
            for inner, inner_value in value.items():
                yield f"[{name}] ", inner, inner_value
        else:
            yield "", name, value


def _written(context: typer.Context, param: Parameter, where: str, value: Any) -> Any:
    """A value as the flag would have it; the flag's own type checks the rest."""
    if param.multiple:
        if isinstance(value, dict):  # [namespace-weight] ada = 3
            return [f"{name}={number}" for name, number in value.items()]
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"{where} must be a text or a list of texts, not {value!r}")
        return texts
    is_flag = isinstance(param, TyperOption) and param.is_flag
    if is_flag is not isinstance(value, bool) or isinstance(value, dict | list):
        expected = "true or false" if is_flag else "one value"
        raise ConfigError(f"{where} must be {expected}, not {value!r}")
    try:
        return param.process_value(context, value if is_flag else str(value))
    except typer.BadParameter as error:
        raise ConfigError(f"{where} = {value!r}: {error.message}") from error
