# SPDX-License-Identifier: Apache-2.0
"""How many kernels a GPU would launch: operators that compute something, and Triton launches.

Views and allocations launch nothing. Triton's launches are counted where its interpreter runs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

#: Allocations, and what only makes another tensor of the same memory.
_NOTHING = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "detach",
}


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Operators(TorchDispatchMode):
    def __init__(self, launched: Counter[str]) -> None:
        super().__init__()
        self.launched, self.paused = launched, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        # Operators like `to` and `reshape` copy where they can't give a view.
        is_view = func.is_view and (not isinstance(result, Tensor) or _memory(result) == _memory(args[0]))
        if not (self.paused or is_view or name in _NOTHING):
            self.launched[name] += 1
        return result


@contextmanager
def counted_kernels() -> Iterator[Counter[str]]:
    """Name of an operator or Triton kernel -> launches so far."""
    launched: Counter[str] = Counter()
    operators = _Operators(launched)
    run = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched[self.fn.__name__] += 1
        operators.paused = True  # the interpreter's own work
        try:
            return run(self, *args, **kwargs)
        finally:
            operators.paused = False

    interpreter.GridExecutor.__call__ = launch
    try:
        with operators:
            yield launched
    finally:
        interpreter.GridExecutor.__call__ = run


@contextmanager
def kernels_by_module(modules: Iterable[nn.Module]) -> Iterator[list[Counter[str]]]:
    """What each call of one of some modules launches, from step to step."""
    found: list[Counter[str]] = []
    before: list[Counter[str]] = []
    with counted_kernels() as launched:
        hooks = []
        for module in modules:
            hooks.append(module.register_forward_pre_hook(lambda *_: before.append(Counter(launched))))
            hooks.append(module.register_forward_hook(lambda *_: found.append(launched - before.pop())))
        yield found
        for hook in hooks:
            hook.remove()
