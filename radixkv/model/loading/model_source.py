# SPDX-License-Identifier: Apache-2.0
"""From a model's name to its files on this machine: embedded name, GGUF file, folder or hub id."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from radixkv.errors import ModelLoadError
from radixkv.model.loading.embedded_model import EMBEDDED_MODELS, find_embedded, prepare_embedded
from radixkv.model.loading.gguf_conversion import check_gguf
from radixkv.model.loading.gguf_parts import name_of, parts_of

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
#: Files fetched from a hub repository: its top level only, and no pickles (they can run code).
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Location of a model's files.

    Attributes:
        name: what clients call the model.
        folder: the folder that holds its files.
        gguf_file: name of the GGUF file in it (of the first part), or None for a folder of safetensors.
    """

    name: str
    folder: Path
    gguf_file: str | None = None

    @property
    def path(self) -> Path:
        """The GGUF file, or the folder."""
        return self.folder if self.gguf_file is None else self.folder / self.gguf_file


def resolve_model(
    name: str, *, allow_download: bool = True, show_progress: bool = True, with_code: bool = False
) -> ModelSource:
    """Turn a model's name into files on this machine, fetching them where needed and allowed.

    Tried in this order: embedded model, GGUF file, folder, hub id. A file or folder that is a link goes by
    the name of the link.

    Args:
        with_code: fetch a hub repository's Python files, too.

    Raises:
        ModelLoadError: none of them.
    """
    embedded = find_embedded(name)
    if embedded is not None:
        folder = prepare_embedded(embedded, allow_download=allow_download, show_progress=show_progress)
        return ModelSource(embedded.name, folder)
    path = _as_path(name)
    if path.is_file():
        parts = parts_of(path)
        for part in parts:
            check_gguf(part)
        return ModelSource(name_of(path), path.parent.resolve(), parts[0].name)
    if path.is_dir():
        own = path.name if path.name not in ("", "..") else path.resolve().name
        return ModelSource(own or "model", path.resolve())
    if name.lower().endswith(".gguf") or not _HUB_ID.fullmatch(name) or ".." in name:
        raise ModelLoadError(f"There is no file or folder {name}.{_suggestion(name)}")
    return ModelSource(name, _fetch_from_hub(name, allow_download, show_progress, with_code))


def is_on_hub(name: str) -> bool:
    """Return True for a name that `resolve_model` would look up on the hub."""
    is_id = _HUB_ID.fullmatch(name) is not None and ".." not in name and not name.lower().endswith(".gguf")
    return is_id and find_embedded(name) is None and not _as_path(name).exists()


def _as_path(name: str) -> Path:
    try:
        path = Path(name).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, RuntimeError) as error:  # too long, no permission, NUL, no such ~user
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        shown = name if len(name) <= 80 else f"{name[:80]}..."
        raise ModelLoadError(f"There is no model {shown!r}: {reason}.{_suggestion('')}") from error
    return path


def _suggestion(name: str) -> str:
    known = [model.name for model in EMBEDDED_MODELS]
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f" Did you mean the embedded model {close[0]}?" if close else ""
    return f"{hint} A model is an embedded one ({', '.join(known)}), a folder, a .gguf file or a hub id."


def _fetch_from_hub(name: str, allow_download: bool, show_progress: bool, with_code: bool) -> Path:
    from huggingface_hub import errors, snapshot_download  # slow to import
    from huggingface_hub.utils import disable_progress_bars

    if not show_progress:
        disable_progress_bars()
    if "/" not in name and difflib.get_close_matches(
        name.lower(), [m.name for m in EMBEDDED_MODELS], cutoff=0.8
    ):
        raise ModelLoadError(f"There is no model {name}.{_suggestion(name)}")
    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=[*_HUB_FILES, *(["*.py"] if with_code else [])],
                ignore_patterns=["*/*"],
                local_files_only=not allow_download,
            )
        )
    except errors.GatedRepoError as error:
        raise ModelLoadError(
            f"The hub holds {name}, but access to it must be granted: accept its terms on its page, then log "
            "in with `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"There is no model {name} on the hub (or it is private: log in with `hf auth login` or set "
            f"HF_TOKEN).{_suggestion(name)}"
        ) from error
    except OSError as error:
        raise _hub_failure(name, error, allow_download) from error
    except Exception as error:  # HTTP libraries raise their own kinds
        raise _hub_failure(name, error, allow_download) from error


def _hub_failure(name: str, error: Exception, allow_download: bool) -> ModelLoadError:
    if not allow_download or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        reason = "downloads are switched off"
    else:
        cause: BaseException = error
        while cause.__cause__ is not None or cause.__context__ is not None:
            cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
        reason = f"the hub can't be reached ({' '.join(str(cause).split())[:200] or type(cause).__name__})"
    return ModelLoadError(
        f"{name} is neither a file nor a folder nor in the local hub cache, and {reason}. Check the name and "
        f"the connection (HF_ENDPOINT and proxy settings are respected), or give a folder.{_suggestion(name)}"
    )
