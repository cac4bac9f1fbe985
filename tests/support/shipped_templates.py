# SPDX-License-Identifier: Apache-2.0
"""Chat templates that models ship: each one's format, and whether a forced call continues its prompt exactly.

The templates belong to their models' authors and are not part of the project: `RADIXKV_CHAT_TEMPLATES` names
a folder of them, `*.jinja`. Without it the tests on them are skipped.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from radixkv.errors import InvalidRequestError
from radixkv.text.chat_formats.derive import shown_text
from radixkv.text.chat_formats.formats import probe_template
from radixkv.text.chat_formats.template_input import template_messages

FOLDER = os.environ.get("RADIXKV_CHAT_TEMPLATES", "")
NO_FOLDER = "RADIXKV_CHAT_TEMPLATES names no folder of chat templates"

EXACT = "exact"
DROPS = "the prompt opens the thinking, and the template drops it from the history"
CLOSES = "the template writes other marks of thinking into the history than into a prompt"
PLAN = "the template writes a plan before each call"
RESULTS = "exact at first; the template writes results otherwise once another answer follows them"
QUOTES = "exact but for strings with quotes, which the template writes without escapes"
VARIABLES = "the template wants variables of its own"
THOUGHTS = "exact without thoughts, which the template drops beside calls that it refuses to show"
#: A call after the first question is exact.
ARE_EXACT = (EXACT, RESULTS, QUOTES, THOUGHTS)
#: Template -> its format, and whether a forced call is exact in the next prompt, or why not.
TABLE = {
    "Apertus-8B-Instruct": ("apertus", RESULTS),
    "Apriel-1.6-15b-Thinker-fixed": ("apriel", DROPS),
    "Bielik-11B-v3.0-Instruct": ("hermes", EXACT),
    "ByteDance-Seed-OSS": ("seed", EXACT),
    "Cohere2MoE": ("command", EXACT),
    "CohereForAI-c4ai-command-r-plus-tool_use": ("command-r", PLAN),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("command", EXACT),
    "GLM-4.6": ("glm", EXACT),
    "GLM-4.7-Flash": ("glm", EXACT),
    "GigaChat3-10B-A1.8B": ("gigachat3", EXACT),
    "GigaChat3.1-10B-A1.8B": ("gigachat", EXACT),
    "HuggingFaceTB-SmolLM3-3B": ("smollm3", EXACT),
    "Kimi-K2-Instruct": ("kimi-k2", EXACT),
    "Kimi-K2-Thinking": ("kimi-k2", THOUGHTS),
    "Kimi-K3": ("kimi-k3", EXACT),
    "LFM2-8B-A1B": ("lfm2", EXACT),
    "LFM2.5-8B-A1B": ("lfm2", QUOTES),
    "LFM2.5-Instruct": ("lfm2", EXACT),
    "MiMo-VL": ("hermes", EXACT),
    "MiniMax-M1": ("minimax-m1", EXACT),
    "MiniMax-M2": ("minimax-m2", EXACT),
    "MiniMax-M3": ("minimax-m3", EXACT),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral-args", EXACT),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3-coder", EXACT),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron-v2", DROPS),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", RESULTS),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", RESULTS),
    "Qwen-QwQ-32B": ("hermes", CLOSES),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", EXACT),
    "Qwen-Qwen3-0.6B": ("hermes", EXACT),
    "Qwen3-Coder": ("qwen3-coder", EXACT),
    "Qwen3.5-4B": ("qwen3-coder", EXACT),
    "Reka-Edge": ("hermes", EXACT),
    "Spark2.5": ("glm", EXACT),
    "StepFun3.5-Flash": ("qwen3-coder", EXACT),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek", DROPS),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek", CLOSES),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek-v3.1", EXACT),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek-dsml", CLOSES),
    "deepseek-ai-DeepSeek-V4": ("deepseek-v4", EXACT),
    "deepseek-ai-DeepSeek-V4-Flash-0731": ("deepseek-v4", EXACT),
    "fireworks-ai-llama-3-firefunction-v2": ("firefunction", VARIABLES),
    "google-gemma-2-2b-it": ("gemma", EXACT),
    "google-gemma-4-31B-it": ("gemma4", CLOSES),
    "google-gemma-4-31B-it-interleaved": ("gemma4", CLOSES),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", EXACT),
    "ibm-granite-granite-4.0": ("hermes", EXACT),
    "ibm-granite-granite-4.1": ("hermes", EXACT),
    "inclusionai-ling-3.0-flash": ("glm", EXACT),
    "llama-cpp-deepseek-r1": ("deepseek", DROPS),
    "llama-cpp-rwkv-world": ("hermes", EXACT),
    "meetkai-functionary-medium-v3.1": ("functionary-v3.1", EXACT),
    "meetkai-functionary-medium-v3.2": ("functionary-v3.2", EXACT),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3", EXACT),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3", EXACT),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3", EXACT),
    "microsoft-Phi-3.5-mini-instruct": ("hermes", EXACT),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral-args", EXACT),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", EXACT),
    "moonshotai-Kimi-K2": ("kimi-k2", EXACT),
    "muse-glimmer": ("muse", EXACT),
    "openai-gpt-oss-120b": ("harmony", EXACT),
    "openbmb-MiniCPM5-1B": ("minicpm5", EXACT),
    "poolside-Laguna-S-2.1": ("glm", EXACT),
    "poolside-Laguna-XS-2.1": ("glm", EXACT),
    "poolside-Laguna-XS.2": ("glm", EXACT),
    "tencent-Hy3": ("hy3", EXACT),
    "unsloth-Apriel-1.5": ("apriel", EXACT),
    "unsloth-mistral-Devstral-Small-2507": ("mistral-args", EXACT),
    "upstage-Solar-Open-100B": ("solar", EXACT),
}

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "x"},
                "days": {"type": "integer", "description": "x"},
            },
            "required": ["city", "days"],
        },
    },
}
ASKED = {"role": "user", "content": "What is the weather?"}


class ShippedTemplate:
    """Chat template of a model, with its format and traits.

    Args:
        path: its file.
    """

    def __init__(self, path: Path) -> None:
        self.text = path.read_text(encoding="utf-8")
        found = probe_template(self.render, self.text, lambda text: False)
        self.format, self.traits = found.format, found.traits

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        """Render messages, as `RenderText` does."""
        try:
            rendered, _ = render_jinja_template(
                conversations=[list(messages)],
                tools=list(tools) if tools else None,
                chat_template=self.text,
                add_generation_prompt=True,
                bos_token="<BOS>",
                eos_token="<EOS>",
                **options,
            )
        except Exception as error:
            raise InvalidRequestError(str(error)) from error
        return str(rendered[0])

    def prompt(self, *said: Mapping[str, Any]) -> str:
        """Render a question, what the model and its tools said, and the beginning of an answer."""
        tools = [TOOL] if self.traits.tools else None
        given = template_messages([dict(ASKED), *map(dict, said)], [TOOL], self.format, self.traits)
        return shown_text(self.render, given, tools)


def templates() -> list[str]:
    """Return the names of the templates in the folder; none: no folder is named."""
    return sorted(path.stem for path in Path(FOLDER).glob("*.jinja")) if FOLDER else []


@functools.cache
def known(name: str) -> ShippedTemplate:
    """Return a template of the folder."""
    return ShippedTemplate(Path(FOLDER) / f"{name}.jinja")
