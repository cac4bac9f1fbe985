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
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.errors import ModelLoadError
from radixkv.model.loading.weight_files import StoredTensor


@dataclass(frozen=True, slots=True)
class StoredForm:
    """A folder's own description of the form of its weights.

    Attributes:
        method: key of `FORMATS`.
        settings: its `quantization_config`, or what stands for it.
    """

    method: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """One stored form of weights.

    Attributes:
        title: what messages call it.
        served: what becomes of its weights on a GPU; None: it is refused.
        on_cpu: the same on a CPU.
        variants: what of it is served, where that is not all.
        types: of its weights in files, besides plain floats.
        tensors: pattern of the last part of names of the tensors beside its weights.
        scale: what follows a weight's name in the name of its scale; empty: in other ways.
    """

    title: str
    served: str | None = None
    on_cpu: str | None = None
    variants: str = ""
    types: tuple[str, ...] = ()
    tensors: str = ""
    scale: str = ""


_PACKED = "as stored without `--dtype`, else expanded to it"
_TILED = "as stored"
_WHOLE_ROWS = "as stored where rows are whole blocks, else expanded to `--dtype`"
_SCALES_BESIDE = r"(weight|input|output|[kvq]|kv|prob_output)_scale|weight_scale_inv"

#: `quant_method` of a `quantization_config` -> form. Those with a reader in `stored_forms` are read by it;
#: transformers computes the others that are served.
FORMATS: Mapping[str, CheckpointFormat] = {
    "mxfp4": CheckpointFormat(
        "MXFP4",
        _TILED,
        _PACKED,
        variants="experts as gpt-oss has them",
        types=("U8",),
        tensors=r"\w+_(blocks|scales)",
    ),
    "fp8": CheckpointFormat(
        "FP8",
        _TILED,
        _PACKED,
        variants="blocks of `weight_block_size`, or one scale a weight; scales of any float, or exponents",
        types=("F8_E4M3", "F8_E5M2"),
        tensors=r"\w+_scale_inv|(activation|input|[kv])_scale",
        scale="_scale_inv",
    ),
    "compressed-tensors": CheckpointFormat(
        "compressed-tensors",
        _TILED,
        _PACKED,
        variants=(
            "FP8 and INT8 with scales for tensors, channels, groups or blocks, static and dynamic; whole "
            "numbers of 2 to 8 bits, packed or one a byte, with zero points and activation order; NVFP4, "
            "MXFP4, MXFP8; also with rotated weights"
        ),
        types=("F8_E4M3", "I8", "I32", "U8"),
        tensors=(
            r"(weight|input|output|[kvq])_(scale|zero_point)|weight_(packed|shape|g_idx)"
            r"|(weight|input)_global_scale"
        ),
        scale="_scale",
    ),
    "modelopt": CheckpointFormat(
        "ModelOpt",
        _TILED,
        _PACKED,
        variants=(
            "FP8, NVFP4, MXFP4, MXFP8, INT8 and INT4, also smoothed (AWQ, SmoothQuant), in all layers or in "
            "each its own (MIXED_PRECISION), with `quantization_config` or `hf_quant_config.json`"
        ),
        types=("F8_E4M3", "U8", "I8"),
        tensors=rf"{_SCALES_BESIDE}|weight_scale_2|pre_quant_scale",
        scale="_scale",
    ),
    "fbgemm_fp8": CheckpointFormat(
        "FBGEMM FP8",
        _TILED,
        _PACKED,
        types=("F8_E4M3",),
        tensors=r"(weight|input)_scale|input_scale_ub",
        scale="_scale",
    ),
    "quark": CheckpointFormat(
        "Quark",
        _TILED,
        _PACKED,
        variants="FP8 with a scale for each weight or channel",
        types=("F8_E4M3",),
        tensors=_SCALES_BESIDE,
        scale="_scale",
    ),
    "bitsandbytes_4bit": CheckpointFormat(
        "bitsandbytes, 4 bits",
        _WHOLE_ROWS,
        _WHOLE_ROWS,
        variants="NF4 and FP4, also with scales in 8 bits",
        types=("U8",),
        tensors=r"(nested_)?(absmax|quant_map)|quant_state|bitsandbytes__\w+",
    ),
    "bitsandbytes_8bit": CheckpointFormat(
        "bitsandbytes, 8 bits",
        _TILED,
        _PACKED,
        variants="as weights: outliers of inputs are not looked for",
        types=("I8",),
        tensors=r"SCB|weight_format",
    ),
    "torchao": CheckpointFormat(
        "torchao",
        _TILED,
        _PACKED,
        variants="`Int4Tensor`, `Int8Tensor`, `Float8Tensor` or `IntxUnpackedToInt8Tensor`",
        types=("F8_E4M3", "I8"),
        tensors=r"_\w+_(qdata|scale|zero_point)|\w+:(qdata|scale|zero_point)",
    ),
    "mlx": CheckpointFormat(
        "MLX",
        _TILED,
        _PACKED,
        variants="affine of 2 to 8 bits, mxfp4, nvfp4, mxfp8; experts, too, where tensors keep their names",
        types=("U32", "I32"),
        tensors=r"scales|biases",
    ),
    "awq": CheckpointFormat(
        "AWQ",
        _TILED,
        _PACKED,
        variants="4 bits in the layout of GEMM",
        types=("I32",),
        tensors=r"qweight|qzeros|scales",
    ),
    "gptq": CheckpointFormat(
        "GPTQ",
        _TILED,
        _PACKED,
        variants="2, 3, 4 and 8 bits, both versions, with and without activation order, `dynamic`",
        types=("I32",),
        tensors=r"qweight|qzeros|scales|g_idx",
    ),
    "auto-round": CheckpointFormat(
        "AutoRound",
        _TILED,
        _PACKED,
        variants="packed as AWQ or GPTQ, `extra_config`; MXFP4, MXFP8, NVFP4; FP8",
        types=("I32", "F8_E4M3", "U8"),
        tensors=(
            r"qweight|qzeros|scales|g_idx|weight_(packed|global_scale)|input_global_scale"
            r"|(weight|input)_scale|weight_scale_inv"
        ),
    ),
    "bitsandbytes": CheckpointFormat("bitsandbytes"),
    "nvfp4": CheckpointFormat("NVFP4"),
    "mxfp8": CheckpointFormat("MXFP8"),
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
#: Where they are looked for.
_READ_PLACES = ("quantization_config", "text_config.quantization_config", "quantization", _MODELOPT_FILE)
#: Variants of compressed-tensors that are read.
_COMPRESSED = (
    "dense", "naive-quantized", "float-quantized", "int-quantized", "pack-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
)  # fmt: skip
#: Formats of compressed-tensors with whole numbers, of any bits.
_WHOLE = ("pack-quantized", "int-quantized", "naive-quantized")
#: Places of transforms that are in the weights already.
_OFFLINE = ("weight_input", "weight_output")
_QUARK = (("fp8_e4m3", "per_tensor"), ("fp8_e4m3", "per_channel"))
#: ModelOpt's algorithm -> how it stores weights. Each layer of a mixed checkpoint has its own.
MODELOPT_ALGORITHMS: Mapping[str, str] = {
    "FP8": "F8_E4M3",
    "FP8_PER_CHANNEL_PER_TOKEN": "F8_E4M3",
    "FP8_PB_WO": "F8_E4M3",
    "NVFP4": "NVFP4",
    "W4A16_NVFP4": "NVFP4",
    "W4A8_NVFP4_FP8": "NVFP4",
    "NVFP4_AWQ": "NVFP4",
    "NVFP4_AWQ_NONE": "NVFP4",
    "W4A16_AWQ": "INT4",
    "W4A8_AWQ": "INT4",
    "W8A16": "I8",
    "W8A8_SQ_PER_CHANNEL": "I8",
    "MXFP4": "MXFP4",
    "W4A8_MXFP4_FP8": "MXFP4",
    "MXFP8": "MXFP8",
}
_MIXED = "MIXED_PRECISION"
#: MLX's modes -> their bits and inputs of a group; None: any.
MLX_MODES: Mapping[str, tuple[int, int] | None] = {
    "affine": None,
    "mxfp4": (4, 32),
    "nvfp4": (4, 16),
    "mxfp8": (8, 32),
}
_GPTQ_BITS = (2, 3, 4, 8)
#: Packings of AutoRound's floats -> beginnings of their data types, with their bits.
_FLOATS_OF_AUTO_ROUND: Mapping[str, tuple[tuple[str, int], ...]] = {
    "llm_compressor": (("mx_fp", 4), ("mx_fp", 8), ("nv_fp", 4)),
    "fp8": (("fp", 8),),
}

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
#: Names of the weights of one expert.
EXPERT = re.compile(
    r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<product>w[123]|(gate|up|down)_proj)\.weight"
)
_PLAIN_TYPES = frozenset({"F64", "F32", "F16", "BF16", "C64", "BOOL"})
_WEIGHT = re.compile(r"\w*(weight|_proj|w[123])")


