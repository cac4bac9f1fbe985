# SPDX-License-Identifier: Apache-2.0
"""Find out which causal architectures of the installed transformers are served: `docs/architectures.json`.

Each is built tiny and random, and goes through the checks that a model passes at load: its layers must reach
paged attention, and its logits must be transformers' own. Takes minutes; run it when transformers or the
code of models has changed, then `docs/generate_reference.py`, which makes the page from it.

    python docs/survey_architectures.py [MODEL_TYPE ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from radixkv.errors import ModelLoadError
from radixkv.model.attention.attention_hook import ATTENTION_NAME, register_attention_hook
from radixkv.model.attention.latent_attention import absorb_latents
from radixkv.model.attention.own_attention import call_hook_from_own_attention, has_own_attention
from radixkv.model.loading.model_checks import check_config, check_model

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import tiny_configs
from tiny_configs import HYBRID_FAMILIES, SHAPES

RESULT = Path(__file__).with_name("architectures.json")
_LARGEST = 20_000_000
#: Fields of configurations and their small values; fields that a configuration lacks are left out.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 320),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size_mlp", "d_ff"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "v_head_dim", "kv_channels", "attention_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "hidden_size_per_layer_input", "laurel_rank"), 8),
    **dict.fromkeys(("kv_lora_rank", "global_head_dim"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "index_topk"), 256),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 48
    ),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("pad_token_id", "eos_token_id"), 2),
    "bos_token_id": 1,
    "q_lora_rank": 24,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "sliding_window": 5,
}
#: Sizes of single families whose parts do not fit together by rule.
_OWN_SIZES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "axk2": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma4_unified_text": SHAPES["gemma4"][1],
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str) -> Any:
    """A small configuration: that of the tests where they have one, else one by rule.

    Raises whatever the class does where its parts no longer fit together.
    """
    for name, (kind, _) in SHAPES.items():
        if kind == model_type:
            return tiny_configs.tiny_config(name)
    if model_type in HYBRID_FAMILIES:
        return tiny_configs.tiny_config(model_type)
    kind = CONFIG_MAPPING[model_type]
    whole = kind()
    sizes = {name: size for name, size in _SIZES.items() if _has(whole, name)}
    sizes |= _OWN_SIZES.get(model_type, {})
    if model_type in ("phi", "gpt_neox", "persimmon", "stablelm", "deepseek_v2", "deepseek_v3", "minicpm3"):
        sizes.pop("num_key_value_heads", None)
    return kind(**sizes)


def _has(config: Any, name: str) -> bool:
    try:
        return getattr(config, name, None) is not None
    except Exception:  # it differs by layer
        return True


def survey(model_type: str) -> tuple[str, str]:
    """`served` or `refused`, and why it is refused."""
    try:
        text = CONFIG_MAPPING[model_type]().get_text_config(decoder=True)
        if text.model_type != model_type:
            return _survey_text_half(text.model_type)
        config = tiny_config(model_type)
        limit = check_config("it", config, None)
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if size > _LARGEST:
            return "not tried", f"no small model of it could be made ({size // 10**6} million parameters)"
        own = has_own_attention(model_type)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager" if own else register_attention_hook(), dtype=torch.float32
        ).eval()
        generator = torch.Generator().manual_seed(0)
        for parameter in model.requires_grad_(False).parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else 0.1 * noise)
        if own:
            call_hook_from_own_attention(model)
        absorb_latents(model, ATTENTION_NAME)
        check_model("it", model, limit)
    except ModelLoadError as error:
        return "refused", reason_of(str(error))
    except Exception as error:  # whatever a class does with a configuration it was not made for
        if isinstance(error, KeyError) and ATTENTION_NAME in str(error):
            return "refused", "it does not go through transformers' attention interface"
        print(f"  {model_type}: {error!r:.300}", flush=True)
        return "not tried", f"no small model of it could be made ({type(error).__name__})"
    return "served", ""


def _survey_text_half(model_type: str) -> tuple[str, str]:
    """The same of a model that reads more than text, by the type of its text half."""
    status, reason = survey(model_type)
    if status == "served":
        return "as text", f"it reads more than text; of that, its text half is served, as `{model_type}`"
    return status, f"it reads more than text; its text half, `{model_type}`: {reason}"


def reason_of(message: str) -> str:
    """The reason in an error of the checks."""
    if "can't serve: " in message:
        message = message.split("can't serve: ")[1].split(". These work")[0]
    return " ".join(message.split())[:220]


def main() -> None:
    names = sys.argv[1:] or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    for name in names:
        status, reason = survey(name)
        found[name] = {"class": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name], "status": status, "reason": reason}
        text = json.dumps(dict(sorted(found.items())), indent=1, ensure_ascii=False)
        RESULT.write_text(text + "\n", encoding="utf-8")
        print(f"{name:28s} {status:10s} {reason[:150]}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
