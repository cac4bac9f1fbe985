# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: C408
"""Tiny random models that see, their settings for images, and transformers' own answers."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from radixkv.images.image_files import DecodedImage, decode_image
from tests.support.scripted_images import file_of, picture
from tests.support.tiny_configs import tiny_config
from tests.support.tiny_models import byte_level_tokenizer, randomize

#: Ids of control tokens, behind those of the tokenizer.
START, END, IMAGE, VIDEO = 321, 322, 323, 324
VOCAB_SIZE = 344
TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
#: Control tokens of families in which text stands between rows of an image.
MORE_TOKENS = ["[IMG_BREAK]", "[IMG_END]", "<img>", "</img>", "<fake_token_around_image>"]
MORE_TOKENS += [
    f"<|{name}|>" for name in ("image_start", "tile_x_separator", "tile_y_separator", "image_end")
]
#: What stands for an image in a prompt, where that is no image's token.
_PLACEHOLDERS = {"aya_vision": "<image>", "llama4": "<|image|>"}
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_ROPE = dict(rope_type="default", rope_theta=10_000.0, mrope_section=[2, 3, 3])
_INTERLEAVED = dict(_ROPE, mrope_interleaved=True, partial_rotary_factor=1.0)
_TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, tie_word_embeddings=False,
    bos_token_id=1, eos_token_id=2, pad_token_id=2,
)  # fmt: skip
_TOWER: dict[str, Any] = dict(
    depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64, patch_size=8,
    spatial_merge_size=2, temporal_patch_size=2,
)  # fmt: skip
_IDS = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, decoder_sparse_step=1)
_DEEP = dict(_TOWER, deepstack_visual_indexes=[0, 1], num_position_embeddings=64)
_STATES = dict(_INTERLEAVED, partial_rotary_factor=1.0)
_PIXELS: dict[str, Any] = dict(
    image_processor_type="Qwen2VLImageProcessor", patch_size=8, merge_size=2, temporal_patch_size=2,
    size=dict(shortest_edge=16 * 16, longest_edge=16 * 16 * 80),
)  # fmt: skip


_PLAIN = dict(_TEXT, max_position_embeddings=512)
_CLIP: dict[str, Any] = dict(
    model_type="clip_vision_model", hidden_size=32, intermediate_size=48, num_hidden_layers=3,
    num_attention_heads=2, patch_size=8, image_size=32, projection_dim=32,
)  # fmt: skip
_PINPOINTS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]


_PIXTRAL: dict[str, Any] = dict(
    model_type="pixtral", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    head_dim=16, patch_size=8, image_size=96,
)  # fmt: skip
_SIGLIP: dict[str, Any] = dict(
    model_type="siglip_vision_model", hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=2, patch_size=8, image_size=32,
)  # fmt: skip
_WINDOWS: dict[str, Any] = dict(
    num_hidden_layers=4, sliding_window=24, layer_types=["sliding_attention", "full_attention"] * 2,
)  # fmt: skip
_SOFT: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    head_dim=16, patch_size=4, position_embedding_size=256,
)  # fmt: skip


def _delta(name: str) -> dict[str, Any]:
    text = tiny_config(name).to_dict()
    return {
        **text,
        "vocab_size": VOCAB_SIZE,
        "head_dim": 16,
        "rope_parameters": _STATES,
        "max_position_embeddings": 2048,
    }


#: Model type -> its configuration, and its settings for images.
_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        dict(
            text_config=dict(_TEXT, rope_parameters=_ROPE),
            vision_config=dict(
                depth=2, embed_dim=32, hidden_size=64, mlp_ratio=2, num_heads=2, patch_size=8,
                spatial_merge_size=2, temporal_patch_size=2,
            ),
        ),
        _PIXELS,
    ),
    "qwen2_5_vl": (
        dict(
            text_config=dict(_TEXT, rope_parameters=_ROPE),
            vision_config=dict(_TOWER, window_size=32, fullatt_block_indexes=[1]),
        ),
        _PIXELS,
    ),
    "qwen3_vl": (dict(text_config=dict(_TEXT, rope_parameters=_INTERLEAVED), vision_config=_DEEP), _PIXELS),
    "qwen3_vl_moe": (
        dict(text_config=dict(_TEXT, **_EXPERTS, rope_parameters=_INTERLEAVED), vision_config=_DEEP),
        _PIXELS,
    ),
    "qwen3_5": (
        dict(text_config=_delta("qwen3_5_text"), vision_config=dict(_TOWER, num_position_embeddings=64)),
        _PIXELS,
    ),
    "qwen3_5_moe": (
        dict(text_config=_delta("qwen3_5_moe_text"), vision_config=dict(_TOWER, num_position_embeddings=64)),
        _PIXELS,
    ),
    "glm4v": (
        dict(
            text_config=dict(_TEXT, rope_parameters=dict(_ROPE, partial_rotary_factor=1.0)),
            vision_config=dict(
                depth=2, hidden_size=32, num_heads=2, out_hidden_size=64, intermediate_size=48, patch_size=8,
                spatial_merge_size=2, temporal_patch_size=2, image_size=64,
            ),
        ),
        dict(_PIXELS, image_processor_type="Glm4vImageProcessor"),
    ),
    "glm4v_moe": (
        dict(
            text_config=dict(
                _TEXT, rope_parameters=dict(_ROPE, partial_rotary_factor=1.0), n_routed_experts=4,
                num_experts_per_tok=2, moe_intermediate_size=48, n_shared_experts=1, first_k_dense_replace=1,
                n_group=1, topk_group=1,
            ),
            vision_config=dict(
                depth=2, hidden_size=32, num_heads=2, out_hidden_size=64, intermediate_size=48, patch_size=8,
                spatial_merge_size=2, temporal_patch_size=2, image_size=64,
            ),
        ),
        dict(_PIXELS, image_processor_type="Glm4vImageProcessor"),
    ),
    "mistral3": (
        dict(
            text_config=dict(_PLAIN, model_type="mistral"), spatial_merge_size=2,
            vision_config=dict(
                model_type="pixtral", hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=2, head_dim=16, patch_size=8, image_size=96,
            ),
        ),
        dict(image_processor_type="PixtralImageProcessor", size=dict(longest_edge=96), patch_size=16),
    ),
    "internvl": (
        dict(
            text_config=dict(_PLAIN, model_type="qwen2"), image_seq_length=4,
            vision_config=dict(
                hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                patch_size=[8, 8], image_size=[32, 32],
            ),
        ),
        dict(image_processor_type="GotOcr2ImageProcessor", size=dict(height=32, width=32), min_patches=1,
            max_patches=6),
    ),
    "llava": (
        dict(text_config=dict(_PLAIN, model_type="llama"), vision_config=_CLIP, image_seq_length=16),
        dict(image_processor_type="CLIPImageProcessor", size=dict(shortest_edge=32),
            crop_size=dict(height=32, width=32)),
    ),
    **{
        kind: (
            dict(
                text_config=dict(_PLAIN, model_type="llama"), scale_factor=2,
                vision_config=dict(
                    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                    patch_size=8, image_size=32,
                ),
            ),
            dict(image_processor_type=name, size=dict(longest_edge=96), max_image_size=dict(longest_edge=32)),
        )
        for kind, name in (("idefics3", "Idefics3ImageProcessor"), ("smolvlm", "SmolVLMImageProcessor"))
    },
    "llava_next": (
        dict(
            text_config=dict(_PLAIN, model_type="mistral"), vision_config=_CLIP,
            image_grid_pinpoints=_PINPOINTS,
        ),
        dict(image_processor_type="LlavaNextImageProcessor", size=dict(shortest_edge=32),
            crop_size=dict(height=32, width=32), image_grid_pinpoints=_PINPOINTS),
    ),
    "llava pixtral": (
        dict(
            text_config=dict(_PLAIN, model_type="mistral"), vision_config=_PIXTRAL, vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
        dict(image_processor_type="PixtralImageProcessor", size=dict(longest_edge=64), patch_size=8),
    ),
    "lighton_ocr": (
        dict(text_config=dict(_PLAIN, model_type="qwen3"), vision_config=_PIXTRAL, spatial_merge_size=2),
        dict(image_processor_type="PixtralImageProcessor", size=dict(longest_edge=96), patch_size=16),
    ),
    "aya_vision": (
        dict(
            text_config=dict(_PLAIN, model_type="cohere2", sliding_window=24), vision_config=_SIGLIP,
            downsample_factor=2, alignment_intermediate_size=64, image_token_id=VIDEO,
        ),
        dict(image_processor_type="GotOcr2ImageProcessor", size=dict(height=32, width=32), min_patches=1,
            max_patches=6),
    ),
    "vipllava": (
        dict(text_config=dict(_PLAIN, model_type="llama"), vision_config=_CLIP,
            vision_feature_layers=[-2, -1], vision_feature_layer=[-2, -1]),
        dict(image_processor_type="CLIPImageProcessor", size=dict(shortest_edge=32),
            crop_size=dict(height=32, width=32)),
    ),
    "deepseek_vl": (
        dict(text_config=dict(_PLAIN, model_type="llama"), vision_config=_SIGLIP),
        dict(image_processor_type="DeepseekVLImageProcessor", size=dict(height=32, width=32)),
    ),
    "got_ocr2": (
        dict(
            text_config=dict(_PLAIN, model_type="qwen2"),
            vision_config=dict(
                hidden_size=32, output_channels=16, num_hidden_layers=2, num_attention_heads=2, patch_size=8,
                image_size=128, window_size=7, global_attn_indexes=[1], mlp_dim=48,
            ),
        ),
        dict(image_processor_type="GotOcr2ImageProcessor", size=dict(height=128, width=128)),
    ),
    **{
        kind: (
            dict(
                text_config=dict(_TEXT, rope_parameters=dict(_ROPE, partial_rotary_factor=1.0)),
                vision_config=dict(
                    depth=2, hidden_size=32, num_heads=2, out_hidden_size=64, intermediate_size=48,
                    patch_size=8, spatial_merge_size=2, temporal_patch_size=2, image_size=64,
                ),
            ),
            dict(_PIXELS, image_processor_type="Glm46VImageProcessor"),
        )
        for kind in ("glm46v", "glm_ocr")
    },
    "paddleocr_vl": (
        dict(
            text_config=dict(_TEXT, rope_parameters=_ROPE),
            vision_config=dict(
                hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                patch_size=8, image_size=64, spatial_merge_size=2,
            ),
        ),
        dict(
            image_processor_type="PaddleOCRVLImageProcessor", patch_size=8, merge_size=2,
            temporal_patch_size=1, size=dict(shortest_edge=16 * 16, longest_edge=16 * 16 * 80),
        ),
    ),
    "exaone4_5": (
        dict(
            text_config=dict(_PLAIN, model_type="exaone4", sliding_window=24, sliding_window_pattern=2),
            vision_config=dict(
                _TOWER, window_size=32, fullatt_block_indexes=[1], num_key_value_heads=2),
        ),
        _PIXELS,
    ),
    "hyperclovax_vision_v2": (
        dict(
            text_config=dict(_PLAIN, model_type="hyperclovax"),
            vision_config=dict(
                _TOWER, model_type="qwen2_5_vl_vision", window_size=32, fullatt_block_indexes=[1]),
        ),
        _PIXELS,
    ),
    "video_llama_3": (
        dict(
            text_config=dict(_PLAIN, model_type="qwen2"),
            vision_config=dict(
                hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                patch_size=8,
            ),
        ),
        dict(
            image_processor_type="VideoLlama3ImageProcessor", patch_size=8, merge_size=2,
            size=dict(shortest_edge=16 * 16, longest_edge=16 * 16 * 80),
        ),
    ),
    "lfm3_vl": (
        dict(
            text_config=dict(
                _PLAIN, model_type="lfm3", num_hidden_layers=4, sliding_window=24,
                layer_types=["conv", "full_attention", "conv", "sliding_attention"],
            ),
            projector_hidden_size=64,
            vision_config=dict(
                hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=2, patch_size=8, spatial_merge_size=2, temporal_patch_size=2,
            ),
        ),
        _PIXELS,
    ),
    "llama4": (
        dict(
            text_config=dict(
                _PLAIN, intermediate_size_mlp=96, num_experts_per_tok=1, num_local_experts=2,
                attention_chunk_size=64, num_hidden_layers=4,
            ),
            vision_config=dict(
                hidden_size=32, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                patch_size=8, image_size=32, vision_output_dim=48, projector_input_dim=48,
                projector_output_dim=48,
            ),
            image_token_id=VIDEO,
        ),
        dict(image_processor_type="Llama4ImageProcessor", size=dict(height=32, width=32), max_patches=6),
    ),
    "gemma3": (
        dict(
            text_config=dict(_PLAIN, **_WINDOWS), mm_tokens_per_image=36, boi_token_index=IMAGE,
            eoi_token_index=END, image_token_id=VIDEO,
            vision_config=dict(
                hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                patch_size=8, image_size=96,
            ),
        ),
        dict(image_processor_type="Gemma3ImageProcessor", size=dict(height=96, width=96)),
    ),
    **{
        f"gemma4{name}": (
            dict(
                text_config=dict(_PLAIN, **_WINDOWS, global_head_dim=16, **more), vision_config=_SOFT,
                audio_config=None, boi_token_id=START, eoi_token_id=END, audio_token_id=VIDEO + 1,
            ),
            dict(image_processor_type="Gemma4ImageProcessor", patch_size=4, max_soft_tokens=70),
        )
        for name, more in (
            ("", dict(hidden_size_per_layer_input=0, use_bidirectional_attention="vision")),
            (" shared", dict(
                hidden_size_per_layer_input=8, num_kv_shared_layers=2,
                vocab_size_per_layer_input=VOCAB_SIZE,
            )),
        )
    },
}  # fmt: skip
TINY_VISION_MODELS = tuple(_MODELS)


def save_tiny_vision_model(folder: Path, kind: str, seed: int = 0) -> Path:
    """Write a random model that sees, its tokenizer and its settings for images, to `folder`."""
    options, pixels = _MODELS[kind]
    config = AutoConfig.for_model(kind.split()[0], **{**_IDS, **options})
    if "image_token_id" not in options:
        config.image_token_id = IMAGE
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    with torch.no_grad():  # what images say should show in the answers
        model.get_input_embeddings().weight.mul_(2.0)
        # transformers takes an image's token in an answer for an image.
        model.get_output_embeddings().weight[320:].zero_()
    model.save_pretrained(folder)
    tokenizer = byte_level_tokenizer()
    names = [_PLACEHOLDERS.get(kind, name) if name == "<|image_pad|>" else name for name in TOKENS]
    tokenizer.add_special_tokens({"additional_special_tokens": names + MORE_TOKENS})
    assert tokenizer.convert_tokens_to_ids(names) == [START, END, IMAGE, VIDEO]
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    return folder


def shown(seed: int, size: tuple[int, int] = (96, 64)) -> DecodedImage:
    """A picture as a server decodes it."""
    return decode_image(file_of(picture(seed, size)), 10**7)


#: A prompt: pieces of text as token ids, and images.
Parts = Sequence[list[int] | DecodedImage]


def template_ids(parts: Parts) -> tuple[list[int], list[DecodedImage]]:
    """Return the ids of a prompt as a chat template gives them, and its images."""
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, DecodedImage):
            ids += [START, IMAGE, END]
            images.append(part)
        else:
            ids += part
    return ids, images


class Reference:
    """transformers' own eager model of a folder."""

    def __init__(self, folder: Path, processor: Any) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
        self._processor = processor
        self._image = self.model.config.image_token_id

    @torch.inference_mode()
    def logits(self, parts: Parts, answer: Sequence[int] = (), *, is_causal: bool = False) -> torch.Tensor:
        """Return the logits [T, V] of a prompt and of an answer to it, computed at once.

        Args:
            is_causal: tokens of an image don't see each other, whatever the model says.
        """
        ids: list[int] = []
        pictures: list[Any] = []
        for part in parts:
            if isinstance(part, DecodedImage):
                pictures.append(Image.frombytes("RGB", (part.width, part.height), part.rgb))
                placed, _ = self._processor.place([IMAGE], [part])
                ids += [START, *(self._image if token >= 2**30 else token for token in placed), END]
            else:
                ids += part
        ids += answer
        row = torch.tensor([ids])
        types = (row == self._image).int()
        inputs: dict[str, Any] = {"mm_token_type_ids": types, "token_type_ids": types}
        if pictures:
            inputs |= self._processor.processor(
                images=pictures, return_tensors="pt", **self._processor.options
            )
        wanted = inspect.signature(self.model.forward).parameters
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        if is_causal:
            inputs = {name: value for name, value in inputs.items() if not name.endswith("type_ids")}
        inputs = {name: value for name, value in inputs.items() if name in wanted}
        found = self.model(input_ids=row, use_cache=False, **inputs)
        return found.logits[0]

    def answer(self, parts: Parts, count: int) -> list[int]:
        """Return the likeliest answer of this length, token by token, each time from the beginning."""
        tokens: list[int] = []
        for _ in range(count):
            tokens.append(int(self.logits(parts, tokens)[-1].argmax()))
        return tokens


def words(seed: int, count: int) -> list[int]:
    """Random token ids of text."""
    return np.random.default_rng(seed).integers(3, 320, count).tolist()
