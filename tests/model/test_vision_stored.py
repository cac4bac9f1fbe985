# SPDX-License-Identifier: Apache-2.0
"""Models that see whose text half is quantised: towers stay floats, answers are those of the numbers."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from nightly import by_day

pytest.importorskip("numba")
pytest.importorskip("PIL")

from quantised_checkpoints import Writer, awq, block_fp8, channel_fp8, groups, int8, quantise
from tiny_vision_models import Reference
from vision_trials import Trial, answers, dialogues

_PLAIN = ["lm_head", "visual"]
_IGNORED = ["lm_head", "re:.*visual.*"]
FORMS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "fp8-channels": (channel_fp8, {**groups("float", "channel"), "ignore": _IGNORED}),
    "fp8-blocks": (
        partial(block_fp8, block=32),
        {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": _PLAIN},
    ),
    "awq": (
        awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 32,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": _PLAIN,
        },
    ),
    "int8": (int8, {**groups("int", "channel"), "ignore": _IGNORED}),
}


@pytest.mark.parametrize("form", by_day(FORMS, "fp8-blocks"))
@pytest.mark.parametrize("kind", by_day(["qwen2_5_vl", "qwen3_vl", "glm4v"], "qwen3_vl"))
def test_answers_are_those_of_the_numbers(kind: str, form: str, tmp_path: Path) -> None:
    write, settings = FORMS[form]
    trial = Trial(kind, tmp_path / "stored")
    plain = Path(shutil.copytree(trial.folder, tmp_path / "plain"))
    assert quantise(trial.folder, write, settings, plain=plain) > 0
    trial.reference, trial.known = Reference(plain, trial.processor), {}
    with trial.llm(dtype="float32") as llm:
        for parts in dialogues(trial):
            assert answers(llm, parts, parts) == [trial.expected(parts)] * 2
            assert answers(llm, parts) == [trial.expected(parts)]
    with trial.llm() as llm:  # as stored, or in 16 bits
        for parts in dialogues(trial):
            assert answers(llm, parts) == answers(llm, parts)
