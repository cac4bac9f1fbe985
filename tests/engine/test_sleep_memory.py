# SPDX-License-Identifier: Apache-2.0
"""Memory of a process that sleeps, as Linux counts it."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import save_tiny_model

MIB = 2**20
WIDE = {"hidden_size": 1024, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16}
KV_BYTES = 2 * 2 * 1024 * 4  # of a token: two layers
TOKENS = 1500


def measured(folder: str) -> dict[str, float]:
    """Return the process's memory without files, in bytes, awake and at both levels; in a fresh process."""
    from radixkv import LLM, SamplingParams

    found: dict[str, float] = {}

    def note(name: str) -> None:
        gc.collect()
        pages = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        found[name] = int(pages["RssAnon"].split()[0]) * 1024

    prompt = [3 + i % 240 for i in range(TOKENS)]
    params = SamplingParams(temperature=0.0, max_tokens=2)
    with LLM(str(folder), device="cpu", num_blocks=200, warm_up="off") as llm:
        for name in ("first", "awake"):
            llm.generate([prompt], params, progress=False)
            note(name)
        llm.sleep(1)
        note("level 1")
        llm.wake_up()
        llm.generate([prompt], params, progress=False)
        llm.sleep(2)
        note("level 2")
        llm.wake_up()
        llm.generate([prompt], params, progress=False)
        note("awake again")
        llm.update_weights(folder)
        llm.generate([prompt], params, progress=False)
        note("updated")
        llm.update_weights(folder)
        llm.generate([prompt], params, progress=False)
        note("updated again")
        llm.sleep(2)
        note("level 2 after updates")
    return found


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux alone")
def test_sleep_gives_memory_back(tmp_path):
    folder = save_tiny_model(tmp_path / "model", "llama", head_dim=64, max_position_embeddings=4096, **WIDE)
    weights = (folder / "model.safetensors").stat().st_size
    program = f"import json, runpy; measured = runpy.run_path({__file__!r})['measured']\n"
    program += f"print(json.dumps(measured({str(folder)!r})))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    awake, kv = found["awake"], TOKENS * KV_BYTES
    assert 0.9 * kv < awake - found["level 1"] < 1.5 * kv + 8 * MIB
    assert 0.9 * (weights + kv) < awake - found["level 2"] < 1.5 * (weights + kv)
    assert abs(found["awake again"] - awake) < 0.3 * weights
    assert abs(found["updated again"] - found["updated"]) < 0.3 * weights, "the earlier weights stay"
    assert awake - found["level 2 after updates"] > 0.8 * (weights + kv)
