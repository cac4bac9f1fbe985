# SPDX-License-Identifier: Apache-2.0
"""Parameters of a folder as tensors of a GGUF file: names, order of rows, values and shapes of llama.cpp.

`gguf_tensors` and `gguf_experts`, which the reader has, say what a tensor's parameter is; here each of their
steps is undone. Parameters are read one at a time where the folder has them by the model's own names. Folders
with other names, such as experts one by one, are read whole by transformers, in their own precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from radixkv.errors import ModelLoadError
from radixkv.model.loading.gguf_experts import expert_modules, split_experts
from radixkv.model.loading.gguf_extras import FACTORS
from radixkv.model.loading.gguf_states import JOINED_INPUT, leaf_of
from radixkv.model.loading.gguf_tensors import split_tensor, tensor_names
from radixkv.model.loading.weight_files import weight_files
from radixkv.model.quantize.gguf_sizes import architecture_of

_Array = np.ndarray[Any, Any]
#: Reads a parameter by its name in the model.
_Read = Callable[[str], torch.Tensor]
#: Before the layers of a model, alone and beside an encoder of images.
_PREFIXES = ("model.", "model.language_model.", "language_model.model.")
#: Tensors whose names have no suffix in files.
_BARE = ("ssm_a", "ssm_d")


class GGUFSource:
    """The parameters of a folder as the tensors that a GGUF file gets.

    Args:
        config: of the folder, of a model type that `architecture_of` knows.

    Raises:
        ModelLoadError: GGUF has no name for a parameter.

    Attributes:
        shapes: name of each tensor -> its shape, in the order of the file.
        extra: small tensors that belong to no parameter.
    """

    def __init__(self, folder: Path, config: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.folder, self.config = folder, config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        self._model_class = type(model)
        names, self._processor = tensor_names(model, str(architecture_of(config)))
        self._names = names
        self._sizes = model.config.get_text_config(decoder=True).to_dict()
        self._experts = {path: (layer, module) for path, layer, module in expert_modules(model)}
        self._parameters = self._named(model, names)
        self.extra = _frequency_factors(config)
        self.shapes = {name: values.shape for name, values in self.extra.items()}
        for parameter in self._parameters:
            empty = np.broadcast_to(np.float32(0), self._parameters[parameter][1])
            self.shapes |= {name: part.shape for name, part in self._parts(parameter, empty)}

    def _named(self, model: Any, names: dict[str, str]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Parameter -> the tensor that it is called (none of experts), and its shape."""
        candidates: dict[str, list[str]] = {}
        for name, parameter in names.items():
            candidates.setdefault(parameter, []).append(name)
        own = model.state_dict()
        output = model.get_output_embeddings()
        if self.config.tie_word_embeddings and output is not None:
            tied = next(name for name, module in model.named_modules() if module is output)
            own.pop(f"{tied}.weight", None)
        found = {}
        for parameter, value in own.items():
            is_expert = parameter.rpartition(".")[0] in self._experts
            if parameter not in candidates and not is_expert:
                raise ModelLoadError(
                    f"{self.folder} can't be written as GGUF: it has no name for {parameter}."
                )
            name = "" if is_expert else self._chosen(candidates[parameter])
            found[parameter] = name, tuple(value.shape)
        return found

    def _chosen(self, names: list[str]) -> str:
        """Of the names that a reader takes for a parameter, llama.cpp's."""

        def rank(name: str) -> tuple[bool, ...]:
            leaf = leaf_of(name)
            bare = leaf.removesuffix(".weight") in _BARE
            for_all = "_shexp" in leaf
            unjoined = not leaf.startswith(JOINED_INPUT) and any(JOINED_INPUT in each for each in names)
            suffixed = leaf.endswith(".bias" if leaf.startswith("exp_probs_b") else (".weight", ".bias"))
            return (unjoined, suffixed == bare, for_all != bool(self._experts))

        return min(names, key=rank)

    @contextmanager
    def opened(self) -> Iterator[_Read]:
        """Gives a function that reads the folder's weights, while it lasts.

        Raises:
            ModelLoadError: a parameter is in no file.
        """
        from safetensors import safe_open

        with ExitStack() as stack:
            files: dict[str, Any] = {}
            for path in weight_files(self.folder):
                file = stack.enter_context(safe_open(path, framework="pt"))
                files.update(dict.fromkeys(file.keys(), file))
            for prefix in _PREFIXES:
                stored = {name: _nested(name, prefix) for name in self._parameters}
                if files.keys() >= set(stored.values()):
                    yield _reading(files, stored)
                    return
        yield self._read_whole().__getitem__

    def _read_whole(self) -> dict[str, torch.Tensor]:
        model, report = self._model_class.from_pretrained(
            self.folder, config=self.config, dtype="auto", local_files_only=True, output_loading_info=True
        )
        missing = sorted(report.get("missing_keys") or ())
        if missing:
            raise ModelLoadError(
                f"The weights in {self.folder} lack {len(missing)} parameters: {missing[0]}."
            )
        found: dict[str, torch.Tensor] = model.state_dict()
        return found

    def tensors(self, read: _Read) -> Iterator[tuple[str, _Array]]:
        """Each tensor as the file has it, float32, in the order of `shapes`.

        Raises:
            ModelLoadError: a parameter has another shape than the model's, or a layout that can't be undone.
        """
        yield from self.extra.items()
        for parameter, (_, shape) in self._parameters.items():
            value: _Array = read(parameter).float().numpy()
            if value.shape != shape:
                raise ModelLoadError(
                    f"{parameter} in {self.folder} has the shape {list(value.shape)}, the configuration says "
                    f"{list(shape)}."
                )
            yield from self._parts(parameter, value)

    def _parts(self, parameter: str, value: _Array) -> list[tuple[str, _Array]]:
        name, _ = self._parameters[parameter]
        if not name:
            path, _, leaf = parameter.rpartition(".")
            layer, module = self._experts[path]
            split = split_experts(module, leaf, torch.from_numpy(value))
            return [(f"blk.{layer}.ffn_{_exps(part)}", each.numpy()) for part, each in split.items()]
        stored = self._stored(name, value)
        if value.any():
            self._check(name, stored, value)
        parts = split_tensor(name, stored, self._sizes).items()
        return [(part, _shaped(leaf_of(part), each, self.config)) for part, each in parts]

    def _stored(self, name: str, value: _Array) -> _Array:
        """A parameter with its tensor's values and order of rows."""
        if hasattr(self._processor, "store"):
            stored = np.asarray(self._processor.store(value, name), np.float32)
            return stored * _multiplier(leaf_of(name), self.config)
        if name.endswith("shortconv.conv.weight"):
            return value[:, 0]
        if "ffn_gate_inp_shexp" in name:
            return value[0]
        rows = len(value)
        if value.ndim == 1:
            return value - self._processed(np.zeros(rows, np.float32), name)
        order = self._processed(np.arange(rows)[:, None], name)[:, 0]
        return value if np.array_equal(order, np.arange(rows)) else value[np.argsort(order)]

    def _check(self, name: str, stored: _Array, value: _Array) -> None:
        back = self._processed(stored / _multiplier(leaf_of(name), self.config), name).reshape(value.shape)
        if not np.allclose(back, value, rtol=1e-5, atol=1e-6):
            raise ModelLoadError(f"{name} is laid out in a way that can't be undone.")

    def _processed(self, value: _Array, name: str) -> _Array:
        kept: dict[str, Any] = {"tensors": {}}
        return np.asarray(
            self._processor.process(
                weights=value, name=name, tensor_key_mapping=self._names, parsed_parameters=kept
            ).weights
        )


