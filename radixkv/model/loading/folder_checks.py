# SPDX-License-Identifier: Apache-2.0
"""Checks of a model folder before anything in it is read: it must be whole, and made of its own files."""

from __future__ import annotations

import os
from pathlib import Path

from radixkv.errors import ModelLoadError
from radixkv.model.loading.weight_files import StoredTensor, stored_tensors, weight_files

#: Files of a folder that are read, here or by transformers.
_SUFFIXES = frozenset({".json", ".safetensors", ".jinja", ".txt", ".model", ".py"})
_MORE_TEMPLATES = "additional_chat_templates"


def check_folder(folder: Path, *, weights: bool = True) -> dict[str, StoredTensor]:
    """Refuse a folder that is not whole, or that reads files from elsewhere through links.

    A link in a model from elsewhere could make any file of this machine a chat template, say. Links into the
    hub's cache are its own client's.

    Args:
        weights: its weights are needed, too.

    Returns:
        The tensors of its weight files by name; none without `weights`.

    Raises:
        ModelLoadError: a file is missing, damaged, or a link that leaves the folder.
    """
    try:
        paths = [path for path in folder.iterdir() if path.suffix in _SUFFIXES]
        paths += (folder / _MORE_TEMPLATES).glob("*")
    except OSError as error:
        raise ModelLoadError(f"{folder} can't be read: {error.strerror or error}.") from error
    check_links(folder, paths)
    if not weights:
        return {}
    check_links(folder, weight_files(folder))
    return stored_tensors(folder)


def check_links(folder: Path, paths: list[Path]) -> None:
    """Refuse pipes, devices, and links that leave their folder; the hub's client links into its cache.

    Raises:
        ModelLoadError: names the file, or the link and its target.
    """
    own = Path(os.path.realpath(folder))
    for path in paths:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file() and not target.is_dir():
            raise ModelLoadError(
                f"{path} is no regular file but a pipe or a device: whoever reads it may wait for good."
            )
        if not target.is_relative_to(own) and not _is_hub_blob(target):
            raise ModelLoadError(
                f"{path} is a link to {target}, outside its model's folder. A model from elsewhere could "
                "read files of this machine that way; if the link is yours, put the file itself in its place."
            )


def _is_hub_blob(path: Path) -> bool:
    """Return True for a path in the hub client's store of model files: `models--owner--name/blobs/`."""
    return path.parent.name == "blobs" and path.parent.parent.name.startswith("models--")
