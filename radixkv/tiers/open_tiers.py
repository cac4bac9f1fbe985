"""From what `--kv-tier` says to a tier: the one place that knows every kind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from radixkv.tiers.disk.disk_tier import DiskTier
from radixkv.tiers.disk.folder import FolderLock
from radixkv.tiers.host import Allocate, HostTier
from radixkv.tiers.record import BlockKind
from radixkv.tiers.spec import TierSpec
from radixkv.tiers.stack import OpenTier, TierStack

_DISK_SIZE = "20GiB"  # where nothing is said


def check_tiers(specs: Sequence[TierSpec]) -> None:
    """Find out now, before a model is loaded, what will not work.

    Raises:
        ConfigError: see `open_tiers`.
    """
    for spec in specs:
        spec.number("long", 0)
        if spec.kind == "host":
            spec.size(spec.where)
        elif spec.kind == "disk":
            _disk_size(spec)
            FolderLock(_folder(spec)).release()


def open_tiers(specs: Sequence[TierSpec], kind: BlockKind, allocate: Allocate | None = None) -> TierStack:
    """Tiers for blocks of one kind, as one.

    Args:
        specs: at least one, the quickest first.
        allocate: memory that a GPU copies from and to.

    Raises:
        ConfigError: one can't be had, with the reason.
    """
    opened: list[OpenTier] = []
    try:
        opened.extend(_open(spec, kind, allocate) for spec in specs)
    except BaseException:
        for tier in opened:
            tier.close()
        raise
    return TierStack(opened)


def _open(spec: TierSpec, kind: BlockKind, allocate: Allocate | None) -> OpenTier:
    if spec.kind == "host":
        return HostTier(spec.size(spec.where), allocate, spec.selection)
    if spec.kind == "disk":
        return DiskTier(_folder(spec), _disk_size(spec), kind, selection=spec.selection)
    raise AssertionError(f"no such kind of tier: {spec.kind}")


def _folder(spec: TierSpec) -> Path:
    return Path(spec.where).expanduser()


def _disk_size(spec: TierSpec) -> int:
    return spec.size(spec.options.get("max", _DISK_SIZE))
