# SPDX-License-Identifier: Apache-2.0
"""Forms in which model folders store weights: the table of all, and how each is served or refused.

    config.json          quantization_config, at the top or in a part's own configuration -> the form's name
    hf_quant_config.json the same, of ModelOpt
    safetensors headers  names and types of tensors, which must be those of that form

A stored form has tensors beside its weights: scales, zero points, codes. Left out, they leave a model that
loads and answers wrongly. Hence a folder is refused unless a row of the table claims its form and each such
tensor. Only JSON is read here, before any weight and without torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from radixkv.errors import ModelLoadError
from radixkv.model.loading.weight_files import StoredTensor


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """One stored form of weights.

    Attributes:
        title: what messages call it.
        served: how its products are computed; None: it is refused.
        package: what must be installed for that; None: nothing.
        dtypes: values of `--dtype` with which it is served; empty: all.
        on_gpu: it is served on a GPU, too.
        on_ranks: it is served with tensor parallelism, too.
        types: of its weights in files, besides plain floats.
        tensors: pattern of the last part of names of the tensors beside its weights.
        scale: what follows a weight's name in the name of its scale; empty: in other ways.
    """

    title: str
    served: str | None = None
    package: str | None = None
    dtypes: tuple[str, ...] = ()
    on_gpu: bool = True
    on_ranks: bool = True
    types: tuple[str, ...] = ()
    tensors: str = ""
    scale: str = ""


#: `quant_method` of a `quantization_config` -> form. What is served is computed by transformers.
FORMATS: Mapping[str, CheckpointFormat] = {
    "mxfp4": CheckpointFormat(
        "MXFP4",
        "expanded to --dtype when it is read",
        types=("U8",),
        tensors=r"\w+_(blocks|scales)",
    ),
    "fp8": CheckpointFormat(
        "FP8 with a scale for each block",
        "expanded to bfloat16 when it is read",
        dtypes=("bfloat16",),
        on_gpu=False,
        types=("F8_E4M3",),
        tensors=r"\w+_scale_inv",
        scale="_scale_inv",
    ),
    "compressed-tensors": CheckpointFormat(
        "compressed-tensors",
        "expanded to --dtype by the package compressed-tensors",
        package="compressed_tensors",
        types=("F8_E4M3", "I8", "I32", "U8"),
        tensors=r"(weight|input)_(scale|zero_point|global_scale)|weight_(packed|shape|g_idx)",
        scale="_scale",
    ),
    "bitsandbytes_4bit": CheckpointFormat(
        "bitsandbytes, 4 bits",
        "multiplied by the package bitsandbytes",
        package="bitsandbytes",
        on_ranks=False,
        types=("U8",),
        tensors=r"(nested_)?(absmax|quant_map)|quant_state|bitsandbytes__\w+",
    ),
    "bitsandbytes": CheckpointFormat("bitsandbytes"),
    "bitsandbytes_8bit": CheckpointFormat("bitsandbytes, 8 bits"),
    "modelopt": CheckpointFormat("ModelOpt"),
    "nvfp4": CheckpointFormat("NVFP4"),
    "mxfp8": CheckpointFormat("MXFP8"),
    "fbgemm_fp8": CheckpointFormat("FBGEMM FP8"),
    "awq": CheckpointFormat("AWQ"),
    "gptq": CheckpointFormat("GPTQ"),
    "auto-round": CheckpointFormat("AutoRound"),
    "torchao": CheckpointFormat("torchao"),
    "mlx": CheckpointFormat("MLX"),
    "quark": CheckpointFormat("Quark"),
    "hqq": CheckpointFormat("HQQ"),
    "quanto": CheckpointFormat("Quanto"),
    "aqlm": CheckpointFormat("AQLM"),
    "vptq": CheckpointFormat("VPTQ"),
    "eetq": CheckpointFormat("EETQ"),
    "higgs": CheckpointFormat("HIGGS"),
    "bitnet": CheckpointFormat("BitNet"),
    "spqr": CheckpointFormat("SpQR"),
    "fp_quant": CheckpointFormat("FP-Quant"),
    "fouroversix": CheckpointFormat("Four Over Six"),
    "metal": CheckpointFormat("Metal"),
    "sinq": CheckpointFormat("SINQ"),
    "gemma": CheckpointFormat("Gemma's own quantisation"),
    "exl2": CheckpointFormat("ExLlamaV2"),
    "exl3": CheckpointFormat("ExLlamaV3"),
}

_MODELOPT_FILE = "hf_quant_config.json"
#: Keys of a configuration that describe stored weights; the last one is MLX's.
_KEYS = ("quantization_config", "compression_config", "quantization")
#: Where transformers looks for them.
_READ_PLACES = ("quantization_config", "text_config.quantization_config")
#: Formats that the package compressed-tensors expands rightly in any dtype.
_COMPRESSED = ("dense", "naive-quantized", "float-quantized", "int-quantized", "pack-quantized")

#: Form -> last part of a tensor's name that only this form has, the most telling ones first.
_TELLING: Mapping[str, str] = {
    "bitsandbytes": r"(nested_)?(absmax|quant_map)|SCB|weight_format|quant_state|bitsandbytes__\w+",
    "GPTQ": r"g_idx",
    "AWQ or GPTQ": r"qweight|qzeros",
    "torchao": r"_?weight_qdata|weight:\w+|_weight_(scale|zero_point)",
    "HQQ": r"W_q",
    "AQLM": r"codebooks|codes",
    "ModelOpt NVFP4": r"weight_scale_2|weight_double_scale",
    "compressed-tensors": r"weight_(packed|shape|g_idx|global_scale)|input_global_scale",
    "FP8 with a scale for each block": r"\w*scale_inv",
    "MXFP4": r"\w+_proj_blocks",
    "ModelOpt": r"pre_quant_scale|_amax",
    "quantised weights": (
        r"(\w*weight|input|output|activation|act|kv?|[qv]|prob(_output)?|\w+_proj|w13|w2|in_proj_a|smooth)"
        r"_(scales?|zero_points?|zeros|scale_ub)|smoother|zero_points?|qscales?|wscales?|zeros"
    ),
}
_PLAIN_TYPES = frozenset({"F64", "F32", "F16", "BF16", "C64", "BOOL"})
_WEIGHT = re.compile(r"\w*(weight|_proj|w[123])")


def check_format(
    name: str,
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    *,
    dtype: str = "auto",
    has_gpu: bool | None = None,
    num_ranks: int = 1,
) -> None:
    """Refuse a folder whose weights are in a form that is not served, or not with these settings.

    Args:
        name: the model, for messages.
        tensors: of its weight files.
        dtype, num_ranks: `dtype` and `tensor_parallel` of `EngineConfig`.
        has_gpu: a GPU is there; None: unknown yet, so that what depends on it is not checked.

    Raises:
        ModelLoadError: names the form, where it was found and what to do.
    """
    form = None
    found = [*_declared(read_json(folder / "config.json")), *_declared_beside(folder)]
    methods = {_method(settings) for _, settings in found}
    for where, settings in found:
        method = _method(settings)
        form = FORMATS.get(method)
        if form is None:
            raise _refusal(name, f"a form that radixkv does not know ({method})", where)
        title = _title(form, method, settings)
        if form.served is None:
            raise _refusal(name, title, where)
        reason = _reason_against(method, settings, tensors)
        if where not in _READ_PLACES:
            reason = "transformers does not read it in that place"
        elif len(methods) > 1:
            reason = f"its configuration names several forms ({', '.join(sorted(methods))})"
        if reason is not None:
            raise _refusal(name, title, where, reason)
    stray = _stray(tensors, form)
    if stray is not None:
        title, names = stray
        shown = f"{len(names)} tensors, the first is {names[0]}" if len(names) > 1 else names[0]
        expected = "no quantization_config" if form is None else f"{form.title} alone"
        raise _refusal(name, title, shown, f"its config.json names {expected}")
    if form is not None:
        _check_settings(name, form, found[0][0], dtype, has_gpu, num_ranks)


def is_left_out_scale(name: str) -> bool:
    """Return True for a name that a tensor beside stored weights may have, of any form.

    Of use for tensors that no module of a model has: some models have parameters called so.
    """
    last = name.rpartition(".")[2]
    return "scal" in last or any(re.fullmatch(pattern, last) for pattern in _TELLING.values())


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file's object; an empty one where the file is none.

    What is wrong with it is said by the reader that needs its values.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _declared(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Place and content of each description of stored weights in a configuration, parts' own included."""
    queue: list[tuple[str, Mapping[str, Any]]] = [("", config)]
    mlx: list[tuple[str, Any]] = []
    for prefix, part in queue:
        for key, value in part.items():
            if key in _KEYS and value:
                if key != "quantization":
                    yield prefix + key, value
                elif isinstance(value, dict) and "bits" in value:
                    mlx.append((prefix + key, value))
            elif isinstance(value, dict):
                queue.append((f"{prefix}{key}.", value))
    if mlx:  # it has the same once more as quantization_config, without a method
        yield mlx[0]


