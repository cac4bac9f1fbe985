# SPDX-License-Identifier: Apache-2.0
"""A process of radixkv's own loads a model without torch's compiler, and nothing stays of the stand-ins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
import transformers.models
from packaging.version import Version
from tiny_models import save_tiny_model

from radixkv import LLM, SamplingParams

#: Prints the tokens of a prompt, what was imported for nothing, whether the compiler's stand-in stays, and
#: the names of all models.
OWN_PROCESS = """
import json, sys
from radixkv.model.loading.lean_transformers import allow_lean_imports
allow_lean_imports()
from radixkv import LLM, SamplingParams
with LLM(sys.argv[1], num_blocks=64) as llm:
    outputs = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0))
unused = ("torch._dynamo", "torch.distributed.tensor", "scipy.optimize")
loaded = [name for name in unused if name in sys.modules]
import torch
from transformers.masking_utils import TransformGetItemToIndex
TransformGetItemToIndex().__enter__().__exit__(None, None, None)
import torch._dynamo
stays = torch.compiler.disable(len) is len or not hasattr(torch._dynamo, "optimize")
from transformers import models
print(json.dumps([outputs[0].outputs[0].token_ids, loaded, stays, sorted(set(models.__all__))]))
"""


def test_names_are_those_of_this_version() -> None:
    assert Version(transformers.__version__) < Version("5.24"), "do the names of lean_transformers still fit?"


@pytest.mark.nightly
def test_tokens_are_the_same_without_what_only_training_imports(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    process = subprocess.Popen(
        [sys.executable, "-c", OWN_PROCESS, str(folder)], stdout=subprocess.PIPE, text=True
    )
    with LLM(str(folder), num_blocks=64) as llm:
        outputs = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0))
    out, _ = process.communicate(timeout=120)
    names = sorted(set(transformers.models.__all__))
    assert json.loads(out) == [outputs[0].outputs[0].token_ids, [], False, names]
