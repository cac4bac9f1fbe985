# SPDX-License-Identifier: Apache-2.0
"""GGUF files: check one, and convert one into the folder of a model."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.errors import ModelLoadError
from radixkv.model.loading.gguf_configs import config_of
from radixkv.model.loading.gguf_file import open_gguf
from radixkv.model.loading.gguf_header import check_header
from radixkv.model.loading.load_progress import progress_bar

if TYPE_CHECKING:
    import torch

_GGUF_MAGIC = b"GGUF"


def check_gguf(path: Path) -> None:
    """Refuse a file that is not GGUF, is cut off, or whose header contradicts itself.

    Raises:
        ModelLoadError: not readable, not GGUF, or damaged.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelLoadError(f"{path} can't be read: {error.strerror or error}.") from error
    if magic != _GGUF_MAGIC:
        raise ModelLoadError(
            f"{path} is not a GGUF file (it does not start with the letters GGUF); it may be damaged or a "
            "failed download. Fetch it again, or give the folder of a model in safetensors format."
        )
    with contextlib.suppress(ImportError):  # without the gguf package, it is said later what is missing
        check_header(path)


def convert_gguf(source: Path, target: Path, *, show_progress: bool = True) -> None:
    """Write the model in `source` to the existing folder `target` as plain transformers files, float32.

    Tied weights are stored once. The folder then loads with plain `from_pretrained`, in seconds and without
    the gguf package.

    Raises:
        OSError: the target can't be written (full disk, permissions).
        ModelLoadError: the file can't be read.
    """
    import torch  # heavy

    from radixkv.model.loading.gguf_blocks import load_gguf
    from radixkv.model.loading.gguf_tokenizer import tokenizer_of
    from radixkv.model.loading.quiet_transformers import quiet_transformers

    with quiet_transformers():
        try:
            file = open_gguf(source)
            tokenizer = tokenizer_of(file)
            model = load_gguf(
                file, config_of(file), "eager", dtype=torch.float32, show_progress=show_progress
            )
        except (ModelLoadError, OSError):
            raise
        except Exception as error:  # damaged files surface as any kind of error
            detail = " ".join(str(error).split())[:300]
            raise ModelLoadError(
                f"The GGUF file {source} can't be read ({type(error).__name__}: {detail}). It may be damaged."
            ) from error

    config = model.config
    config.architectures = [type(model).__name__]
    config.save_pretrained(target)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _write_weights(_untied_state(model), target / "model.safetensors", show_progress)


def _untied_state(model: Any) -> dict[str, torch.Tensor]:
    """The model's tensors without the second name of a tied one."""
    state: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        state[name] = tensor.detach().contiguous()
    return state


def _write_weights(state: dict[str, torch.Tensor], path: Path, show_progress: bool) -> None:
    from safetensors import SafetensorError  # heavy
    from safetensors.torch import save_file

    total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    with progress_bar("Writing the weights", total, show=show_progress) as update, _watch_size(path, update):
        try:
            save_file(state, path, metadata={"format": "pt"})
        except SafetensorError as error:  # holds the operating system's error in its text
            found = re.search(r"os error (\d+)", str(error))
            number = int(found[1]) if found else errno.EIO
            raise OSError(number, os.strerror(number), str(path)) from error
    path.chmod(0o644)


@contextmanager
def _watch_size(path: Path, report: Callable[[float], None]) -> Iterator[None]:
    """Report the size of a file that another function is writing, ten times a second."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            # Some writers work under a temporary name next to the final one.
            sizes = [entry.stat().st_size for entry in path.parent.iterdir() if entry.is_file()]
            report(max(sizes, default=0))

    thread = threading.Thread(target=watch, name="radixkv-write-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
