# SPDX-License-Identifier: Apache-2.0
"""Layers of heads between their products, interpreted: float64, and the same bits however rows come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from nightly import by_day

from radixkv_kernels.gated_heads import GatedHeads, GatedNorm
from radixkv_kernels.registry import make_state_backend
from radixkv_kernels.state_interface import plan_states
from radixkv_kernels.state_reference import reference_mix
from radixkv_kernels.states import GRID, PagedStates, StateShape, StateSpec

LENGTH = GRID + 5
GROUPS, HEADS, KEY, VALUE, TAPS = 1, 2, 5, 12, 4
#: Gated delta nets, KDA with and without a bound, Mamba 2 with and without a norm.
LAYERS = ("delta", "kda", "kda bounded", "ssd", "ssd gate alone")


def make_layer(name: str) -> GatedHeads:
    kind = name.split()[0]
    generator = torch.Generator().manual_seed(1)
    groups = HEADS if kind == "kda" else GROUPS
    channels = 2 * groups * KEY + HEADS * VALUE
    width = HEADS * VALUE

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    norm = {
        "delta": GatedNorm(normal(VALUE), 1e-6, VALUE),
        "kda": GatedNorm(normal(VALUE), 1e-5, VALUE, silu=False, wide=True),
        "kda bounded": GatedNorm(normal(VALUE), 1e-5, VALUE, silu=False, wide=True),
        "ssd": GatedNorm(normal(width), 1e-5, width, gate_first=True),
        "ssd gate alone": GatedNorm(None, 0.0, VALUE),
    }[name]
    return GatedHeads(
        kind,
        groups,
        HEADS,
        KEY,
        VALUE,
        normal(TAPS, channels),
        normal(channels) if kind == "ssd" else None,
        -torch.rand(HEADS, generator=generator),
        normal(HEADS * (KEY if kind == "kda" else 1)),
        norm,
        limits=(0.01, 3.0) if kind == "ssd" else (0.0, float("inf")),
        bound=-2.0 if "bounded" in name else 0.0,
        beta_scale=2.0 if kind == "delta" else 1.0,
        skip=normal(HEADS) if kind == "ssd" else None,
    )


def make_rows(of: GatedHeads, length: int = LENGTH, seed: int = 0) -> dict[str, torch.Tensor]:
    """Parts of the first product's rows; logits of all sizes."""
    generator = torch.Generator().manual_seed(seed)
    widths = {"mixed": of.filter.shape[1], "gate": of.value_width, "logits": of.num_logits, "betas": HEADS}
    row = torch.randn(length, sum(widths.values()), generator=generator)
    parts = dict(zip(widths, row.split(list(widths.values()), dim=1), strict=True))
    parts["logits"] *= 8
    if of.kind == "ssd":
        parts.pop("betas")
    return parts


