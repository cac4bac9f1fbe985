# SPDX-License-Identifier: Apache-2.0
"""Latent attention on this CPU: chunks of prompts with absorbed and with expanded heads.

    python -m benchmarks.latents [--heads N] [--rounds N] [--json FILE]

One layer with DeepSeek V3's sizes and some of its heads attends the last queries of a context: folding,
kernel and unfolding, beside reading latents, expanding them and the kernel. Both take turns. Medians over
rounds of CPU seconds, one thread; `chosen` is the way that the runner takes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_figures
from benchmarks.kernels.state_layers import in_turns
from radixkv.model.attention.expanded_latents import Expansion
from radixkv.model.attention.latent_attention import Latents
from radixkv_kernels import KVSpec, make_backend, make_kv

SIZES = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
#: Queries, and tokens of the context, theirs included.
CHUNKS = ((64, 64), (128, 128), (256, 256), (512, 512), (128, 512), (256, 1024), (512, 1024), (512, 4096))
_BLOCK = 16
_SCALE = 0.07


def chunk(heads: int, queries: int, context: int, rounds: int) -> dict[str, Any]:
    """Times of one chunk both ways, and their largest difference."""
    draw = torch.Generator().manual_seed(0)
    rows = heads * (SIZES["qk_nope_head_dim"] + SIZES["v_head_dim"])
    product = SimpleNamespace(weight=torch.randn(rows, SIZES["kv_lora_rank"], generator=draw) / 20)
    latents = Latents(SimpleNamespace(kv_b_proj=product, **SIZES))
    size = SIZES["kv_lora_rank"] + SIZES["qk_rope_head_dim"]
    spec = KVSpec(
        1,
        -(-context // _BLOCK),
        _BLOCK,
        1,
        size,
        torch.float32,
        torch.device("cpu"),
        value_size=SIZES["kv_lora_rank"],
        value_in_key=True,
    )
    kv: Any = make_kv(spec)
    backend = make_backend(
        "cpu",
        num_query_heads=heads,
        spec=spec,
        compute_dtype=torch.float32,
        max_num_tokens=queries,
        max_num_seqs=1,
        max_model_len=context,
    )
    table = np.arange(spec.num_blocks, dtype=np.int32)
    key = torch.randn(context, 1, size, generator=draw)
    backend.write(kv, 0, key, key[..., : spec.value_size], torch.arange(context))
    plan = backend.plan(np.array([0, queries], np.int32), np.array([context], np.int32), [table])
    query = torch.randn(queries, heads, 192, generator=draw)
    expansion = Expansion(latents, "cpu", queries)

    def absorbed() -> torch.Tensor:
        return latents.fold_output(backend.attend(kv, 0, latents.fold_query(query), plan, scale=_SCALE))

    def expanded() -> torch.Tensor:
        stored, _ = kv.read(0, table, context, torch.float32)
        return expansion.attend(latents, query, stored[:, 0], _SCALE)

    difference = float((absorbed() - expanded()).abs().max())
    times = in_turns({"absorbed": absorbed, "expanded": expanded}, rounds)
    chosen = "expanded" if expansion.pays(queries, context) else "absorbed"
    return {"queries": queries, "context": context, **times, "chosen": chosen, "difference": difference}


@torch.inference_mode()
def main() -> None:
    """Measure, and print the times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {
        "heads": args.heads,
        "chunks": [chunk(args.heads, *each, args.rounds) for each in CHUNKS],
    }
    table = Table("queries", "context", "absorbed (s)", "expanded (s)", "chosen", "difference")
    for each in figures["chunks"]:
        times = (f"{each[name]:.3f}" for name in ("absorbed", "expanded"))
        table.add_row(
            str(each["queries"]), str(each["context"]), *times, each["chosen"], f"{each['difference']:.1e}"
        )
    Console().print(table)
    if args.json:
        write_figures(args.json, "latents", figures)


if __name__ == "__main__":
    main()
