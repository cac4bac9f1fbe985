# SPDX-License-Identifier: Apache-2.0
"""Arguments of a compiled function and the call of it, alone or on all of torch's threads; and many at once.

A step of a small batch has hundreds of launches, and Python takes about as long to set the arguments of one
as a product of few weights does. Launches whose arguments stay the same, but for the addresses of a few
inputs, are recorded and made again:

    recorded = RecordedLaunches()
    result = recorded.record(function, (a.data_ptr(), b.data_ptr()))      makes what `function` launches
    recorded.run((c.data_ptr(), d.data_ptr()))                            the same with c for a, d for b
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numba import carray

from radixkv_kernels.cpu.compiling import compile_kernel
from radixkv_kernels.cpu.memory import call, i64, pointer
from radixkv_kernels.cpu.openmp import gomp_address, run_here, run_parallel

_Result = TypeVar("_Result")
# Places in the int64 argument block of recorded launches, and in each launch's entry.
_TABLE, _COUNT, _THREADS, _GOMP, _INPUTS, _PLACES, _NUM_PLACES = range(7)
_NUM_ARGUMENTS = 7
_FUNCTION, _BLOCK, _ON_ALL_THREADS = range(3)
_ENTRY = 3
_thread = threading.local()


@functools.cache
def float_bits(value: float) -> int:
    """A float32 as an argument, which `memory.as_float` takes."""
    return int(np.float32(value).view(np.int32))


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
        recorded: list[_Launch] | None = getattr(_thread, "recorded", None)
        if recorded is not None:
            recorded.append((kernel, self.values.copy(), on_all_threads))
        self._counter[0] = 0
        (run_parallel if on_all_threads else run_here)(kernel.address, self._address)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("arguments hold addresses and cannot be copied or pickled")


_Launch = tuple[Any, np.ndarray[Any, Any], bool]


@functools.cache
def _kernel() -> Any:
    def launches(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (_NUM_ARGUMENTS,), np.int64)
        inputs = carray(pointer(arg[_INPUTS], np.int64), (arg[_NUM_PLACES],))
        places = carray(pointer(arg[_PLACES], np.int64), (arg[_NUM_PLACES],))
        for i in range(arg[_NUM_PLACES]):
            carray(pointer(places[i], np.int64), (1,))[0] = i64(inputs[i])
        table = carray(pointer(arg[_TABLE], np.int64), (arg[_COUNT] * _ENTRY,))
        for first in range(0, arg[_COUNT] * _ENTRY, _ENTRY):
            function, block = table[first + _FUNCTION], table[first + _BLOCK]
            carray(pointer(i64(block), np.int64), (1,))[0] = 0
            if table[first + _ON_ALL_THREADS] and arg[_THREADS] > 1:
                call(arg[_GOMP], (function, block, arg[_THREADS], 0))
            else:
                call(function, (block,))

    return compile_kernel(launches)


class RecordedLaunches:
    """Launches of `ArgumentBlock`s with the arguments that they had; not thread-safe.

    All that the arguments point to, besides the inputs, must still be there and in its place.
    """

    def __init__(self) -> None:
        self._kernel = _kernel()
        self._arguments = np.zeros(_NUM_ARGUMENTS, dtype=np.int64)
        self._arguments[_GOMP] = gomp_address()
        self._address: int = self._arguments.ctypes.data

    def record(self, make: Callable[[], _Result], inputs: Sequence[int]) -> _Result:
        """Call a function and keep the launches that it makes, in place of earlier ones.

        Args:
            inputs: addresses that will be others: arguments with these values.
        """
        launches: list[_Launch] = []
        _thread.recorded = launches
        try:
            result = make()
        finally:
            _thread.recorded = None
        self._launches = launches
        self._inputs = np.array(inputs, dtype=np.int64)
        self._counters = np.zeros(len(launches), dtype=np.int64)
        self._table = np.zeros((len(launches), _ENTRY), dtype=np.int64)
        found = []
        for index, (kernel, values, on_all_threads) in enumerate(launches):
            values[0] = self._counters[index:].ctypes.data
            self._table[index] = kernel.address, values.ctypes.data, on_all_threads
            for number, value in enumerate(inputs):
                source = self._inputs[number:].ctypes.data
                found += [(source, values[place:].ctypes.data) for place in np.flatnonzero(values == value)]
        self._places = np.array(found, dtype=np.int64).reshape(-1, 2).T.copy()
        a = self._arguments
        a[_TABLE], a[_COUNT] = self._table.ctypes.data, len(launches)
        a[_INPUTS], a[_PLACES] = (row.ctypes.data for row in self._places)
        a[_NUM_PLACES] = self._places.shape[1]
        return result

    def run(self, inputs: Sequence[int]) -> None:
        """Make the launches, one after the other, with other inputs."""
        self._inputs[:] = inputs
        threads = torch.get_num_threads()
        self._arguments[_THREADS] = threads
        if threads == 1 or self._arguments[_GOMP]:
            run_here(self._kernel.address, self._address)
            return
        self._arguments[_COUNT] = 0  # only the inputs are put in their places
        run_here(self._kernel.address, self._address)
        self._counters[:] = 0
        for function, block, on_all_threads in self._table.tolist():
            (run_parallel if on_all_threads else run_here)(function, block)
