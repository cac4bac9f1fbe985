# SPDX-License-Identifier: Apache-2.0
"""The exceptions that users of radixkv can meet, as one small tree.

A user's mistake has a name here and a message that names the fault, the expected value and the
remedy. A mistake of ours is an `assert` and has no place in this file.
"""

from __future__ import annotations

# Not attributed to a request: they pass through where any other `BaseException` (a panic of a library
# written in Rust is one, too) ends one request.
ENDS_PROCESS = (KeyboardInterrupt, SystemExit)


class RadixKVError(Exception):
    """Base of every error that radixkv raises on purpose."""


class ConfigError(RadixKVError, ValueError):
    """A setting is wrong, or settings contradict each other or the machine (memory, port, device)."""


class MissingPackageError(RadixKVError, ImportError):
    """A package is not installed that this needs and the base install does without; says what to install."""


class ModelLoadError(RadixKVError):
    """A model can't be found, fetched, converted or served: unknown name, unsupported architecture, ..."""


class AdapterLoadError(ModelLoadError):
    """An adapter can't be read or served on this base model; nothing of it was loaded."""


class WeightUpdateError(ModelLoadError):
    """New weights can't be read or don't fit the served model; the engine still has its earlier ones."""


class InvalidRequestError(RadixKVError, ValueError):
    """A request can't be served as it stands; nothing of it was started.

    Attributes:
        param: name of the offending field, or None.
        code: machine-readable reason (OpenAI's `error.code`), or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthExceededError(InvalidRequestError):
    """The prompt (with the tokens it must generate) is longer than the engine's limit."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class RequestFailedError(RadixKVError):
    """A request failed while it ran (NaN logits, a tokeniser fault, a timeout); others are unharmed."""

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class EngineOverloadedError(RadixKVError):
    """The waiting queue is full.

    Attributes:
        retry_after_s: seconds after which trying again makes sense.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EnginePausedError(EngineOverloadedError):
    """The engine takes no requests until it is resumed or woken: its weights change, or it sleeps."""


class EngineStoppedError(RadixKVError):
    """The engine has been closed or has failed.

    Attributes:
        retry_after_s: when it should be back; None: it won't come back.
    """

    def __init__(self, message: str = "", *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


#: What ends an engine: no request is to blame, and none is tried again.
ENDS_ENGINE = (*ENDS_PROCESS, EngineStoppedError)


class OutOfDeviceMemoryError(RadixKVError):
    """The device had no memory for what a step computes beside its K/V; a smaller step may have."""


class OutOfBlocks(RadixKVError):
    """Fewer blocks can be had (free or evictable) than were asked for; nothing was changed.

    Attributes:
        needed: blocks asked for.
        available: blocks that were free or evictable for this caller.
    """

    def __init__(self, message: str, *, needed: int = 0, available: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class LeaseError(RadixKVError):
    """A lease was used wrongly: released twice, used after release, committed beyond its tokens."""
