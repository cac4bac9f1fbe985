# SPDX-License-Identifier: Apache-2.0
"""Arguments of a compiled function and the call of it, alone or on all of torch's threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from radixkv_kernels.cpu.openmp import run_here, run_parallel


class ArgumentBlock:
    """Arguments as int64 values that stay at one address; the first is that of a counter.

    The threads of a call take their work from the counter. Not thread-safe.

    Args:
        size: number of values.

    Attributes:
        values: int64 [size]; set all but the first.
    """

    def __init__(self, size: int) -> None:
        self._counter = np.zeros(1, dtype=np.int64)
        self.values = np.zeros(size, dtype=np.int64)
        self.values[0] = self._counter.ctypes.data
        self._address: int = self.values.ctypes.data

    def run(self, kernel: Any, *, on_all_threads: bool) -> None:
        """Call a kernel of `compile_kernel`; waking the other threads costs microseconds."""
        self._counter[0] = 0
        (run_parallel if on_all_threads else run_here)(kernel.address, self._address)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("arguments hold addresses and cannot be copied or pickled")
