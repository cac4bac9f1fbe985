# SPDX-License-Identifier: Apache-2.0
"""Workload: lengths of sequences and their shared prefixes; from a trace or from a length distribution."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from radixkv.cli.replay.readers import AS_IT_IS, Arrivals, ReadOptions, read
from radixkv.cli.replay.trace import Int64Array, Trace
from radixkv.errors import ConfigError

# Mean prompt and answer lengths of the two data sets of the PagedAttention paper (Kwon et al., SOSP 2023,
# section 6.1), and the spread of a log-normal that has their long tails.
_DATASETS = {"sharegpt": (161.31, 337.99, 1.0), "alpaca": (19.31, 58.45, 0.8)}
DISTRIBUTIONS = ("sharegpt", "alpaca", "lognormal", "uniform")


@dataclass(frozen=True, slots=True)
class Workload:
    """Sequences waiting to be served, in order.

    Attributes:
        name: what to call it in a table.
        input_lengths: int64 [sequences], prompt tokens, at least 1.
        output_lengths: int64 [sequences], generated tokens, at least 1.
        trace: block ids of the prompts, where known.
        shared_prefix: tokens that all prompts begin with (used when there is no trace).
    """

    name: str
    input_lengths: Int64Array
    output_lengths: Int64Array
    trace: Trace | None = None
    shared_prefix: int = 0

    def __len__(self) -> int:
        return len(self.input_lengths)

    @property
    def final_lengths(self) -> Int64Array:
        """Tokens of each sequence when it ends."""
        return self.input_lengths + self.output_lengths

    def pages_by_prefix(self, page_size: int) -> tuple[list[Int64Array], Int64Array]:
        """Group the equal pages of the prompts.

        Returns:
            For each sequence the ids of its prefix runs, and for each id the number of pages whose last
            token lies in that run: sequences with the same id share exactly these pages. Pages beyond (the
            prompt's end, the answer) belong to one sequence alone.
        """
        if self.trace is None:
            pages = np.array([self.shared_prefix // page_size], dtype=np.int64)
            shared = np.zeros(1 if pages[0] else 0, dtype=np.int64)
            fits = self.input_lengths >= self.shared_prefix
            return [shared if ok else shared[:0] for ok in fits.tolist()], pages
        trace = self.trace
        weights = np.zeros(trace.num_unique, dtype=np.int64)
        paths = []
        for request, length in enumerate(trace.input_lengths.tolist()):
            path = trace.path(request)
            edges = np.minimum(np.arange(len(path) + 1) * trace.block_size, length) // page_size
            weights[path] = np.diff(edges)
            paths.append(path)
        return paths, weights


def from_file(path: Path, options: ReadOptions = AS_IT_IS) -> Workload:
    """A workload from any file that `readers.read` knows; without output lengths one token is assumed.

    Raises:
        TraceError: the file is not a trace.
    """
    source = read(path, options)
    inputs = np.maximum(source.input_lengths, 1)
    outputs = np.maximum(source.output_lengths, 1)
    trace = None if isinstance(source, Arrivals) else source
    return Workload(source.name, inputs, outputs, trace)


def from_distribution(
    name: str,
    *,
    num_sequences: int = 2000,
    max_length: int = 2048,
    mean_input: float = 512.0,
    mean_output: float = 256.0,
    sigma: float = 1.0,
    shared_prefix: int = 0,
    seed: int = 0,
) -> Workload:
    """Random lengths, cut so that each sequence fits `max_length` tokens.

    Args:
        name: `sharegpt` or `alpaca` (log-normal with those data sets' means), `lognormal` (with the given
            means and sigma), or `uniform` (prompt and answer each uniform up to half of `max_length`).
        num_sequences: how many.
        max_length: longest prompt + answer.
        mean_input: mean prompt length for `lognormal`, before cutting.
        mean_output: mean answer length for `lognormal`, before cutting.
        sigma: standard deviation of the logarithm, for `lognormal`.
        shared_prefix: tokens put before every prompt.
        seed: of the random numbers.

    Raises:
        ConfigError: unknown name, or settings out of range.
    """
    if name not in DISTRIBUTIONS:
        raise ConfigError(
            f"unknown length distribution {name!r}: neither a file nor one of {', '.join(DISTRIBUTIONS)}"
        )
    if num_sequences < 1 or max_length < 2 or not 0 <= shared_prefix <= max_length - 2:
        raise ConfigError(
            "need at least one sequence, a maximum length of at least 2, and a shared prefix that leaves "
            "two tokens of it"
        )
    if mean_input < 1 or mean_output < 1 or sigma < 0:
        raise ConfigError("mean lengths must be at least 1 token, and sigma at least 0")
    rng = np.random.default_rng(seed)
    if name == "uniform":
        half = max(max_length // 2, 1)
        inputs = rng.integers(1, half + 1, num_sequences)
        outputs = rng.integers(1, half + 1, num_sequences)
    else:
        in_mean, out_mean, spread = _DATASETS.get(name, (mean_input, mean_output, sigma))
        # a log-normal's mean is exp(mu + sigma^2 / 2)
        inputs, outputs = (
            np.rint(rng.lognormal(np.log(mean) - spread**2 / 2, spread, num_sequences)).astype(np.int64)
            for mean in (in_mean, out_mean)
        )
    inputs = np.clip(inputs + shared_prefix, shared_prefix + 1, max_length - 1)
    outputs = np.clip(outputs, 1, max_length - inputs)
    return Workload(name, inputs.astype(np.int64), outputs.astype(np.int64), None, shared_prefix)
