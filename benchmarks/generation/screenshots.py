# SPDX-License-Identifier: Apache-2.0
"""What does a later turn of a chat with screenshots cost, beside the same number of text tokens?

    python -m benchmarks.screenshots [--rounds N] [--turns N] [--images N] [--json FILE]

An agent's session on a random Qwen2.5-VL of this size: hidden 256, 6 layers, a tower of 4. Each of the first
turns brings a screenshot of its own, and all turns send the whole history again, as clients do. Beside it is
the same session with text tokens in place of the images' tokens, as many. Turns of the two alternate on one
engine, in namespaces of their own. Printed are the times to the first token of the turns after the last
image, which hit through all images, their ratio by rounds, and how often the tower ran.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from benchmarks.figures import write_figures
from radixkv import LLM, SamplingParams
from radixkv.images.image_files import DecodedImage, image_of
from radixkv.scheduling.request import Request

VOCAB_SIZE = 4096
START, END, IMAGE, VIDEO, TURN, STOP = range(4090, 4096)
MARKS = {
    START: "<|vision_start|>",
    END: "<|vision_end|>",
    IMAGE: "<|image_pad|>",
    VIDEO: "<|video_pad|>",
    TURN: "<|im_start|>",
    STOP: "<|im_end|>",
}
CHAT_TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}{%- for part in message['content'] %}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{ part['text'] }}{%- endif %}{%- endfor %}{%- endif %}
{{- '<|im_end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{%- endif %}"""
SIZE = (640, 360)


def save_model(folder: Path) -> None:
    """Write the random model, a tokenizer (`w7` is token 7), a template, and settings for images."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32_768,
            "rope_parameters": rope,
        },
        vision_config={
            "depth": 4,
            "hidden_size": 160,
            "intermediate_size": 320,
            "num_heads": 4,
            "out_hidden_size": 256,
            "fullatt_block_indexes": [3],
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    names = [MARKS.get(i, f"w{i}") for i in range(VOCAB_SIZE)]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(list(MARKS.values()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=MARKS[STOP], pad_token=MARKS[STOP])
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    settings = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def screenshot(rng: np.random.Generator) -> DecodedImage:
    """Return a picture that no other is like."""
    from PIL import Image

    small = rng.integers(0, 256, (18, 32, 3), dtype=np.uint8)
    return image_of(Image.fromarray(small).resize(SIZE))


def first_token_s(llm: LLM, ids: list[int], images: Any, namespace: str) -> tuple[float, int]:
    """Return the seconds until a prompt has its first token, its images placed, and its cached tokens."""
    begin = time.perf_counter()
    processor = llm.engine.model.image_processor
    placed: Any = ()
    if images:
        assert processor is not None
        given, placed = processor.place(ids, images)
        ids = list(given)
    request = Request(ids, SamplingParams(max_tokens=1, temperature=0), images=placed, namespace=namespace)
    llm.engine.add(request)
    while not request.is_finished:
        llm.engine.step()
    return time.perf_counter() - begin, request.samples[0].num_cached_tokens


def session(llm: LLM, seed: int, turns: int, num_images: int) -> list[tuple[float, float]]:
    """Return the seconds to the first token of each turn, with images and with text in their place."""
    rng = np.random.default_rng(seed)
    processor = llm.engine.model.image_processor
    assert processor is not None
    per_image = processor.num_tokens(*SIZE)
    seeing: list[int] = rng.integers(3, 4000, 300).tolist()
    reading, images = list(seeing), list[DecodedImage]()
    times = []
    for turn in range(turns):
        if turn < num_images:
            images.append(screenshot(rng))
            seeing += [START, IMAGE, END]
            reading += [START, *rng.integers(3, 4000, per_image).tolist(), END]
        said = rng.integers(3, 4000, 60).tolist()
        seeing, reading = seeing + said, reading + said
        order: Any = ((seeing, images, f"s{seed}"), (reading, [], f"r{seed}"))
        measured = {
            bool(shown): first_token_s(llm, ids, shown, name)
            for ids, shown, name in order[:: 1 - 2 * (turn % 2)]
        }
        assert measured[True][1] == measured[False][1], "the two hit differently"
        times.append((measured[True][0], measured[False][0]))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=20, help="of a session (default: 20)")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        with LLM(folder, device="cpu", max_model_len=8192, num_blocks=4096, speculation="off") as llm:
            rounds = [
                session(llm, seed, arguments.turns, arguments.images) for seed in range(arguments.rounds)
            ]
            stats = llm.engine.stats().images
    assert stats is not None
    later = [[each[arguments.images :] for each in rounds][n] for n in range(arguments.rounds)]
    shown = [seconds for each in later for seconds, _ in each]
    text = [seconds for each in later for _, seconds in each]
    figures = {
        "turns": arguments.turns,
        "images": arguments.images,
        "encoded_per_image": stats.encoded / (arguments.images * arguments.rounds),
        "encode_ms": 1000 * stats.encode_s / stats.encoded,
        "later_turn_images_ms": 1000 * statistics.median(shown),
        "later_turn_text_ms": 1000 * statistics.median(text),
        "ratio": statistics.median(one / other for each in later for one, other in each),
    }
    for name, value in figures.items():
        print(f"{name:24} {value:.3f}")
    write_figures(arguments.json, "screenshots", figures)


if __name__ == "__main__":
    main()