def _declared_beside(folder: Path) -> Iterator[tuple[str, Any]]:
    """Description of ModelOpt's, in a file of its own; with null for quant_algo, weights are plain."""
    path = folder / _MODELOPT_FILE
    if path.is_file():
        found = read_json(path)
        settings = found.get("quantization", found)
        if not isinstance(settings, dict) or settings.get("quant_algo", "") is not None:
            yield _MODELOPT_FILE, {"quant_algo": None, **(settings if isinstance(settings, dict) else {})}


def _method(settings: Any) -> str:
    """Key of `FORMATS` for a description; one without a method goes by what only one form has."""
    if not isinstance(settings, dict):
        return f"a description that is no object: {settings!r:.60}"
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes_4bit" if settings.get("load_in_4bit") else "bitsandbytes_8bit"
    method = settings.get("quant_method")
    if isinstance(method, str) and method:
        return method
    if "quant_algo" in settings:
        return "modelopt"
    if "bits" in settings and "group_size" in settings:
        return "mlx"
    return f"no quant_method, but {', '.join(map(str, settings))[:80] or 'nothing'}"


def _title(form: CheckpointFormat, method: str, settings: Mapping[str, Any]) -> str:
    """Name of a form with its variant, as `ModelOpt NVFP4`."""
    if method == "modelopt":
        return f"{form.title} {settings.get('quant_algo') or ''}".strip()
    if method == "compressed-tensors":
        return f"{form.title} ({settings.get('format')})" if settings.get("format") else form.title
    bits = settings.get("bits")
    return f"{form.title}, {bits} bits" if type(bits) is int else form.title


