# SPDX-License-Identifier: Apache-2.0
"""transformers without torch's compiler and distributed tensors, in radixkv's own processes.

transformers imports both, and scipy where it is installed, with any model, for features that serving on a
CPU has no use for: they are over half of the CPU time of its import. In a process that has called
`allow_lean_imports`, empty modules stand in for them while a model is loaded. transformers then does as
with a torch that was built without distributed tensors, and functions marked for torch's compiler stay as
they are. Afterwards, the compiler is imported when something needs it. It also reads the sources of all
models for their names once, not twice. A program that imports radixkv gets
transformers as it is.

The names below are those of transformers 5.17 to 5.23: with another that does not fit, all is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_WRAPPED = f"{_COMPILER}._trace_wrapped_higher_order_op"
_MODELLING = ("transformers.modeling_utils", "transformers.masking_utils", "transformers.generation.utils")

_allowed = False


def allow_lean_imports() -> None:
    """Say that this process is radixkv's own: nobody trains or compiles in it."""
    global _allowed
    _allowed = True


@contextmanager
def lean_transformers(*, foreign_code: bool = False) -> Iterator[None]:
    """Load a model within the block, with stand-ins where that is allowed and saves anything.

    Args:
        foreign_code: code that comes with the model may run, and import anything: no stand-ins.
    """
    import torch

    is_allowed = _allowed and not foreign_code
    if (
        not is_allowed
        or _COMPILER in sys.modules
        or _MODELLING[0] in sys.modules
        or torch.cuda.is_available()
    ):
        yield
        return
    with _stand_ins():
        try:
            for name in _MODELLING:
                import_module(name)
        except Exception:
            fits = False
        else:
            fits = True
            yield
    if not fits:
        yield


@contextmanager
def _stand_ins() -> Iterator[None]:
    import torch
    from transformers import utils
    from transformers.utils import import_utils

    def no(*_: object) -> bool:
        return False

    compiler, wrapped = ModuleType(_COMPILER), ModuleType(_WRAPPED)
    vars(compiler).update(
        __path__=[], disable=_as_it_is, allow_in_graph=_as_it_is, assume_constant_result=_as_it_is
    )
    vars(wrapped).update(TransformGetItemToIndex=_TransformGetItemToIndex)
    # Of kernels from the hub: the folder of that name beside this package would have it read the metadata of
    # all installed packages.
    places: list[tuple[Any, str, Any]] = [
        (module, name, no)
        for module in (utils, import_utils)
        for name in ("is_torch_distributed_available", "is_scipy_available", "is_kernels_available")
    ]
    places += [
        (torch.compiler, "disable", _as_it_is),
        (import_utils, "define_import_structure", _structure(import_utils.define_import_structure)),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    sys.modules |= {_COMPILER: compiler, _WRAPPED: wrapped}
    vars(torch)["_dynamo"] = compiler
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        # torch finds the module itself when it is asked for, next.
        vars(torch).pop("_dynamo", None)
        for name in (_COMPILER, _WRAPPED):
            sys.modules.pop(name, None)


def _structure(define: Callable[..., Any]) -> Callable[..., Any]:
    """`define` that does not read the sources of all models again, since transformers has their names."""

    def define_import_structure(module_path: str, prefix: str | None = None) -> Any:
        import transformers

        if prefix is None and Path(module_path) == Path(transformers.__path__[0], "models", "__init__.py"):
            names = vars(transformers)["_import_structure"]
            return {
                frozenset(): {
                    module.removeprefix("models."): set(exported)
                    for module, exported in names.items()
                    if module.startswith("models.")
                }
            }
        return define(module_path, prefix)

    return define_import_structure


def _as_it_is(function: Any = None, *_: object, **__: object) -> Any:
    """Decorate nothing: neither as `@f` nor as `@f(...)`."""
    return _as_it_is if function is None else function


class _TransformGetItemToIndex:
    """torch's own, imported when a mask is first made with it."""

    def __new__(cls, *arguments: Any) -> Any:
        return import_module(_WRAPPED).TransformGetItemToIndex(*arguments)
