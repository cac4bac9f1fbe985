# SPDX-License-Identifier: Apache-2.0
"""radixkv: a prefix-caching LLM serving engine.

The names below load on first use, so that the cache (`PrefixCache`) works as a library without torch or
transformers. What needs them says which extra of the package to install.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from radixkv.cache.prefix_cache import Lease, PrefixCache
    from radixkv.cache.reporting.explain import MissReport
    from radixkv.engine.config import EngineConfig
    from radixkv.engine.engine import Engine
    from radixkv.engine.outputs import CompletionOutput, OutputDelta, RequestOutput
    from radixkv.entrypoints.async_engine import AsyncEngine
    from radixkv.entrypoints.beam_search import BeamSearchParams
    from radixkv.entrypoints.llm import LLM
    from radixkv.errors import (
        ConfigError,
        ContextLengthExceededError,
        EngineOverloadedError,
        EngineStoppedError,
        InvalidRequestError,
        LeaseError,
        ModelLoadError,
        OutOfBlocks,
        RadixKVError,
        RequestFailedError,
    )
    from radixkv.sampling.sampling_params import SamplingParams
    from radixkv.sampling.structured import StructuredOutputs
    from radixkv.scheduling.request import PrefixPin, Request, TextPrompt, TokensPrompt

_HOMES = {
    "AsyncEngine": "radixkv.entrypoints.async_engine",
    "BeamSearchParams": "radixkv.entrypoints.beam_search",
    "CompletionOutput": "radixkv.engine.outputs",
    "ConfigError": "radixkv.errors",
    "ContextLengthExceededError": "radixkv.errors",
    "Engine": "radixkv.engine.engine",
    "EngineConfig": "radixkv.engine.config",
    "EngineOverloadedError": "radixkv.errors",
    "EngineStoppedError": "radixkv.errors",
    "InvalidRequestError": "radixkv.errors",
    "LLM": "radixkv.entrypoints.llm",
    "Lease": "radixkv.cache.prefix_cache",
    "LeaseError": "radixkv.errors",
    "MissReport": "radixkv.cache.reporting.explain",
    "ModelLoadError": "radixkv.errors",
    "OutOfBlocks": "radixkv.errors",
    "OutputDelta": "radixkv.engine.outputs",
    "PrefixCache": "radixkv.cache.prefix_cache",
    "PrefixPin": "radixkv.scheduling.request",
    "RadixKVError": "radixkv.errors",
    "Request": "radixkv.scheduling.request",
    "RequestFailedError": "radixkv.errors",
    "RequestOutput": "radixkv.engine.outputs",
    "SamplingParams": "radixkv.sampling.sampling_params",
    "StructuredOutputs": "radixkv.sampling.structured",
    "TextPrompt": "radixkv.scheduling.request",
    "TokensPrompt": "radixkv.scheduling.request",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthExceededError",
    "Engine",
    "EngineConfig",
    "EngineOverloadedError",
    "EngineStoppedError",
    "InvalidRequestError",
    "Lease",
    "LeaseError",
    "MissReport",
    "ModelLoadError",
    "OutOfBlocks",
    "OutputDelta",
    "PrefixCache",
    "PrefixPin",
    "RadixKVError",
    "Request",
    "RequestFailedError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'radixkv' has no attribute {name!r}")
    try:
        home = importlib.import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        from radixkv.entrypoints.extras import missing_package  # of use after an error alone

        raise missing_package(error, f"radixkv.{name}") or error from None
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
