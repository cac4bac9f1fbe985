# SPDX-License-Identifier: Apache-2.0
"""Notation of tiers: `disk:PATH,max=20GiB`, `host:4GiB`, `redis://HOST:PORT/0,ttl=3600`.

    KIND:WHERE[,OPTION=VALUE...]

The place may contain commas and colons, so options are taken from the end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from radixkv.engine.config import parse_size
from radixkv.errors import ConfigError
from radixkv.tiers.selection import LONG_TOKENS, Selection

_REDIS = ("secret", "encrypt", "ttl")
#: Kind -> form of its spec, and its options.
_KINDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "host": ("host:SIZE, as host:4GiB", ()),
    "redis": ("redis://HOST:PORT/DATABASE[,secret=FILE][,encrypt=on][,ttl=SECONDS]", _REDIS),
    "rediss": ("rediss://USER:PASSWORD@HOST:PORT (TLS)", _REDIS),
    "unix": ("unix:///SOCKET?db=NUMBER (Redis)", _REDIS),
    "disk": ("disk:PATH[,max=SIZE], as disk:/var/cache/radixkv,max=20GiB", ("max",)),
}
#: Options that all kinds take.
_COMMON = ("long",)
_OPTION = re.compile(r",([a-z_]+)=([^,]*)$")


@dataclass(frozen=True, slots=True)
class TierSpec:
    """Requested tier.

    Attributes:
        kind: kind of the tier, such as `disk`.
        where: path, size or address after the kind, without the options.
        options: option -> value.
    """

    kind: str
    where: str
    options: Mapping[str, str]

    def number(self, option: str, default: int) -> int:
        """Parse an option's value, an integer of at least 0.

        Raises:
            ConfigError: the value is something else.
        """
        text = self.options.get(option)
        if text is None:
            return default
        if not (text.isascii() and text.isdecimal()):
            raise ConfigError(
                f"--kv-tier {self.kind}: {option} must be an integer of at least 0, not {text!r}"
            )
        return int(text)

    @property
    def selection(self) -> Selection:
        """Selection of saved blocks: a text of `long` tokens is saved at its first use; 0: all are.

        Raises:
            ConfigError: the value of `long` is no integer.
        """
        return Selection(self.number("long", LONG_TOKENS))

    def size(self, text: str) -> int:
        """Parse a size in bytes in `text`, a part of this spec.

        Raises:
            ConfigError: it is no size, or zero.
        """
        try:
            size = parse_size(text)
        except ConfigError as error:
            raise ConfigError(f"--kv-tier {self.kind}: {error}") from None
        if not size:
            raise ConfigError(f"--kv-tier {self.kind}: a size of {text} holds nothing")
        return size


def parse_tiers(texts: Sequence[str]) -> list[TierSpec]:
    """Parse the values of `--kv-tier`.

    Raises:
        ConfigError: unknown kind or option, an option twice or without a value, or no place.
    """
    return [_parse(text) for text in texts]


def _parse(text: str) -> TierSpec:
    kind, colon, where = text.partition(":")
    known = ", or ".join(form for form, _ in _KINDS.values())
    if not colon and kind in _KINDS:
        raise ConfigError(f"--kv-tier {kind}: it says nothing after {kind}; write {_KINDS[kind][0]}")
    if kind not in _KINDS:
        raise ConfigError(f"--kv-tier {text[:80]!r}: {kind[:80]!r} is no kind of tier; write {known}")
    form, names = _KINDS[kind]
    options: dict[str, str] = {}
    while found := _OPTION.search(where):
        name, value = found.groups()
        if name not in (*names, *_COMMON):
            expected = ", ".join((*names, *_COMMON))
            raise ConfigError(f"--kv-tier {kind}: option {name!r} is not known; it takes {expected} ({form})")
        if name in options:
            raise ConfigError(f"--kv-tier {kind}: option {name!r} is given twice")
        options[name] = value
        where = where[: found.start()]
    if not where.strip():
        raise ConfigError(f"--kv-tier {text[:80]!r} says nothing after {kind}; write {form}")
    # Else a slip of the pen would be the name of a folder.
    last = where.rpartition(",")[2].partition("=")[0].strip().lower() if "," in where else None
    if last is not None and last in ("", *names, *_COMMON):
        raise ConfigError(
            f"--kv-tier {text[:80]!r}: what follows the last comma of {where[:80]!r} is no option; "
            f"write {form}, in lower case and without spaces"
        )
    return TierSpec(kind, where, options)
