# SPDX-License-Identifier: Apache-2.0
"""Errors for flags that no command has: settings of the configuration file, and names of other engines."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from radixkv.errors import ConfigError
from radixkv.option_names import ENGINE_NAMES, TABLE_OF, as_flag, place_of


def refuse_unknown_flags(arguments: Sequence[str], known: Collection[str]) -> None:
    """Refuse a flag that is no option of a command, where its replacement is known.

    Args:
        arguments: of the command line.
        known: the command's own options.

    Raises:
        ConfigError: names the flag, and its place in the configuration file or its name here.
    """
    for argument in arguments:
        if argument == "--":
            return
        flag = argument.partition("=")[0].replace("_", "-")
        if not flag.startswith("-") or flag in known:
            continue
        name = flag.lstrip("-").replace("-", "_")
        # Before settings were in tables, flags of times and weights lacked the last letters.
        for setting in (part + end for part in (name, name.removeprefix("no_")) for end in ("", "_s", "s")):
            if setting in TABLE_OF:
                raise ConfigError(f"{flag} is no flag: set {setting} in the {place_of(setting)}")
        if name in ENGINE_NAMES:
            raise ConfigError(f"{flag} is a flag of other engines; {as_flag(ENGINE_NAMES[name])}")