def _reason_against(
    method: str, settings: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> str | None:
    """Return why a variant of a served form is not served; None: it is."""
    if method == "fp8":
        sizes = settings.get("weight_block_size")
        if not (isinstance(sizes, list) and len(sizes) == 2):
            return "its scales are not of blocks (weight_block_size)"
        if any(
            _last(name).endswith("scale_inv") and tensor.dtype not in _PLAIN_TYPES
            for name, tensor in tensors.items()
        ):
            return "its scales are stored as exponents"
    if method == "compressed-tensors":
        groups = settings.get("config_groups")
        parts = list(groups.values()) if isinstance(groups, dict) else []
        formats = [settings, *(part for part in parts if isinstance(part, dict))]
        named = {str(part["format"]) for part in formats if part.get("format")} - {"mixed-precision"}
        sparse = settings.get("sparsity_config")
        if isinstance(sparse, dict) and sparse.get("format"):
            named.add(str(sparse["format"]))
        unknown = sorted(named.difference(_COMPRESSED))
        if unknown:
            return f"only these of its variants are expanded rightly: {', '.join(_COMPRESSED)}"
    return None


def _check_settings(
    name: str, form: CheckpointFormat, where: str, dtype: str, has_gpu: bool | None, num_ranks: int
) -> None:
    """Refuse settings with which a served form is not."""
    if form.package is not None and find_spec(form.package) is None:
        package = form.package.replace("_", "-")
        raise ModelLoadError(
            f"{name} stores its weights as {form.title} ({where}), which is {form.served}, and that is not "
            f"installed: `pip install {package}`, or {_REMEDY}."
        )
    if num_ranks > 1 and not form.on_ranks:
        raise ModelLoadError(
            f"{name} stores its weights as {form.title} ({where}), which is not split over ranks: leave "
            "--tensor-parallel out."
        )
    if has_gpu and not form.on_gpu:
        raise ModelLoadError(
            f"{name} stores its weights as {form.title} ({where}), which radixkv computes on machines "
            f"without a GPU alone, {form.served}. For a GPU, {_REMEDY}."
        )
    if form.dtypes and dtype not in form.dtypes:
        choices = " or ".join(f"--dtype {each}" for each in form.dtypes)
        raise ModelLoadError(
            f"{name} stores its weights as {form.title} ({where}), which is {form.served}, on a CPU: pass "
            f"{choices}, or {_REMEDY}."
        )


def _stray(
    tensors: Mapping[str, StoredTensor], form: CheckpointFormat | None
) -> tuple[str, list[str]] | None:
    """Return a form and the tensors that show it, where the folder's own form does not explain them."""
    own = re.compile("(?!)" if form is None else form.tensors)
    others = sorted(name for name in tensors if not own.fullmatch(_last(name)))
    for title, pattern in _TELLING.items():
        names = [name for name in others if re.fullmatch(pattern, _last(name))]
        if names:
            return title, names
    if form is None:
        pairs = [name for name in others if _last(name) == "biases" and f"{name[:-6]}scales" in tensors]
        if pairs:
            return "MLX", pairs
    types = () if form is None else form.types
    narrow = [
        name
        for name in others
        if tensors[name].dtype.startswith(("F8", "F6", "F4"))
        and not (tensors[name].dtype in types and form is not None and f"{name}{form.scale}" in tensors)
    ]
    if narrow:
        return "floats of 8 bits or less without a scale", narrow
    whole = [name for name in others if _is_weight(name, tensors[name]) and tensors[name].dtype not in types]
    return ("whole numbers", whole) if whole else None


def _is_weight(name: str, tensor: StoredTensor) -> bool:
    """Return True for a matrix that is no plain floats; masks and tables of indices are called otherwise."""
    is_matrix = tensor.num_dimensions > 1 and _WEIGHT.fullmatch(_last(name)) is not None
    return is_matrix and tensor.dtype not in _PLAIN_TYPES and not tensor.dtype.startswith("F")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


_REMEDY = "give the model's folder in bfloat16 or float16, or a GGUF file of it"


def _refusal(name: str, title: str, where: str, reason: str | None = None) -> ModelLoadError:
    because = f", because {reason}" if reason else ""
    return ModelLoadError(
        f"{name} stores its weights as {title} ({where}), which radixkv does not serve{because}. Without "
        f"their scales its answers would be wrong: {_REMEDY}."
    )
