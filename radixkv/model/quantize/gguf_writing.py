# SPDX-License-Identifier: Apache-2.0
"""A GGUF file of blocks out of a folder of safetensors, one tensor in memory at a time.

1. the configuration must survive: every setting that matters is read back from what will be written
2. transformers' table names each parameter's tensor, and its reordering is undone
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
from radixkv.model.loading.weight_files import weight_files
from radixkv.model.quantize.block_rounding import Rounding
from radixkv.model.quantize.gguf_contents import ARCHITECTURES, add_sizes, add_tokenizer, lost_settings

_Array = np.ndarray[Any, Any]


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
        _check(folder, config)
        rounding = Rounding(recipe, config.num_hidden_layers)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        source = _Source(folder, config)
        part = target.with_name(f"{target.name}.part")
        try:
            _write(source, tokenizer, rounding, part, f"Quantising {folder.name}", show_progress)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def _check(folder: Path, config: Any) -> None:
    if config.model_type not in ARCHITECTURES:
        raise ModelLoadError(
            f"{folder} is a {config.model_type} model, which can't be written as GGUF; known are "
            f"{', '.join(sorted(ARCHITECTURES))}. Serve it with --quantization int8 or --dtype bfloat16."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelLoadError(f"The weights in {folder} are quantised already; give the original ones.")
    lost = lost_settings(config)
    if lost:
        raise ModelLoadError(
            f"{folder} can't be written as GGUF without changing its answers: readers would not get back "
            f"{', '.join(lost)}. Serve it with --quantization int8 or --dtype bfloat16."
        )


class _Source:
    """The parameters of a folder under their names in GGUF, in the order of its rows."""

    def __init__(self, folder: Path, config: Any) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers import modeling_gguf_pytorch_utils as reading

        self.folder, self.config = folder, config
        architecture = ARCHITECTURES[config.model_type]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        kind = reading.TENSOR_PROCESSORS.get(architecture, reading.TensorProcessor)
        self._processor = kind(config=config.to_dict())
        names = reading.get_gguf_hf_weights_map(model, self._processor, model_type=architecture)
        shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        if config.tie_word_embeddings:
            shapes.pop(names.get("output.weight"), None)
        self._parameters = {stored: name for stored, name in sorted(names.items()) if name in shapes}
        unnamed = sorted(set(shapes) - set(self._parameters.values()))
        if unnamed:
            raise ModelLoadError(f"{folder} can't be written as GGUF: it has no name for {unnamed[0]}.")
        self._names = names
        self.shapes = {stored: shapes[name] for stored, name in self._parameters.items()}

    def open(self, stack: ExitStack) -> dict[str, Any]:
        """Name of each parameter -> the open file that holds it.

        Raises:
            ModelLoadError: a parameter is in none.
        """
        from safetensors import safe_open

        found: dict[str, Any] = {}
        for path in weight_files(self.folder):
            file = stack.enter_context(safe_open(path, framework="pt"))
            found.update(dict.fromkeys(file.keys(), file))
        missing = sorted(set(self._parameters.values()) - set(found))
        if missing:
            raise ModelLoadError(
                f"The weights in {self.folder} lack {len(missing)} parameters: {missing[0]}."
            )
        return found

    def read(self, name: str, files: dict[str, Any]) -> _Array:
        """A tensor as the file has it, float32.

        Raises:
            ModelLoadError: it has another shape than the model's, or a layout that can't be undone.
        """
        parameter = self._parameters[name]
        value: _Array = files[parameter].get_tensor(parameter).float().numpy()
        if value.shape != self.shapes[name]:
            raise ModelLoadError(
                f"{parameter} in {self.folder} has the shape {list(value.shape)}, the configuration says "
                f"{list(self.shapes[name])}."
            )
        rows = len(value)
        if value.ndim == 1:
            stored = value - self._processed(np.zeros(rows, np.float32), name)
        else:
            order = self._processed(np.arange(rows)[:, None], name)[:, 0]
            stored = np.empty_like(value)
            stored[order] = value
        back = self._processed(stored, name)
        if not (np.array_equal(back, value) or (value.ndim == 1 and np.allclose(back, value, atol=1e-6))):
            raise ModelLoadError(f"{name} is laid out in a way that can't be undone.")
        return stored

    def _processed(self, value: _Array, name: str) -> _Array:
        kept: dict[str, Any] = {"tensors": {}}
        return np.asarray(
            self._processor.process(
                weights=value, name=name, tensor_key_mapping=self._names, parsed_parameters=kept
            ).weights
        )


def _write(
    source: _Source, tokenizer: Any, rounding: Rounding, path: Path, label: str, show_progress: bool
) -> None:
    import gguf

    writer = gguf.GGUFWriter(str(path), ARCHITECTURES[source.config.model_type])
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
        files = source.open(stack)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        update = stack.enter_context(progress_bar(label, total, unit="percent", show=show_progress))
        done = 0
        for name, kind in kinds.items():
            writer.write_tensor_data(rounding.round(source.read(name, files), kind))
            done += int(np.prod(source.shapes[name]))
            update(done)
