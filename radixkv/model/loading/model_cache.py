# SPDX-License-Identifier: Apache-2.0
"""Folder of prepared models, and the manifest that proves a prepared folder whole.

A prepared model is a folder with a `manifest.json` that lists every file with its size and checksum. The
folder is built under a temporary name, its manifest is written last, and it takes its final name by one
rename: a folder that is half-written or damaged either has no manifest or does not agree with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import xxhash

from radixkv.errors import ModelLoadError

MANIFEST = "manifest.json"


def cache_home() -> Path:
    """radixkv's cache folder: `$RADIXKV_CACHE`, `$XDG_CACHE_HOME/radixkv` or `~/.cache/radixkv`."""
    if own := os.environ.get("RADIXKV_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says to ignore relative paths.
    if base and Path(base).is_absolute():
        return Path(base) / "radixkv"
    try:
        return Path.home() / ".cache" / "radixkv"
    except RuntimeError as error:  # a user without an entry and without HOME, as in some containers
        raise ModelLoadError(
            "There is no home folder to keep models in; set RADIXKV_CACHE to a writable folder."
        ) from error


def models_folder() -> Path:
    """The folder that holds prepared models (not necessarily there yet)."""
    return cache_home() / "models"


def file_checksum(path: Path) -> str:
    """XXH3-128 of a file as hex digits. It detects damage, not forgery, at about the speed of memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def write_manifest(folder: Path, facts: dict[str, object]) -> None:
    """Record every file of `folder` with size and checksum, and `facts`; flushed to disk, written last.

    Files are flushed first, so that a manifest that survived a power cut vouches for files that did too.
    """
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            _flush(path)
            files[path.relative_to(folder).as_posix()] = {
                "size": path.stat().st_size,
                "xxh3_128": file_checksum(path),
            }
    target = folder / MANIFEST
    with target.open("w", encoding="utf-8") as file:
        json.dump({**facts, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def folder_damage(folder: Path, facts: dict[str, object]) -> str | None:
    """Return the reason why a prepared folder can't be used; None: it is whole.

    Reads every file once (about 0.2 s per GB from memory); for weights that is work which loading them
    repeats from the page cache anyway.

    Args:
        facts: entries of the manifest besides its files (source checksum, format version).
    """
    if not folder.is_dir():
        return "it is not there"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, dict[str, object]] = dict(manifest["files"])
        for name, value in facts.items():
            if manifest.get(name) != value:
                return f"it was made from another {name}"
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"its {MANIFEST} can't be read"
    try:
        # Sizes first: they find a truncated file without reading gigabytes.
        for name, entry in files.items():
            if (folder / name).stat().st_size != entry["size"]:
                return f"{name} has the wrong size"
        for name, entry in files.items():
            if file_checksum(folder / name) != entry["xxh3_128"]:
                return f"{name} has the wrong checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, KeyError, TypeError, AttributeError) as error:
        return f"it can't be read ({error})"
    return None


def replace_folder(new: Path, target: Path) -> None:
    """Give the finished folder `new` the name `target`, removing what stood there. Call it under the lock."""
    if target.is_symlink() or target.is_file():
        target.unlink()
    elif target.exists():
        old = new.with_name(new.name + ".old")
        target.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    new.rename(target)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
