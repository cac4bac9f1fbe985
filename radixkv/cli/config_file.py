# SPDX-License-Identifier: Apache-2.0
"""The configuration file of `--config`: TOML with the names of flags and of settings without one.

Flags win over the file. Settings without a flag, most of them limits, are set there alone. A command without
a server reads the file of `radixkv serve` as well: of the tables for servers it takes the engine's settings.
"""

from __future__ import annotations

import difflib
import inspect
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperArgument, TyperOption

from radixkv.errors import ConfigError
from radixkv.option_names import TABLE_OF, TABLES

Parameter = TyperArgument | TyperOption
Settings = TypeVar("Settings")

#: Tables of the settings that only `radixkv serve` has flags for.
_SERVER_TABLES = ("server", "limits", "replicas")

#: Key in a context's `meta` of the entries without a flag: setting -> its place in the file, and its value.
_ENTRIES = "radixkv: entries of the configuration file"

#: Type of a setting -> the types of TOML that it takes, and their name.
_TOML_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "an integer"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "a text"),
    "Mapping[str, float]": ((dict,), "a table"),
}


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
            defaults = dict(_defaults(context, tables))
        except ConfigError as error:
            raise ConfigError(f"--config {path}: {error}") from error
        context.meta[_ENTRIES] = {
            name: (f"--config {path}: {name}", defaults.pop(name)) for name in TABLE_OF if name in defaults
        }
        context.default_map = defaults
    return path


def with_entries(context: typer.Context, settings: Settings) -> Settings:
    """Return a command's settings with the file's entries for those that have no flag.

    Args:
        settings: a dataclass, as the flags made it.

    Raises:
        ConfigError: an entry is of another type than its setting, or out of its range.
    """
    changes = {}
    for item in fields(settings):  # type: ignore[arg-type]
        if item.name in context.meta.get(_ENTRIES, {}):
            where, value = context.meta[_ENTRIES][item.name]
            types, expected = _TOML_TYPES[str(item.type).removesuffix(" | None")]
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise ConfigError(f"{where} must be {expected}, not {value!r}")
            changes[item.name] = value
    return replace(settings, **changes)  # type: ignore[type-var]


#: The parameter of the file, for commands with settings.
CONFIG_FILE = inspect.Parameter(
    "config_file",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            "--config",
            callback=take_config_file,
            is_eager=True,
            metavar="FILE",
            help="TOML with the names of these flags, and with settings that have none; flags win.",
        ),
    ],
)


def _defaults(context: typer.Context, tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Parameter or setting -> value, for each name in the file."""
    params = [p for p in context.command.params if isinstance(p, TyperArgument | TyperOption)]
    flags = {name: param for param in params for name in _names(param)}
    known = {**dict.fromkeys(name.replace("_", "-") for name in TABLE_OF), **flags}
    has_server = "port" in flags
    seen: dict[str, str] = {}
    for table, written, value in _flat(tables):
        name, where = written.replace("_", "-"), f"[{table}] " if table else ""
        if name not in known:
            if table in _SERVER_TABLES and not has_server:
                continue
            near = difflib.get_close_matches(name, known, n=3)
            hint = (
                f"did you mean {' or '.join(near)}?" if near else "the names are those of flags and settings"
            )
            if not has_server:
                hint += f" (settings of a server are left to it in the tables {', '.join(_SERVER_TABLES)})"
            raise ConfigError(f"{where}{written} is not known; {hint}")
        param = flags.get(name)
        target = str(param.name) if param else name.replace("-", "_")
        if target in seen:
            raise ConfigError(f"{where}{written} and {seen[target]} say the same twice")
        seen[target] = where + written
        yield target, _written(context, param, where + written, value) if param else value


def _names(param: Parameter) -> list[str]:
    """Return the name of an option or argument in a file: its flag, without the dashes."""
    if isinstance(param, TyperArgument):
        return [str(param.name)]
    return [flag[2:] for flag in param.opts if flag.startswith("--") and flag not in ("--config", "--help")]


def _flat(tables: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield the table (empty: none), the name and the value of each entry."""
    for name, value in tables.items():
        if name in TABLES and isinstance(value, dict):
            for inner, inner_value in value.items():
                yield name, inner, inner_value
        else:
            yield "", name, value


def _written(context: typer.Context, param: Parameter, where: str, value: Any) -> Any:
    """A value as the flag would have it; the flag's own type checks the rest."""
    if param.multiple:
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
