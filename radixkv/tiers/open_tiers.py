# SPDX-License-Identifier: Apache-2.0
"""Constructors of the tiers of `--kv-tier`, of every kind."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from radixkv.errors import ConfigError
from radixkv.tiers.disk.disk_tier import DiskTier
from radixkv.tiers.disk.folder import FolderLock
from radixkv.tiers.host_tier import Allocate, HostTier
from radixkv.tiers.record import BlockKind
from radixkv.tiers.redis.owner_keys import OwnerKeys
from radixkv.tiers.redis.redis_tier import RedisTier, make_client
from radixkv.tiers.spec import TierSpec
from radixkv.tiers.tier import OpenTier, TierStack

logger = logging.getLogger("radixkv")

#: Seconds that a block lives in Redis after its last use, without `ttl`.
DEFAULT_TTL_S = 24 * 3600
#: The longest lifetime that every Redis takes: 68 years.
MAX_TTL_S = 2**31 - 1
#: A shorter secret is refused.
MIN_SECRET_BYTES = 16
_DISK_SIZE = "20GiB"  # without `max`


def check_tiers(specs: Sequence[TierSpec]) -> None:
    """Check the tiers before a model is loaded.

    Raises:
        ConfigError: see `open_tiers`.
    """
    folders: set[Path] = set()
    for spec in specs:
        spec.number("long", 0)
        if spec.kind == "host":
            spec.size(spec.where)
        elif spec.kind == "disk":
            _disk_size(spec)
            folder = _folder(spec)
            _check_place(folder)
            FolderLock(folder).release()
            if folder.resolve() in folders:
                raise ConfigError(f"--kv-tier disk:{spec.where}: the folder is given twice; leave one out")
            folders.add(folder.resolve())
        else:
            make_client(_url(spec))
            secret, encrypts, _ = _redis_options(spec)
            OwnerKeys(BlockKind("", "", 1, 1), secret, encrypts=encrypts)


def open_tiers(
    specs: Sequence[TierSpec],
    kind: BlockKind,
    allocate: Allocate | None = None,
    states: BlockKind | None = None,
) -> TierStack:
    """Open tiers for blocks of one kind, joined into one.

    Args:
        specs: at least one, the quickest first.
        allocate: allocator of memory that a GPU copies from and to.
        states: the kind of the model's states; None: it has none.

    Raises:
        ConfigError: a tier can't be opened, with the reason.
    """
    opened: list[OpenTier] = []
    try:
        opened.extend(_open(spec, kind, allocate, states) for spec in specs)
    except BaseException:
        for tier in opened:
            tier.close()
        raise
    return TierStack(opened)


def _open(spec: TierSpec, kind: BlockKind, allocate: Allocate | None, states: BlockKind | None) -> OpenTier:
    if spec.kind == "host":
        return HostTier(spec.size(spec.where), allocate, spec.selection)
    if spec.kind == "disk":
        return DiskTier(_folder(spec), _disk_size(spec), kind, states=states, selection=spec.selection)
    secret, encrypts, ttl_s = _redis_options(spec)
    if not secret:
        logger.warning(
            "the K/V tier %s has no secret: who can read its keys and knows a tenant's name can tell whether "
            "a text that they guess is there; give secret=FILE, the same for all replicas",
            spec.kind,
        )
    owners = OwnerKeys(kind, secret, encrypts=encrypts, states=states)
    return RedisTier(_url(spec), kind, owners, ttl_s=ttl_s, states=states, selection=spec.selection)


def _url(spec: TierSpec) -> str:
    return f"{spec.kind}:{spec.where}"


def _redis_options(spec: TierSpec) -> tuple[bytes, bool, int]:
    """Return the secret, whether records are encrypted, and their lifetime."""
    secret, path = b"", spec.options.get("secret")
    if path is not None:
        try:
            secret = Path(path).expanduser().read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"--kv-tier {spec.kind}: secret={path}: {error.strerror or error}") from None
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"--kv-tier {spec.kind}: the secret in {path} has {len(secret)} bytes; give it at least "
                f"{MIN_SECRET_BYTES}, as from `openssl rand -hex 32`"
            )
    encrypt = spec.options.get("encrypt", "off")
    if encrypt not in ("on", "off"):
        raise ConfigError(f"--kv-tier {spec.kind}: encrypt must be on or off, not {encrypt!r}")
    ttl_s = spec.number("ttl", DEFAULT_TTL_S)
    if not 1 <= ttl_s <= MAX_TTL_S:
        raise ConfigError(f"--kv-tier {spec.kind}: ttl must be 1 to {MAX_TTL_S} seconds, not {ttl_s}")
    return secret, encrypt == "on", ttl_s


def _folder(spec: TierSpec) -> Path:
    try:
        return Path(spec.where).expanduser()
    except RuntimeError:
        raise ConfigError(f"--kv-tier disk:{spec.where}: no such user; write the whole path") from None


def _check_place(folder: Path) -> None:
    """Refuse a folder below one of the root that isn't there: a slip of the pen, or a disk not mounted."""
    top = Path(*folder.absolute().parts[:2])
    if folder.absolute() != top and not top.exists():
        raise ConfigError(
            f"--kv-tier disk:{folder}: there is no {top}; correct the path, or make {folder.parent} first"
        )


def _disk_size(spec: TierSpec) -> int:
    return spec.size(spec.options.get("max", _DISK_SIZE))
