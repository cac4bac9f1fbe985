# SPDX-License-Identifier: Apache-2.0
"""A GGUF file of blocks out of a folder of safetensors.

1. each parameter's tensors are named, and its reordering is undone (`gguf_source`)
2. the configuration must survive: every setting that matters is read back from what will be written
3. sizes and tokenizer, then the tensors, are written to a file beside the target
4. the file gets its name
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from radixkv.errors import ConfigError, ModelLoadError
from radixkv.model.loading.load_progress import progress_bar
from radixkv.model.loading.quiet_transformers import quiet_transformers
from radixkv.model.quantize.block_rounding import Rounding
from radixkv.model.quantize.gguf_sizes import KNOWN, add_sizes, architecture_of, lost_settings
from radixkv.model.quantize.gguf_source import GGUFSource
from radixkv.model.quantize.gguf_tokenizer import add_tokenizer


def write_quantized(folder: Path, recipe: str, target: Path, *, show_progress: bool = True) -> None:
    """Write the model of a folder to a GGUF file.

    Args:
        recipe: one of `block_rounding.RECIPES`.
        target: must not exist.

    Raises:
        ConfigError: the recipe needs a package that is missing, or the target exists.
        ModelLoadError: GGUF can't hold this model, or its files are damaged.
        OSError: the target can't be written.
    """
    from transformers import AutoConfig, AutoTokenizer

    if target.exists():
        raise ConfigError(f"--out {target} exists; give another name or remove it")
    with quiet_transformers():
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if architecture_of(config) is None:  # of text and images: the file gets the part for text
            config = config.get_text_config(decoder=True)
        _check(folder, config)
        rounding = Rounding(recipe, config.num_hidden_layers)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        source = GGUFSource(folder, config)
        _check_settings(source)
        part = target.with_name(f"{target.name}.part")
        try:
            _write(source, tokenizer, rounding, part, f"Quantising {folder.name}", show_progress)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def _check(folder: Path, config: Any) -> None:
    if architecture_of(config) is None:
        raise ModelLoadError(
            f"{folder} is a {config.model_type} model, which can't be written as GGUF; known are "
            f"{', '.join(sorted(KNOWN))}. Serve it with --quantization int8 or --dtype bfloat16."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelLoadError(f"The weights in {folder} are quantised already; give the original ones.")


def _check_settings(source: GGUFSource) -> None:
    lost = lost_settings(source.config, source.shapes)
    if lost:
        raise ModelLoadError(
            f"{source.folder} can't be written as GGUF without changing its answers: readers would not get "
            f"back {', '.join(lost)}. Serve it with --quantization int8 or --dtype bfloat16."
        )


def _write(
    source: GGUFSource, tokenizer: Any, rounding: Rounding, path: Path, label: str, show_progress: bool
) -> None:
    import gguf

    writer = gguf.GGUFWriter(str(path), str(architecture_of(source.config)))
    add_sizes(writer, source.config)
    add_tokenizer(writer, tokenizer, source.config.vocab_size)
    kinds = {name: rounding.kind(name, shape) for name, shape in source.shapes.items()}
    for name, kind in kinds.items():
        *outer, width = source.shapes[name]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (*outer, width // block * size)
        dtype = {"F32": np.float32, "F16": np.float16}.get(kind.name, np.uint8)
        plain = dtype is not np.uint8
        writer.add_tensor_info(
            name, (*outer, width) if plain else shape, np.dtype(dtype), int(np.prod(shape)),
            raw_dtype=None if plain else kind,
        )  # fmt: skip
    total = sum(int(np.prod(shape)) for shape in source.shapes.values())
    with ExitStack() as stack:
        stack.callback(writer.close)
        read = stack.enter_context(source.opened())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        update = stack.enter_context(progress_bar(label, total, unit="percent", show=show_progress))
        done = 0
        for name, tensor in source.tensors(read):
            writer.write_tensor_data(rounding.round(tensor, kinds[name]))
            done += tensor.size
            update(done)
