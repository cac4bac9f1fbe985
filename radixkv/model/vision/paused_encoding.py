# SPDX-License-Identifier: Apache-2.0
"""PausedEncoding: the tower's work on one image in pieces, between an engine's steps.

A tower takes an image whole, for as long as many steps. It runs in a thread of its own, which goes on only
while the engine's thread waits for it, and stops before one of the tower's layers:

    engine    step | advance ....... | step | advance ....... | step
    tower            layer 0, 1, 2                layer 3, 4

So never more than one of the two computes. What prepares the pixels runs beside the steps.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import nn

from radixkv.images.image_files import DecodedImage
from radixkv.model.vision.encoder_cache import Encoding
from radixkv.model.vision.vision_model import VisionModel

_thread = threading.local()


class _Cancelled(BaseException):
    """Ends a tower's work; no handler of the tower's catches it."""


def stop_between_layers(vision: VisionModel) -> None:
    """Let a tower's layers stop before they begin, where a `PausedEncoding` calls them."""
    if vision.stops_between_layers:
        return
    vision.stops_between_layers = True
    for module in vision.tower.modules():
        if isinstance(module, nn.ModuleList):
            for layer in module:
                layer.register_forward_pre_hook(_stop)


def _stop(module: nn.Module, arguments: Any) -> None:
    encoding = getattr(_thread, "encoding", None)
    if encoding is not None:
        encoding.stop()


class PausedEncoding:
    """Encodes one image, while `advance` is called.

    Attributes:
        is_done: it has ended: there is `result`, or `error`.
    """

    def __init__(self, vision: VisionModel, image: DecodedImage) -> None:
        self.is_done = False
        self.result: Encoding | None = None
        self.error: BaseException | None = None
        self._is_cancelled = False
        self._prepared, self._go, self._stopped = (
            threading.Event(),
            threading.Semaphore(0),
            threading.Semaphore(0),
        )
        self._thread = threading.Thread(
            target=self._run, args=(vision, image), name="radixkv-encoder", daemon=True
        )
        self._thread.start()

    def advance(self, seconds: float) -> bool:
        """Let it go on until the first layer that begins after this time; return `is_done`."""
        end = time.monotonic() + seconds
        if not self._prepared.wait(seconds):
            return False
        while not self.is_done:
            self._go.release()
            self._stopped.acquire()
            if time.monotonic() >= end:
                break
        return self.is_done

    def cancel(self) -> None:
        """End it, unless it has ended."""
        self._is_cancelled = True
        self._go.release()
        self._thread.join()

    def stop(self) -> None:
        """Wait until the engine's thread has time again; on the tower's thread."""
        self._stopped.release()
        self._go.acquire()
        if self._is_cancelled:
            raise _Cancelled

    def _run(self, vision: VisionModel, image: DecodedImage) -> None:
        try:
            inputs = vision.prepare(image)
            self._prepared.set()
            self._go.acquire()
            if not self._is_cancelled:
                _thread.encoding = self
                with torch.inference_mode():
                    self.result = vision.encode(inputs)
        except BaseException as error:  # given to the requests that wait for it
            self.error = error
        finally:
            self.is_done = True
            self._prepared.set()
            self._stopped.release()