def _reading(files: dict[str, Any], stored: dict[str, str]) -> _Read:
    return lambda name: files[stored[name]].get_tensor(stored[name])


def _nested(name: str, prefix: str) -> str:
    """A parameter's name in a folder whose model's layers have a prefix."""
    if name.startswith("model."):
        return prefix + name.removeprefix("model.")
    return f"language_model.{name}" if prefix.startswith("language_model.") else name


def _exps(part: str) -> str:
    stem, _, leaf = part.partition(".")
    return f"{stem}_exps.{leaf}"


def _shaped(leaf: str, value: _Array, config: Any) -> _Array:
    """A tensor of a state layer in llama.cpp's shape."""
    groups = getattr(config, "mamba_n_groups", None) or getattr(config, "n_groups", None)
    if leaf in _BARE and groups and value.ndim == 1:
        return value[:, None]
    if leaf == "ssm_norm.weight" and groups:
        return value.reshape(groups, -1)
    if leaf in ("ssm_conv1d.weight", "shortconv.conv.weight") and value.ndim == 3:
        return value[:, 0]
    return value[None] if leaf.startswith("ssm_conv1d_") else value  # Kimi's


def _multiplier(leaf: str, config: Any) -> Any:
    """What Falcon-H1's weights are multiplied by in files; a number, or one for each row."""
    if config.model_type != "falcon_h1":
        return np.float32(1)
    into, out = config.attention_in_multiplier, config.attention_out_multiplier
    if leaf == "ssm_in.weight":
        shared = config.mamba_n_groups * config.mamba_d_state
        sizes = [config.mamba_d_ssm] * 2 + [shared] * 2 + [config.mamba_n_heads]
        rows = np.repeat(np.array(config.ssm_multipliers, np.float32), sizes)[:, None]
        return rows * np.float32(config.ssm_in_multiplier)
    gate, down = config.mlp_multipliers
    found = {
        "attn_q.weight": into, "attn_k.weight": into * config.key_multiplier, "attn_v.weight": into,
        "attn_output.weight": out, "ssm_out.weight": config.ssm_out_multiplier, "ffn_gate.weight": gate,
        "ffn_down.weight": down, "output.weight": config.lm_head_multiplier,
        "token_embd.weight": config.embedding_multiplier,
    }  # fmt: skip
    return np.float32(found.get(leaf, 1))


def _frequency_factors(config: Any) -> dict[str, _Array]:
    """Divisors of rotary frequencies of a model that scales them as Llama 3 does."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "llama3":
        return {}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    exponents = torch.arange(0, 2 * len(scaled), 2, dtype=torch.float32) / (2 * len(scaled))
    plain = parameters["rope_theta"] ** -exponents
    return {FACTORS: (plain / scaled).numpy()}
