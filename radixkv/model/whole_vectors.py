# SPDX-License-Identifier: Apache-2.0
"""Activations on a CPU whose values do not depend on their place in a step's rows, for deterministic mode.

torch computes most of a tensor in whole vectors of a processor, and the few values after the last one by
another function, which rounds otherwise. Each thread has such a rest, so that with three threads a silu of
512 rows differs in its last bits from that of one row. Here every value is computed in a whole vector:

    values, padded to whole vectors    pieces that torch gives to one thread
    [0 1 2 3 4 5 6 . ]                 [0 1 2 3] [4 5 6 . ]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Values that any vector loop of torch takes at once.
_VECTOR = 64
# At most so many are given to one thread together (torch's grain size); of slower functions fewer.
_GRAIN, _SHORT_GRAIN = 32768, 2048
_ACTIVATIONS = frozenset(
    {F.silu, F.gelu, F.softplus, F.sigmoid, F.tanh, F.mish, F.elu}
    | {torch.sigmoid, torch.tanh, torch.exp, torch.cos, torch.sin, torch.erf}
    | {Tensor.sigmoid, Tensor.tanh, Tensor.exp, Tensor.cos, Tensor.sin, Tensor.erf}
)
_QUICK = frozenset({F.silu, F.sigmoid, torch.sigmoid, Tensor.sigmoid, F.tanh, torch.tanh, Tensor.tanh})


class WholeVectors(TorchFunctionMode):
    """Within it, activations are computed in whole vectors."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ACTIVATIONS and args and isinstance(args[0], Tensor) and args[0].dim():
            grain = _GRAIN if func in _QUICK else _SHORT_GRAIN
            return _in_whole_vectors(lambda x: func(x, *args[1:], **kwargs), args[0], grain)
        return func(*args, **kwargs)


def _in_whole_vectors(activation: Callable[[Tensor], Tensor], x: Tensor, grain: int) -> Tensor:
    """Return an elementwise function of x, each value the same wherever it stands."""
    count = x.numel()
    if count <= grain and count % _VECTOR == 0 and x.is_contiguous():
        return activation(x)
    padded = F.pad(x.reshape(-1), (0, -count % _VECTOR))
    return torch.cat([activation(part) for part in padded.split(grain)])[:count].reshape(x.shape)
