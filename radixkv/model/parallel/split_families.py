# SPDX-License-Identifier: Apache-2.0
"""Architectures that ranks can share, and names of their products; read before torch is imported, too."""

from __future__ import annotations

from dataclasses import dataclass, replace

from radixkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ProductNames:
    """Names of the products in a family's layers.

    Attributes:
        merged: queries, keys and values: one product each, or one for all.
        order: outputs of one product for all: queries, keys, values ("blocks"), or head by head ("heads").
        mlps: modules of a layer besides attention, where it has them.
        halves: the MLP's first product is gate and up, one after the other.
    """

    attention: str = "self_attn"
    merged: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    order: str = "blocks"
    output: str = "o_proj"
    mlps: tuple[str, ...] = ("mlp",)
    first: tuple[str, ...] = ("gate_proj", "up_proj")
    halves: bool = False
    last: str = "down_proj"


_LLAMA = ProductNames()
_PHI = ProductNames(output="dense", first=("fc1",), last="fc2")
_PHI3 = ProductNames(merged=("qkv_proj",), first=("gate_up_proj",), halves=True)
_STARCODER = ProductNames(first=("c_fc",), last="c_proj")
_NEOX = ProductNames(
    attention="attention",
    merged=("query_key_value",),
    order="heads",
    output="dense",
    first=("dense_h_to_4h",),
    last="dense_4h_to_h",
)
_LFM2 = ProductNames(output="out_proj", mlps=("feed_forward",), first=("w1", "w3"), last="w2")
_JAMBA = ProductNames(mlps=("feed_forward",))
_GRANITE_HYBRID = ProductNames(
    mlps=("block_sparse_moe", "shared_mlp"), first=("input_linear",), halves=True, last="output_linear"
)
_NEMOTRON_H = ProductNames(attention="mixer", mlps=("mixer",), first=("up_proj",))
_GLM = replace(_LLAMA, first=("gate_up_proj",), halves=True)
_UNGATED = replace(_LLAMA, first=("up_proj",))

#: `model_type` of the architectures that can be split; of models that see, that of their text half.
SPLIT_MODEL_TYPES = {
    **dict.fromkeys(("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "seed_oss"), _LLAMA),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma4_text", "gemma3n_text", "vaultgemma"), _LLAMA),
    **dict.fromkeys(("granite", "granite_swa", "smollm3", "cohere", "cohere2", "cohere2_moe"), _LLAMA),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "minimax_m2", "phimoe", "mellum"), _LLAMA),
    **dict.fromkeys(("glm4_moe", "ernie4_5", "ernie4_5_moe", "dots1", "solar_open", "kolibri1"), _LLAMA),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "exaone4", "exaone_moe"), _LLAMA),
    **dict.fromkeys(("olmo", "olmo2", "olmo3", "olmoe", "flex_olmo", "afmoe", "aria_text"), _LLAMA),
    **dict.fromkeys(("hyperclovax", "cwm", "helium", "stablelm", "mimo_v2_flash", "laguna"), _LLAMA),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"), _LLAMA),
    **dict.fromkeys(("glm4v_moe_text", "paddleocr_vl_text"), _LLAMA),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "minimax"), _LLAMA),
    **dict.fromkeys(("kimi_linear", "olmo_hybrid"), _LLAMA),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"), _LLAMA),
    **dict.fromkeys(("glm4_moe_lite", "mistral4", "minicpm3", "youtu", "axk1"), _LLAMA),
    **dict.fromkeys(("glm", "glm4", "glm4v_text", "glm_ocr_text"), _GLM),
    **dict.fromkeys(("arcee", "nemotron", "apertus", "jais2"), _UNGATED),
    **dict.fromkeys(("bamba", "falcon_h1", "jamba", "llama4_text"), _JAMBA),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _LFM2),
    **dict.fromkeys(
        ("granitemoe", "granitemoe_swa", "granitemoeshared", "granitemoehybrid"), _GRANITE_HYBRID
    ),
    "lfm3": replace(_LFM2, output="o_proj"),
    "nemotron_h": _NEMOTRON_H,
    "gpt_oss": _LLAMA,
    "phi": _PHI,
    "phi3": _PHI3,
    "nanochat": replace(_LLAMA, first=("fc1",), last="fc2"),
    "starcoder2": _STARCODER,
    "gpt_neox": _NEOX,
    "persimmon": replace(_NEOX, attention="self_attn"),
}


def check_family(name: str, kind: str) -> None:
    """Refuse a model whose `model_type` can't be split.

    Raises:
        ConfigError: names the types that can be split.
    """
    if kind not in SPLIT_MODEL_TYPES:
        raise ConfigError(
            f"{name} has the architecture {kind}, which --tensor-parallel can't split; these it can: "
            f"{', '.join(sorted(SPLIT_MODEL_TYPES))}. Leave the flag out for this model"
        )


def check_num_ranks(name: str, size: int, heads: int, kind: str = "KV heads") -> None:
    """Refuse more ranks than a layer has heads to split.

    Args:
        heads, kind: the fewest heads of a layer, and their kind.

    Raises:
        ConfigError: gives the largest number.
    """
    if size > heads:
        raise ConfigError(
            f"--tensor-parallel {size} is more than the {heads} {kind} of {name}: a rank needs one at least "
            f"in every layer; use at most {heads}"
        )