def check_format(name: str, folder: Path, tensors: Mapping[str, StoredTensor]) -> StoredForm | None:
    """Refuse a folder whose weights are in a form that is not served.

    Args:
        name: the model, for messages.
        tensors: of its weight files.

    Returns:
        The form; None: weights are plain numbers.

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
        reason = _reason_against(method, settings)
        if where not in _READ_PLACES:
            reason = "it is not looked for in that place"
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
    return StoredForm(_method(found[0][1]), found[0][1]) if found else None


def scale_of(name: str, suffix: str, tensors: Container[str]) -> str:
    """Name of a weight's scale: its own with a suffix, or that of all experts of its layer.

    transformers saves experts one by one and their scales as one tensor, under its own names of products.
    """
    expert = None if f"{name}{suffix}" in tensors else EXPERT.fullmatch(name)
    if expert is None:
        return f"{name}{suffix}"
    product = "down_proj" if expert["product"] in ("w2", "down_proj") else "gate_up_proj"
    return f"{expert['experts']}.{product}{suffix}"


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


def _reason_against(method: str, settings: Mapping[str, Any]) -> str | None:
    """Return why a variant of a served form is not served; None: it is."""
    if method == "fp8":
        size = settings.get("weight_block_size")
        pair = (
            isinstance(size, list) and len(size) == 2 and all(type(each) is int and each > 0 for each in size)
        )
        if size is not None and not pair:
            return f"weight_block_size is {size!r:.60}, expected two numbers"
    if method == "modelopt":
        return _reason_against_algorithms(settings)
    if method in ("awq", "gptq", "auto-round"):
        return _reason_against_words(method, settings)
    if method == "quark":
        weight = (settings.get("global_quant_config") or {}).get("weight") or {}
        schemes = (weight.get("dtype"), weight.get("qscheme")) if isinstance(weight, dict) else (None, None)
        if schemes not in _QUARK or settings.get("layer_quant_config"):
            return "only FP8 with a scale for each weight or channel is read, in all layers alike"
    if method == "mlx" and settings.get("mode", "affine") not in MLX_MODES:
        return f"it is of the mode {settings['mode']!r:.40}; read are {', '.join(MLX_MODES)}"
    return _reason_against_groups(settings) if method == "compressed-tensors" else None


def modelopt_algorithms(settings: Mapping[str, Any]) -> frozenset[str]:
    """Names of the algorithms of a checkpoint of ModelOpt: one, or those of its layers."""
    whole = str(settings.get("quant_algo", "FP8")).upper()
    if whole != _MIXED:
        return frozenset((whole,))
    layers = settings.get("quantized_layers")
    own = layers.values() if isinstance(layers, dict) else ()
    return frozenset(str(each.get("quant_algo") if isinstance(each, dict) else each).upper() for each in own)


def _reason_against_algorithms(settings: Mapping[str, Any]) -> str | None:
    """`_reason_against` for ModelOpt."""
    found = modelopt_algorithms(settings)
    if not found:
        return "it has no quantized_layers, which say what is stored how"
    others = sorted(found.difference(MODELOPT_ALGORITHMS))
    if not others:
        return None
    named = f" (it has layers of {', '.join(others)})" if len(found) > 1 else ""
    return f"only these of its algorithms are read: {', '.join(MODELOPT_ALGORITHMS)}{named}"


def _reason_against_words(method: str, settings: Mapping[str, Any]) -> str | None:
    """`_reason_against` for AWQ, GPTQ and AutoRound."""
    for own in _settings_of_layers(settings):
        reason = _reason_against_words(method, {**settings, "dynamic": None, "extra_config": None, **own})
        if reason is not None:
            return f"of some layers, {reason}"
    packing = str(settings.get("packing_format", ""))
    if method == "auto-round" and packing.removeprefix("auto_round:") in _FLOATS_OF_AUTO_ROUND:
        return _reason_against_floats(packing.removeprefix("auto_round:"), settings)
    bits = settings.get("bits", settings.get("w_bit", 4))
    size = settings.get("group_size", settings.get("q_group_size", 128))
    if type(size) is not int or size < -1 or size == 0:
        return f"its group_size is {size!r:.40}, expected a number of inputs, or -1 for all"
    is_awq = method == "awq" or "awq" in packing
    if bits not in ((4,) if is_awq else _GPTQ_BITS):
        return f"its codes are of {bits!r:.20} bits"
    if is_awq and str(settings.get("version", "gemm")).lower() != "gemm":
        return f"its layout is {settings['version']!r:.40}; GEMM is read"
    if method == "auto-round" and not re.fullmatch(
        r"(auto_round:)?(auto_)?(gptq|awq)?(auto_round)?", packing
    ):
        return f"its packing_format is {packing!r:.60}; those of GPTQ, AWQ, llm_compressor and fp8 are read"
    form = settings.get("checkpoint_format", "gptq")
    if method == "gptq" and form not in ("gptq", "gptq_v2"):
        return f"its checkpoint_format is {form!r:.40}; gptq and gptq_v2 are read"
    return None


def _reason_against_floats(packing: str, settings: Mapping[str, Any]) -> str | None:
    """`_reason_against` for AutoRound's floats of 4 and 8 bits."""
    kind, bits = str(settings.get("data_type", "")), settings.get("bits")
    if not any(kind.startswith(start) and bits == each for start, each in _FLOATS_OF_AUTO_ROUND[packing]):
        return f"its codes are {kind or 'of no data_type'} of {bits!r:.20} bits in the packing {packing}"
    size = settings.get("weight_block_size")
    if size is not None and not (
        isinstance(size, list) and len(size) == 2 and all(type(each) is int and each > 0 for each in size)
    ):
        return f"weight_block_size is {size!r:.60}, expected two numbers"
    return None


