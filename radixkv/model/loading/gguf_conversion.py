# SPDX-License-Identifier: Apache-2.0
"""GGUF files through transformers: check one, and convert one into safetensors and tokenizer files."""

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
from radixkv.model.loading.gguf_header import check_header
from radixkv.model.loading.gguf_parsing import gguf_parsed_once
from radixkv.model.loading.load_progress import counted_tensors, progress_bar

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
    with contextlib.suppress(ImportError):  # without the gguf package, transformers says what is missing
        check_header(path)


def convert_gguf(source: Path, target: Path, *, show_progress: bool = True) -> None:
    """Write the model in `source` to the existing folder `target` as plain transformers files, float32.

    The weights are exactly what transformers dequantises from the GGUF file; tied weights are stored once.
    The folder then loads with plain `from_pretrained`, in seconds and without the gguf package.

    Raises:
        OSError: the target can't be written (full disk, permissions).
        ModelLoadError: transformers can't read the file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

    from radixkv.model.loading.quiet_transformers import quiet_transformers

    folder, name = str(source.parent), source.name
    with (
        progress_bar("Dequantising the weights", 100, unit="percent", show=show_progress) as update,
        quiet_transformers(),
        gguf_parsed_once(),
    ):
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, trust_remote_code=False)
            update(20)
            with counted_tensors(modeling_gguf_pytorch_utils, lambda share: update(20 + 75 * share)):
                model = AutoModelForCausalLM.from_pretrained(
                    folder, gguf_file=name, dtype=torch.float32, trust_remote_code=False
                )
        except OSError as error:
            if error.errno is not None:
                raise
            raise _unreadable(source, error) from error
        except Exception as error:
            raise _unreadable(source, error) from error

    config = model.config
    align_special_tokens(tokenizer, config)
    if hasattr(config, "quantization_config"):  # the saved weights are plain float32
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config._name_or_path = ""
    config.save_pretrained(target)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _write_weights(_untied_state(model), target / "model.safetensors", show_progress)


def align_special_tokens(tokenizer: Any, config: Any) -> None:
    """Give a tokenizer read from GGUF the begin, end and padding tokens that the file names.

    The configuration has them right; the tokenizer has another end token in some versions of transformers.
    """
    for name in ("bos", "eos", "pad"):
        token = getattr(config, f"{name}_token_id", None)
        if isinstance(token, int) and token < len(tokenizer):
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token))


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
    from safetensors import SafetensorError
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


def _unreadable(source: Path, error: Exception) -> ModelLoadError:
    detail = " ".join(str(error).split())[:300]
    return ModelLoadError(
        f"transformers can't read the GGUF file {source} ({type(error).__name__}: {detail}). The file may be "
        "damaged, or its architecture or quantisation may be unknown to the installed transformers and gguf."
    )
