# SPDX-License-Identifier: Apache-2.0
"""A model of a GGUF file, read tensor by tensor from the mapped file: its weights stay blocks, in panels.

    1. the model is built without memory for its weights
    2. norms, biases and other small tensors become float32
    3. each linear layer's blocks become panels, and so do experts' (`gguf_experts`); formats without a kernel
       are rounded to bfloat16
    4. embeddings read the rows they need from the mapped file
    5. nothing may be left without a value

With a dtype, tensors are dequantised to it instead; with a device, too, they go to it as they are, for its
kernels (`stored_modules`).
`gguf_tensors` says which tensor of the file is which parameter and undoes llama.cpp's reordering: the order
of a weight's rows is found by sending row numbers through the same function, so rows of blocks move and
nothing is dequantised.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import nn

from radixkv.errors import ModelLoadError
from radixkv.model.loading.file_pages import release_mapped_pages
from radixkv.model.loading.gguf_experts import (
    expected_shapes,
    expert_modules,
    expert_tensors,
    rounded_formats,
    stacked_experts,
)
from radixkv.model.loading.gguf_file import GGUFFile
from radixkv.model.loading.gguf_frequencies import divide_frequencies
from radixkv.model.loading.gguf_tensors import STAY_PLAIN, Conversion, join_tensors, tensor_names
from radixkv.model.loading.load_progress import progress_bar
from radixkv.model.loading.without_memory import build_without_memory

if TYPE_CHECKING:
    from radixkv.model.decoder_layers import WholeProduct
    from radixkv.model.gpu_layers.stored_modules import Target
    from radixkv.model.stored_weights.block_weight import BlockWeight
    from radixkv.model.stored_weights.stored_weight import StoredWeight
    from radixkv_kernels.cpu.linear.block_rows import BlockRows

_Array = np.ndarray[Any, Any]
#: Formats whose numbers are multiplied in their own dtype.
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def reason_against() -> str | None:
    """Return the reason why blocks can't be kept on this machine; None: they can."""
    try:
        from radixkv_kernels.cpu.linear.block_method import methods  # needs numba, which is optional
    except ImportError:
        return "numba can't be used (the extra `cpu` installs it)"
    if not methods():
        return "this processor has neither VNNI nor AVX2"
    return None


@torch.no_grad()
def load_gguf(
    file: GGUFFile, config: Any, attention: str, *, dtype: torch.dtype | None = None,
    device: torch.device | None = None, expand_on: torch.device | None = None,
    show_progress: bool = True, for_ranks: bool = False,
) -> Any:  # fmt: skip
    """Build the transformers model of a GGUF file.

    Args:
        config: its transformers configuration.
        attention: name of the attention function.
        dtype: of dequantised weights; None for weights in blocks, which a CPU can multiply.
        device: GPU whose kernels multiply blocks in that dtype; None: they are dequantised to it.
        expand_on: where dequantised weights go, one by one; None: they stay in host memory.
        for_ranks: leave blocks in the file until each rank has chosen its share, see `WholeProduct`.

    Raises:
        ModelLoadError: a parameter of the model is not in the file, or has another shape there; or sizes or
            factors of frequencies that do not fit.
    """
    from transformers import AutoModelForCausalLM  # heavy

    if not file.tensors:
        raise ModelLoadError(f"{file.path} has a vocabulary and no weights; give the model's file.")
    model: Any = build_without_memory(
        lambda: AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    )
    _check_size(file, model)
    _make_buffers(model)
    target = None
    if device is not None and dtype is not None:
        from radixkv.model.gpu_layers.stored_modules import Target  # needs triton, which is optional

        target = Target(device, dtype)
    goal = device or expand_on
    placing = _Placing(file, model, dtype, target, for_ranks, goal)
    total = sum(tensor.n_bytes for tensor in file.tensors.values())
    with progress_bar(
        f"{'Dequantising' if dtype is not None and target is None else 'Packing'} {file.path.name}",
        total,
        show=show_progress,
        patience=2.0,
    ) as update:
        done = 0
        for tensor in placing.in_order():
            placing.place(tensor)
            done += tensor.n_bytes
            update(done)
        for experts in placing.experts():
            done += placing.place_experts(*experts)
            update(done)
        placing.tie()
    placing.check_complete()
    placing.tell_widened(show_progress)
    divide_frequencies(file, model)
    if goal is not None:  # buffers
        model.to(goal)
    return model.eval().requires_grad_(False)