def settings_of_layer(layer: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of one layer alone in a configuration of GPTQ, AWQ or AutoRound.

    GPTQ's `dynamic` has patterns, whose first match holds (those that begin with `-:` name layers that are
    plain); AutoRound's `extra_config` has names, or patterns.
    """
    own = dict(_by_layer(settings))
    if layer in own:
        return own[layer]
    for key, each in own.items():
        if not key.startswith("-:") and re.match(key.removeprefix("+:"), layer):
            return each
    return {}


def _by_layer(settings: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key in ("dynamic", "extra_config"):
        table = settings.get(key)
        for pattern, own in (table if isinstance(table, dict) else {}).items():
            yield pattern, own if isinstance(own, dict) else {}


def _settings_of_layers(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the own settings of layers that are quantised."""
    for pattern, own in _by_layer(settings):
        if not pattern.startswith("-:") and not (type(own.get("bits")) is int and own["bits"] >= 16):
            yield own


def _reason_against_groups(settings: Mapping[str, Any]) -> str | None:
    """`_reason_against` for the groups of compressed-tensors."""
    groups = settings.get("config_groups")
    parts = [part for part in groups.values() if isinstance(part, dict)] if isinstance(groups, dict) else []
    named = {str(part["format"]) for part in (settings, *parts) if part.get("format")} - {"mixed-precision"}
    sparse = settings.get("sparsity_config")
    if isinstance(sparse, dict) and sparse.get("format"):
        named.add(str(sparse["format"]))
    if named.difference(_COMPRESSED):
        return f"only these of its variants are read: {', '.join(_COMPRESSED)}"
    if not parts:
        return "it has no config_groups, which say what is stored how"
    for part in parts:
        targets = part.get("targets", [])
        if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
            return f"the targets of a group are {targets!r:.60}, expected names of layers"
        reason = _reason_against_scheme(part, str(part.get("format") or settings.get("format")))
        if reason is not None:
            return reason
    if settings.get("quantization_status") not in (None, "compressed"):
        return (
            f"its weights are not stored as codes (quantization_status {settings['quantization_status']!r})"
        )
    return _reason_against_transforms(settings.get("transform_config"))