def expected(of: GatedHeads, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """The layer in float64, one token after the other."""
    wide = {name: part.double() for name, part in rows.items()}
    mixed, _ = reference_mix("conv", (rows["mixed"],), (of.filter, of.bias, "silu"))
    keys, width = of.key_width, of.value_width
    x = wide["logits"] + of.logit_bias.double()
    rate = of.rate.double().repeat_interleave(of.num_logits // HEADS)
    step = F.softplus(x)
    if of.kind == "ssd":
        step = step.clamp(*of.limits)
    decay = of.bound * torch.sigmoid(-rate * x) if of.bound else rate * step
    split = [width, keys, keys] if of.kind == "ssd" else [keys, keys, width]
    first, second, third = mixed.split(split, dim=1)
    values = (first if of.kind == "ssd" else third).unflatten(1, (HEADS, VALUE))
    queries, key_rows = (third, second) if of.kind == "ssd" else (first, second)
    inputs = [part.unflatten(1, (of.groups, KEY)) for part in (queries, key_rows)]
    if of.kind == "ssd":
        out, _ = reference_mix("ssd", (*inputs, values * step[..., None], decay))
    else:
        if of.kind == "kda":
            decay = decay.unflatten(1, (HEADS, KEY))
        beta = of.beta_scale * torch.sigmoid(wide["betas"])
        out, _ = reference_mix(of.kind, (*inputs, values, decay, beta))
    if of.skip is not None:
        out = out + of.skip.double()[:, None] * values
    out, norm = out.flatten(1), of.norm
    gate = (F.silu if norm.silu else torch.sigmoid)(wide["gate"])
    if norm.gate_first:
        out = out * gate
    if norm.weight is not None:
        parts = out.unflatten(1, (-1, norm.width))
        out = (parts * (parts.square().mean(-1, keepdim=True) + norm.eps).rsqrt()).flatten(1)
        out = out * norm.weight.double().repeat(of.value_width // len(norm.weight))
    return out if norm.gate_first else out * gate


class Steps:
    """Sequences over one layer's states, whose memory is NaN at first."""

    def __init__(self, of: GatedHeads, *, deterministic: bool) -> None:
        self.of = of
        sizes = {
            "kda": (HEADS, KEY, VALUE),
            "delta": (of.groups, HEADS, KEY, VALUE),
            "ssd": (of.groups, HEADS, KEY, VALUE),
        }[of.kind]
        shapes = StateShape(0, "conv", (of.filter.shape[1], TAPS)), StateShape(0, of.kind, sizes)
        self.states = PagedStates(StateSpec(shapes, num_slots=8, num_rings=4, keeps_values=True))
        for memory in self.states.layers():
            memory.slots[:8] = memory.slots[9:] = float("nan")
            for ring in memory.rings:
                ring[:] = float("nan")
        self.backend = make_state_backend("triton", deterministic=deterministic)
        self.starts = [0] * 4

    def run(self, pieces: Sequence[tuple[int, dict[str, torch.Tensor], int]], padding: int = 0) -> Any:
        """The next rows of some sequences: (ring, all of its rows, count); outputs of each."""
        starts = np.array([self.starts[ring] for ring, _, _ in pieces])
        counts = np.array([count for _, _, count in pieces])
        rings = np.array([ring for ring, _, _ in pieces])
        bases = np.maximum(starts - 1, 0) // GRID * GRID
        targets = (starts + counts - 1) // GRID * GRID
        plan = plan_states(
            self.states.spec,
            np.cumsum([0, *counts]),
            starts,
            np.where(bases > 0, 2 * rings, -1),
            bases,
            rings,
            np.where(targets > bases, 2 * rings, -1),
            targets,
        )
        rows = {
            name: torch.cat(
                [
                    all_rows[name][start : start + count]
                    for start, (_, all_rows, count) in zip(starts, pieces, strict=True)
                ]
                + [pieces[0][1][name].new_full((padding, pieces[0][1][name].shape[1]), float("nan"))]
            )
            for name in pieces[0][1]
        }
        out = self.backend.mix_gated(self.states, 0, plan, self.of, **rows)
        assert not out[counts.sum() :].any()
        for ring, _, count in pieces:
            self.starts[ring] += count
        return out[: counts.sum()].split(counts.tolist())


def spread_of_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.std())


@pytest.mark.parametrize("name", by_day(LAYERS, "delta", "ssd"))
def test_pieces_and_batches_have_the_values_of_float64_and_the_bits_of_the_whole(name: str) -> None:
    """A prompt whole; in pieces and decodes, beside another request and padding."""
    of = make_layer(name)
    rows, others = make_rows(of), make_rows(of, seed=5)
    whole = Steps(of, deterministic=True).run([(1, rows, LENGTH)])[0]
    assert spread_of_error(whole, expected(of, rows)) < 2e-4
    for deterministic in (True, False):
        steps = Steps(of, deterministic=deterministic)
        found = []
        for count in (GRID - 3, 1, 4, 3):
            mine, _ = steps.run([(2, rows, count), (0, others, 2)], padding=2)
            found.append(mine)
        if deterministic:
            assert torch.equal(torch.cat(found), whole)
        assert spread_of_error(torch.cat(found), whole) < 2e-4


def test_decays_of_tiny_steps_keep_their_digits() -> None:
    """softplus of -12 is 6e-6, of which 1 + e keeps two digits: steps multiply values."""
    of = make_layer("ssd")
    of = GatedHeads(
        **{**of.__dict__, "limits": (0.0, float("inf")), "skip": None, "norm": GatedNorm(None, 0.0, VALUE)}
    )
    rows = make_rows(of, 8)
    rows["logits"] = -12.0 - of.logit_bias + 0 * rows["logits"]
    found = Steps(of, deterministic=True).run([(0, rows, 8)])[0]
    assert spread_of_error(found, expected(of, rows)) < 1e-4


def test_values_and_gates_of_16_bits() -> None:
    """What the product gave is rounded once: decays stay float32, outputs are what float64 gives, rounded."""
    of = make_layer("delta")
    rows = {name: part.bfloat16() for name, part in make_rows(of).items()}
    found = Steps(of, deterministic=True).run([(0, rows, LENGTH)])[0]
    assert found.dtype == torch.bfloat16
    error = (found.double() - expected(of, rows)).square().mean().sqrt() / expected(of, rows).std()
    assert error < 2e-2
