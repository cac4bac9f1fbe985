# SPDX-License-Identifier: Apache-2.0
"""ServedWeights: reads other weights for the model of a runner."""

from __future__ import annotations

from dataclasses import replace

from radixkv.engine.config import EngineConfig
from radixkv.engine.weights import NewWeights
from radixkv.model.loading.file_pages import copy_from_files
from radixkv.model.loading.loader import LoadedModel, reload_model
from radixkv.model.rewritten_model import reached_tensors
from radixkv.model.runner import ModelRunner


class ServedWeights:
    """See `radixkv.engine.weights.WeightReader`. Holds none of the weights.

    Args:
        config: of the engine.
        loaded: the model as it was loaded.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel, runner: ModelRunner) -> None:
        self._config, self._runner = config, runner
        self._served = replace(loaded, model=None, vision=None)

    def read(self, path: str | None) -> NewWeights:
        loaded = reload_model(self._config, self._served, path or self._config.model)
        rewritten, runner = self._runner.rewrite(loaded), self._runner
        if path is not None:
            copy_from_files(reached_tensors(rewritten.model))  # training loops write over what they saved
        return NewWeights(path, loaded.fingerprint, lambda: runner.exchange(rewritten))