def _reason_against_transforms(transforms: Any) -> str | None:
    """`_reason_against` for rotations (SpinQuant, QuIP): those of weights are in the files' numbers."""
    groups = transforms.get("config_groups") if isinstance(transforms, dict) else transforms
    if not groups:
        return None
    at_run_time = sorted(
        str(name)
        for name, each in (groups.items() if isinstance(groups, dict) else [("transform_config", None)])
        if not isinstance(each, dict)
        or not isinstance(each.get("apply"), list)
        or not each["apply"]
        or any(not isinstance(one, dict) or one.get("location") not in _OFFLINE for one in each["apply"])
    )
    if not at_run_time:
        return None
    return (
        f"its inputs or outputs are transformed at run time (transform_config: {', '.join(at_run_time)}); "
        "only rotations of weights are read, such as R1 and R2 of SpinQuant"
    )


def _reason_against_scheme(part: Mapping[str, Any], form: str) -> str | None:
    """`_reason_against` for one group of compressed-tensors."""
    scheme = part.get("weights")
    bits = scheme.get("num_bits", 8) if isinstance(scheme, dict) else 8
    whole = form in _WHOLE and type(bits) is int and 2 <= bits <= 8
    if bits != 8 and not whole and not (bits == 4 and form.endswith("fp4-pack-quantized")):
        return f"its numbers are of {bits} bits in the form {form}"
    return None


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
        and not (
            form is not None
            and tensors[name].dtype in types
            and scale_of(name, form.scale, tensors) in tensors
        )
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
