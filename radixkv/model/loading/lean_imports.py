# SPDX-License-Identifier: Apache-2.0
"""transformers imported without torch's compiler, which takes a third of the import and is not used here.

transformers marks one method of its own batching with `torch.compiler.disable`, and that imports the
compiler. The mark is put off to the first call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_MARK = "disable"


@contextmanager
def without_compiler() -> Iterator[None]:
    """Within the block, functions marked by `torch.compiler.disable` get their mark at the first call."""
    import torch

    disable = getattr(torch.compiler, _MARK)
    setattr(torch.compiler, _MARK, _put_off(disable))
    try:
        yield
    finally:
        setattr(torch.compiler, _MARK, disable)


def _put_off(disable: Callable[..., Any]) -> Callable[..., Any]:
    def later(function: Any = None, *args: Any, **keywords: Any) -> Any:
        if function is None:
            return functools.partial(later, *args, **keywords)

        @functools.cache
        def marked() -> Any:
            return disable(function, *args, **keywords)

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            return marked()(*args, **keywords)

        return call

    return later