def _check_size(file: GGUFFile, model: Any) -> None:
    """Refuse a file whose sizes make a far larger model than it has weights for, before memory is taken."""
    expected = sum(parameter.numel() for parameter in model.parameters())
    stored = sum(tensor.n_elements for tensor in file.tensors.values())
    if expected > 2.5 * stored + 2**20:  # tied weights are stored once
        raise ModelLoadError(
            f"{file.path} has {stored:,} weights, and its sizes make a model of {expected:,}. It is damaged "
            "or was tampered with; fetch it again from a source you trust."
        )


def _make_buffers(model: Any) -> None:
    """Allocate buffers with the values that the architecture initialises; parameters stay unallocated.

    Other buffers are NaN, which the trial run would find.
    """
    owners = []
    for path, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                value = float("nan") if buffer.dtype.is_floating_point else 0
                setattr(module, name, torch.full(buffer.shape, value, dtype=buffer.dtype))
                owners.append(f"{path}.")
    for path, module in model.named_modules():  # some models initialise buffers of modules below
        if any(owner.startswith(f"{path}.") or not path for owner in owners):
            model._init_weights(module)


class _Placing:
    """The tensors of one file on their way into one model."""

    def __init__(
        self,
        file: GGUFFile,
        model: Any,
        dtype: torch.dtype | None,
        target: Target | None,
        for_ranks: bool,
        device: torch.device | None,
    ) -> None:
        self.file, self.model, self.dtype, self._target = file, model, dtype, target
        self._bare = dict(model.named_parameters())  # without memory, until they are placed
        self._device = device  # of plain parameters; None: the host
        self._names = tensor_names(model, file.architecture)
        self._conversion = Conversion(file.architecture, model.config.get_text_config(decoder=True))
        self._for_ranks = for_ranks
        self._embedded: dict[str, Any] = {}
        self._experts = expert_tensors(file)
        self._widened: Counter[str] = Counter()

    @functools.cached_property
    def _rows(self) -> BlockRows:
        """Rows of inputs in int8, which products of blocks share; it takes numba."""
        from radixkv_kernels.cpu.linear.block_rows import BlockRows  # needs numba, which is optional

        return BlockRows()

    def in_order(self) -> list[Any]:
        """Tensors that the model has a place for; biases before the weights that they belong to, and of
        these the largest ones first: for a while, memory holds a tensor twice."""
        joined = join_tensors(self.file.tensors, self._names)
        known = [tensor for tensor in joined if tensor.name in self._names]
        return sorted(known, key=lambda tensor: (len(tensor.shape) > 1, -int(tensor.n_bytes)))

    def place(self, tensor: Any) -> None:
        """Give a tensor to its module."""
        path, _, leaf = self._names[tensor.name].rpartition(".")
        module = self.model.get_submodule(path)
        expands = self.dtype is not None and self._target is None
        plain = expands or path.endswith(STAY_PLAIN)
        stored = not plain and len(tensor.shape) == 2 and leaf == "weight"
        if stored and isinstance(module, nn.Embedding) and self._order(tensor) is None:
            self._check_shape(tensor, module.weight.shape)
            self._embedded[path] = tensor
            self._put(path, self._embedding(module, tensor))
            return
        if leaf == "weight" and type(module) is nn.Linear and not plain:
            self._put(path, self._linear(module, tensor))
        else:
            self._set_parameter(module, leaf, tensor)
        for part in getattr(tensor, "parts", [tensor]):
            release_mapped_pages(part.data.ctypes.data, part.data.nbytes)

    def experts(self) -> list[tuple[str, int, Any]]:
        """Path, layer and module of the experts of each layer."""
        return list(expert_modules(self.model))

    def place_experts(self, path: str, layer: int, module: Any) -> int:
        """Pack a layer's experts and make their router's rows independent; returns bytes of the tensors."""
        tensors = self._experts.get(layer, {})
        for name, shape in expected_shapes(module, tensors).items():
            tensor = tensors.get(name)
            if tensor is None:
                self._refuse_missing([f"{path} ({name})"])
            self._check_shape(tensor, torch.Size(shape))
        if self._target is not None and self._target.computes(module):
            self._put(path, self._stored_experts(module, tensors))
            return sum(int(tensor.n_bytes) for tensor in tensors.values())
        if self.dtype is not None:
            for name, value in stacked_experts(module, tensors).items():
                placed = value.to(self._device, self.dtype)
                setattr(module, name, nn.Parameter(placed, requires_grad=False))
            if self._target is not None:
                kinds = (tensor.tensor_type.name for name, tensor in tensors.items() if "weight" in name)
                self._target.expanded.update(kinds)
            return sum(int(tensor.n_bytes) for tensor in tensors.values())
        # needs numba, which is optional
        from radixkv.model.cpu_layers.block_experts import fix_routing
        from radixkv.model.cpu_layers.whole_weights import FileExperts

        experts = FileExperts(module, tensors, self._rows)
        self._put(path, experts if self._for_ranks else experts.packed())
        self._widened.update(rounded_formats(module, tensors))
        fix_routing(self.model.get_submodule(path.rpartition(".")[0]))
        return sum(int(tensor.n_bytes) for tensor in tensors.values())

    def tie(self) -> None:
        """Make the output product of tied embeddings, where the file has none."""
        output = self.model.get_output_embeddings()
        if type(output) is nn.Linear and output.weight.is_meta and self.model.config.tie_word_embeddings:
            if self.dtype is not None and self._target is None:
                self.model.tie_weights()
                return
            names = {id(module): name for name, module in self.model.named_modules()}
            tensor = self._embedded.get(names[id(self.model.get_input_embeddings())])
            if tensor is not None:
                self._put(names[id(output)], self._linear(output, tensor))
                release_mapped_pages(tensor.data.ctypes.data, tensor.data.nbytes)

    def check_complete(self) -> None:
        """Refuse a model with parameters that the file has no tensor for."""
        bare = self._bare
        missing = [name for name, each in self.model.named_parameters() if each is bare.get(name)]
        if missing:
            self._refuse_missing(missing)

    def tell_widened(self, show: bool) -> None:
        """Print which formats were rounded to bfloat16."""
        if self._target is not None:
            self._widened.update(self._target.expanded)
        if self._widened and show:
            kinds = ", ".join(f"{count} of {name}" for name, count in sorted(self._widened.items()))
            name = str(self.dtype or torch.bfloat16).removeprefix("torch.")
            print(f"Rounded to {name}, since no kernel multiplies them: {kinds}.", file=sys.stderr)

    def _linear(self, module: nn.Linear, tensor: Any) -> nn.Module:
        if self._target is not None:
            return self._stored_linear(module, tensor)
        # needs numba, which is optional
        from radixkv.model.cpu_layers.whole_weights import FileProduct, PlainProduct
        from radixkv_kernels.cpu.linear.block_formats import FORMATS

        flat = len(tensor.shape) == 1  # a product with one output
        if not flat:
            self._check_shape(tensor, module.weight.shape)
        found = None if flat else self._reordered(module, tensor)
        if found is not None:
            return self._chosen(found)
        order = None if flat else self._order(tensor)
        if tensor.tensor_type in FORMATS and (order is None or isinstance(order, np.ndarray)):
            width = module.in_features
            return self._chosen(FileProduct([tensor], width, order, None, module.bias, self._rows))
        weight = None if order is False else self._plain(tensor, order)
        if weight is None:
            weight = torch.from_numpy(np.array(self._restored(tensor)))
            if tensor.tensor_type.name not in _PLAIN:
                self._widened[tensor.tensor_type.name] += 1
                weight = weight.to(torch.bfloat16)
        if flat or weight.shape[:1] == (1,):  # a file may have its dimension, or not
            weight = weight.reshape(1, -1)
        if weight.shape != module.weight.shape:
            self._refuse(tensor, tuple(weight.shape), module.weight.shape)
        return self._chosen(PlainProduct(weight, module.bias))

    def _stored_linear(self, module: nn.Linear, tensor: Any) -> nn.Module:
        """A product of blocks on a GPU; a plain one where the file has numbers or moves them about."""
        from radixkv.model.gpu_layers.stored_modules import StoredLinear

        assert self._target is not None
        parts = getattr(tensor, "parts", [tensor])
        is_flat = len(tensor.shape) == 1
        order = None if is_flat else self._order(tensor)
        moved = isinstance(order, np.ndarray) and len(parts) > 1
        if is_flat or order is False or moved or any(_is_plain(part) for part in parts):
            weight = torch.from_numpy(np.array(self._restored(tensor)))
            weight = weight.reshape(1, -1) if is_flat else weight
            if weight.shape != module.weight.shape:
                self._refuse(tensor, tuple(weight.shape), module.weight.shape)
            if not all(_is_plain(part) for part in parts):
                self._target.expanded[tensor.tensor_type.name] += 1
            plain = nn.Linear(weight.shape[1], weight.shape[0], bias=module.bias is not None, device="meta")
            plain.weight = nn.Parameter(self._target.plain(weight), requires_grad=False)
            if module.bias is not None:
                plain.bias = nn.Parameter(self._target.plain(module.bias), requires_grad=False)
            return plain
        self._check_shape(tensor, module.weight.shape)
        weights = [_block_weight(part) for part in parts]
        if isinstance(order, np.ndarray):
            weights = [weights[0].in_order(torch.from_numpy(order))]
        inputs = self._conversion.input_order(tensor.name)
        product = StoredLinear(
            weights, module.bias, self._target, None if inputs is None else torch.from_numpy(inputs)
        )
        return product if self._for_ranks else product.packed()

    def _stored_experts(self, module: Any, tensors: dict[str, Any]) -> nn.Module:
        """A layer's experts on a GPU."""
        from radixkv.model.gpu_layers.stored_modules import StoredGpuExperts

        names = ["gate_up"] if "gate_up.weight" in tensors else ["gate", "up"]

        def weights(own: list[str]) -> list[tuple[StoredWeight, ...]]:
            whole = [tensors[f"{name}.weight"] for name in own]
            count = module.num_experts
            return [tuple(_block_weight(each, expert) for each in whole) for expert in range(count)]

        def bias(own: list[str]) -> torch.Tensor | None:
            if not module.has_bias:
                return None
            return torch.cat([torch.from_numpy(self._restored(tensors[f"{n}.bias"])) for n in own], 1)

        assert self._target is not None
        experts = StoredGpuExperts(
            module,
            weights(names),
            weights(["down"]),
            self._target,
            biases=(bias(names), bias(["down"])),
            alternate=False,
        )
        return experts if self._for_ranks else experts.packed()

    def _chosen(self, product: WholeProduct) -> nn.Module:
        """A product as it is, where ranks choose their outputs; else in its final form."""
        return product if self._for_ranks and product.out_features > 1 else product.packed()

    def _reordered(self, module: nn.Linear, tensor: Any) -> WholeProduct | None:
        """A product whose columns are in another order, or whose parts differ in format; None: neither."""
        from radixkv.model.cpu_layers.whole_weights import FileProduct  # needs numba, which is optional
        from radixkv_kernels.cpu.linear.block_formats import FORMATS

        parts = getattr(tensor, "parts", [tensor])
        inputs = self._conversion.input_order(tensor.name)
        differ = len({part.tensor_type for part in parts}) > 1
        if inputs is None and not (differ and tensor.is_stack):
            return None
        if any(part.tensor_type not in FORMATS for part in parts):
            return None
        order = None if inputs is not None else self._order(tensor)
        outputs = order if isinstance(order, np.ndarray) else None
        return FileProduct(parts, module.in_features, outputs, inputs, module.bias, self._rows)

    def _embedding(self, module: nn.Embedding, tensor: Any) -> nn.Module:
        if self._target is not None:
            return self._target.embedding(module, _block_weight(tensor))
        from radixkv.model.cpu_layers.block_linear import BlockEmbedding  # needs numba, which is optional

        scale = getattr(module, "embed_scale", 1.0)
        return BlockEmbedding(tensor.data, int(tensor.tensor_type), float(scale))

    def _order(self, tensor: Any) -> _Array | bool | None:
        """Return the file's row for each row of the parameter; None: the same; False: not a permutation."""
        count = int(tensor.shape[1])
        numbers = np.arange(count, dtype=np.int64)
        try:
            found = self._conversion.restore(numbers[:, None], tensor.name)
        except Exception:  # it counts on the weight's columns
            return False
        if found.shape != (count, 1) or not np.array_equal(np.sort(found[:, 0]), numbers):
            return False
        return None if np.array_equal(found[:, 0], numbers) else np.ascontiguousarray(found[:, 0])

    def _plain(self, tensor: Any, order: Any) -> torch.Tensor | None:
        """A tensor of plain numbers in their own dtype, its pages of the file released; None: it is none."""
        dtype = _PLAIN.get(tensor.tensor_type.name)
        if dtype is None or hasattr(tensor, "parts"):
            return None
        numbers = np.array(tensor.data if order is None else tensor.data[order])
        release_mapped_pages(tensor.data.ctypes.data, tensor.data.nbytes)
        return torch.from_numpy(numbers.view(np.uint8)).view(dtype)

    def _restored(self, tensor: Any) -> _Array:
        """A tensor as float32, as the model has it."""
        import gguf  # slow to import

        plain = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return np.asarray(self._conversion.restore(plain, tensor.name), dtype=np.float32)

    def _set_parameter(self, module: nn.Module, leaf: str, tensor: Any) -> None:
        value = torch.from_numpy(np.array(self._restored(tensor)))
        old = getattr(module, leaf)
        if _is_same_but_for_ones(value.shape, old.shape) or tensor.name.endswith(".ssm_norm.weight"):
            value = value.reshape(old.shape) if value.numel() == old.numel() else value
        if value.shape != old.shape:
            self._refuse(tensor, tuple(value.shape), old.shape)
        if isinstance(old, nn.Parameter):
            value = value.to(self._device, self.dtype or value.dtype)
            setattr(module, leaf, nn.Parameter(value, requires_grad=False))
        else:
            old.copy_(value)

    def _check_shape(self, tensor: Any, expected: torch.Size) -> None:
        found = tuple(int(size) for size in reversed(tensor.shape))
        if found != tuple(expected):
            self._refuse(tensor, found, expected)

    def _refuse(self, tensor: Any, found: tuple[int, ...], expected: torch.Size) -> NoReturn:
        raise ModelLoadError(
            f"The tensor {tensor.name} of {self.file.path} has the shape {list(found)}, the model's "
            f"parameter {list(expected)}. The file is damaged, or its metadata belong to another model."
        )

    def _refuse_missing(self, names: list[str]) -> NoReturn:
        raise ModelLoadError(
            f"{self.file.path} has no tensors for {len(names)} parameters of the model (first: {names[0]})"
            ". The file may be incomplete, or made for another version of the architecture."
        )

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, own = name.rpartition(".")
        setattr(self.model.get_submodule(parent), own, module)


def _is_same_but_for_ones(one: torch.Size, other: torch.Size) -> bool:
    """Return True if shapes differ in dimensions of size 1 only, as those of convolutions and decays do."""
    return [size for size in one if size != 1] == [size for size in other if size != 1]


def _is_plain(tensor: Any) -> bool:
    """Return True for plain numbers in a file."""
    return tensor.tensor_type.name in ("F32", "F16", "BF16", "F64")


def _block_weight(tensor: Any, expert: int | None = None) -> BlockWeight:
    """A file's tensor as a stored weight, or one expert's part of it."""
    from radixkv.model.stored_weights.block_weight import BlockWeight

    data = tensor.data if expert is None else tensor.data[expert]
    data = np.ascontiguousarray(data).view(np.uint8)
    with warnings.catch_warnings():  # the file is mapped to be read
        warnings.simplefilter("ignore", UserWarning)
        return BlockWeight(torch.from_numpy(data.reshape(len(data), -1)), tensor.tensor_type)
