# SPDX-License-Identifier: Apache-2.0
"""Activations on a CPU whose values do not depend on their place in a step's rows, for deterministic mode.

torch computes most of a tensor in whole vectors of a processor, and the few values after the last one by
another function, which rounds otherwise. Each thread has such a rest, so that with three threads a silu of
512 rows differs in its last bits from that of one row. Here every value is computed in a whole vector:

    values, padded to whole vectors    pieces that torch gives to one thread
    [0 1 2 3 4 5 6 . ]                 [0 1 2 3] [4 5 6 . ]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Values that any vector loop of torch takes at once.
_VECTOR = 64
# Most numbers that a thread gets together (torch's grain size), and fewer for slower functions.
_GRAIN, _SHORT_GRAIN = 32768, 2048
_ACTIVATIONS = frozenset(
    {F.silu, F.gelu, F.softplus, F.sigmoid, F.tanh, F.mish, F.elu}
    | {torch.sigmoid, torch.tanh, torch.exp, torch.cos, torch.sin, torch.erf}
    | {Tensor.sigmoid, Tensor.tanh, Tensor.exp, Tensor.cos, Tensor.sin, Tensor.erf}
)
_QUICK = frozenset({F.silu, F.sigmoid, torch.sigmoid, Tensor.sigmoid, F.tanh, torch.tanh, Tensor.tanh})
#: Functions that rotary embeddings call.
_ANGLES = frozenset({torch.cos, torch.sin, Tensor.cos, Tensor.sin})


class WholeVectors(TorchFunctionMode):
    """Within it, activations are computed in whole vectors.

    Attributes:
        called: activations that were called so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: set[Callable[..., Any]] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ACTIVATIONS and args and isinstance(args[0], Tensor) and args[0].dim():
            self.called.add(func)
            grain = _GRAIN if func in _QUICK else _SHORT_GRAIN
            return _in_whole_vectors(lambda x: func(x, *args[1:], **kwargs), args[0], grain)
        return func(*args, **kwargs)


class AlignedActivations:
    """The activations of a model's steps, in whole vectors.

    To intercept every call of torch takes as long as a fifth of a small model's decode. Where the layers are
    radixkv's own, torch computes no more than the angles of rotary embeddings: as soon as a step of one row
    and one of several have shown that, calls are intercepted within these embeddings alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rotary = [each for each in model.modules() if "Rotary" in type(each).__name__]
        self._mode: WholeVectors | None = WholeVectors()
        self._seen: set[bool] = set()

    @contextmanager
    def step(self, num_rows: int) -> Iterator[None]:
        """Compute a step of this number of rows within."""
        mode = self._mode
        if mode is None:
            yield
            return
        with mode:
            yield
        self._seen.add(num_rows > 1)
        angles = mode.called & _ANGLES
        if len(self._seen) == 2 and mode.called == angles and (self._rotary or not angles):
            self._mode = None
            for module in self._rotary:
                module.forward = _within(WholeVectors(), module.forward)


def _within(mode: WholeVectors, forward: Callable[..., Any]) -> Callable[..., Any]:
    def aligned(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    return aligned


def _in_whole_vectors(activation: Callable[[Tensor], Tensor], x: Tensor, grain: int) -> Tensor:
    """Return an elementwise function of x, each value the same wherever it stands."""
    count = x.numel()
    if count <= grain and count % _VECTOR == 0 and x.is_contiguous():
        return activation(x)
    padded = F.pad(x.reshape(-1), (0, -count % _VECTOR))
    return torch.cat([activation(part) for part in padded.split(grain)])[:count].reshape(x.shape)
