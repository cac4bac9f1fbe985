"""Engine settings as command-line options: one table, made from `EngineConfig`, used by every command.

The help text of an option is the setting's paragraph in `EngineConfig`'s docstring, so the two can't differ.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any

import typer

from radixkv.config import EngineConfig
from radixkv.errors import ConfigError

_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}

# Settings that are not options under their own name.
_NOT_OPTIONS = {"model"}
_RENAMED = {
    "enable_prefix_caching": "--prefix-caching/--no-prefix-caching",
    "share_prefix_attention": "--share-prefix-attention/--no-share-prefix-attention",
    "deterministic": "--deterministic/--no-deterministic",
    "allow_download": "--download/--no-download",
    "trust_remote_code": "--trust-remote-code",
    "restart_engine": "--restart-engine/--no-restart-engine",
    "request_timeout_s": "--request-timeout",
    "namespace_weights": "--namespace-weight",
}


def parse_size(text: str) -> int:
    """Bytes from `2g`, `512MiB`, `1.5 GB` or a plain number; units are powers of 1024.

    >>> parse_size("2g"), parse_size("1.5MiB"), parse_size("4096")
    (2147483648, 1572864, 4096)

    Raises:
        ConfigError: not a size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text, re.IGNORECASE)
    if found is None:
        raise ConfigError(f"{text!r} is not a size; write bytes, or a number with k, m, g or t (as 2g)")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def parse_weights(texts: Sequence[str]) -> dict[str, float]:
    """Weights from `NAME=WEIGHT` for each.

    >>> parse_weights(["ada=3", "bob=0.5"])
    {'ada': 3.0, 'bob': 0.5}

    Raises:
        ConfigError: not of that form, or a name twice.
    """
    weights: dict[str, float] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            weight = float(value)
        except ValueError:
            weight = 0.0
        if not name or not 0 < weight < float("inf") or name in weights:
            raise ConfigError(f"--namespace-weight {text}: write NAME=WEIGHT once per name, as ada=3")
        weights[name] = weight
    return weights


#: The panel of `--help` that lists the engine's settings.
ENGINE_PANEL = "Engine"


def setting_helps(settings: type) -> dict[str, str]:
    """Setting -> its sentence in the docstring of a class of settings."""
    documentation = inspect.getdoc(settings) or ""
    part = documentation.split("Args:", 1)[1].split("Raises:", 1)[0]
    texts: dict[str, str] = {}
    name = ""
    for line in part.splitlines():
        found = re.match(r"^\s{4}(\w+): (.*)$", line)
        if found:
            name, texts[found[1]] = found[1], found[2]
        elif name and line.strip():
            texts[name] += " " + line.strip()
    return texts


def _type_of(name: str) -> Any:
    if name == "kv_cache_memory":
        return str | None
    if name == "namespace_weights":
        return list[str] | None
    kinds = {"str": str, "int": int, "float": float, "bool": bool}
    annotation = str({field.name: field.type for field in fields(EngineConfig)}[name])
    optional = annotation.endswith("| None")
    kind = kinds[annotation.removesuffix("| None").strip()]
    return kind | None if optional else kind


def engine_options(command: Callable[..., Any], *, model_flag: bool = False) -> Callable[..., Any]:
    """Give a typer command a `model` argument and every engine setting as an option.

    The command must take `config: EngineConfig`; its other parameters stay as they are.

    Args:
        model_flag: the model is an option, `--model`: the command has arguments of its own.
    """
    helps = setting_helps(EngineConfig)
    names = [field.name for field in fields(EngineConfig) if field.name not in _NOT_OPTIONS]
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    model = inspect.Parameter(
        "model",
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=defaults["model"],
        annotation=Annotated[
            str,
            typer.Option("--model", help=helps["model"], rich_help_panel=ENGINE_PANEL)
            if model_flag
            else typer.Argument(help=helps["model"], metavar="[MODEL]"),
        ],
    )
    options = []
    for name in names:
        flag = _RENAMED.get(name, "--" + name.replace("_", "-"))
        option = typer.Option(flag, help=helps[name], rich_help_panel=ENGINE_PANEL)
        options.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults[name],
                annotation=Annotated[_type_of(name), option],
            )
        )
    signature = inspect.signature(command, eval_str=True)
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
        if parameter.name != "config"
    ]

    @functools.wraps(command)
    def wrapper(**values: Any) -> Any:
        settings = {name: values.pop(name) for name in names}
        if settings["kv_cache_memory"] is not None:
            settings["kv_cache_memory"] = parse_size(settings["kv_cache_memory"])
        if settings["namespace_weights"] is not None:
            settings["namespace_weights"] = parse_weights(settings["namespace_weights"]) or None
        if settings["chat_template"] is not None:
            settings["chat_template"] = _read_template(settings["chat_template"])
        return command(config=EngineConfig(model=values.pop("model"), **settings), **values)

    wrapper.__signature__ = signature.replace(parameters=[model, *own, *options])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in (model, *own, *options)}
    return wrapper


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
