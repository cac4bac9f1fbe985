# SPDX-License-Identifier: Apache-2.0
"""Matrix products whose rows do not depend on the number of rows, for deterministic mode.

A BLAS library picks another algorithm for a few rows than for many, so a token's activations differ in their
last bits between a decode step and a prompt chunk. Packed and int8 layers have rows that depend on nothing
else. For products left to a library: with the number of rows padded to a multiple of 16 (or
more) the algorithms of the libraries tried keep one order of additions per row. That is a property of library
and processor, not a promise: `choose_row_multiple` measures it for the model's own shapes when the engine
starts, and where no padding helps every product runs in tiles of a fixed number of rows.

See also: He et al., "Defeating Nondeterminism in LLM Inference" (Thinking Machines Lab, 2025).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from radixkv.errors import ConfigError
from radixkv.model.decoder_layers import StoredExperts
from radixkv.model.state_layers.registry import has_fixed_bits

# Multiples tried, smallest first: padding costs little in a chunk, but a lone decode pays for all its rows.
ROW_MULTIPLES = (16, 32, 64)
FIXED_TILE_ROWS = 64
#: Numbers that a probe computes at a time, at most: all of a step's rows but for the widest layers.
_PROBE_NUMBERS = 2**28


def check_supported(hf_config: Any, model: nn.Module) -> None:
    """Refuse models whose products mix rows in an order that depends on the batch.

    Raises:
        ConfigError: a mixture-of-experts model whose experts are left to torch, or a family with states whose
            other layers do so.
    """
    if not has_fixed_bits(hf_config):
        raise ConfigError(
            f"--deterministic does not hold for the family {hf_config.model_type}: its activations depend on "
            "the number of rows in their last bits; leave the flag out for this model"
        )
    experts = getattr(hf_config, "num_local_experts", None) or getattr(hf_config, "num_experts", None)
    if hf_config.model_type == "nemotron_h" and "moe" not in hf_config.layers_block_type:
        experts = None  # a default of its configuration
    if experts and experts > 1 and not _has_fixed_experts(model):
        raise ConfigError(
            f"--deterministic does not hold for mixture-of-experts models ({experts} experts): which rows "
            "are multiplied together depends on the batch; leave the flag out for this model (a GGUF file's "
            "experts that stay packed on a CPU are not affected, nor are those on a GPU whose router has a "
            "kernel)"
        )


def _has_fixed_experts(model: nn.Module) -> bool:
    """Return True if a row's bits depend on no other row in any routed experts and their routers."""
    experts = [each for each in model.modules() if isinstance(each, StoredExperts)]
    return bool(experts) and all(each.fixed_routes for each in experts)


def fix_rows(model: nn.Module) -> None:
    """Make all modules that can choose have rows whose bits do not depend on their number."""
    module: Any
    for module in model.modules():
        if hasattr(module, "fixed_rows"):
            module.fixed_rows = True


@torch.inference_mode()
def choose_row_multiple(model: nn.Module, max_rows: int) -> int:
    """The smallest number of rows to pad to so that no row of any linear layer depends on the others.

    Args:
        max_rows: most rows of a step: a library may choose another algorithm for any number up to that.

    Returns:
        1 when no product is left to a library, a multiple from `ROW_MULTIPLES`, or 0 when none holds: then
        use `use_fixed_tiles`.
    """
    layers: dict[tuple[int, int], nn.Module] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            layers.setdefault((module.in_features, module.out_features), module)
    if not layers:
        return 1
    dtype = next(model.parameters()).dtype
    device = next(model.parameters()).device
    for multiple in ROW_MULTIPLES:
        if all(
            _holds(layer, size[0], multiple, min(max_rows, _PROBE_NUMBERS // size[1]), dtype, device)
            for size, layer in layers.items()
        ):
            return multiple
    return 0


def _holds(
    layer: nn.Module, width: int, multiple: int, max_rows: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return True if rows are the same bits for several numbers of rows and places in the batch."""
    generator = torch.Generator(device=device).manual_seed(0)
    most = max(8 * multiple, -(-max_rows // multiple) * multiple)
    rows = torch.randn(most, width, generator=generator, device=device).to(dtype)
    expected = layer(rows)
    doubled = {multiple << i for i in range(most.bit_length())}
    for count in sorted(doubled | {3 * multiple, most - multiple}):
        for start in {0, 1, most - count}:
            if 0 < count <= most - start:
                own = layer(rows[start : start + count].contiguous())
                if not torch.equal(own, expected[start : start + count]):
                    return False
    return True


def use_fixed_tiles(model: nn.Module) -> None:
    """Make every linear layer work in tiles of `FIXED_TILE_ROWS` rows, the last one padded; slower, exact."""

    def tiled(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        whole = module.forward

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            flat = inputs.reshape(-1, inputs.shape[-1])
            count = flat.shape[0]
            padded = F.pad(flat, (0, 0, 0, -count % FIXED_TILE_ROWS))
            tiles = [whole(tile) for tile in padded.split(FIXED_TILE_ROWS)]
            return torch.cat(tiles)[:count].reshape(*inputs.shape[:-1], -1)

        return forward

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = tiled(module)  # type: ignore[method-assign,assignment]
