# SPDX-License-Identifier: Apache-2.0
"""The end of the engine's thread, whichever of the threads is the faster."""

from __future__ import annotations

import threading

import pytest
from paged_language_model import LetterTokenizer, make_engine

import radixkv.entrypoints.engine_thread as engine_thread
from radixkv.entrypoints.engine_thread import EngineThread
from radixkv.errors import EngineStoppedError


def test_a_thread_that_ends_at_once_knows_why(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    told: list[EngineStoppedError] = []

    def on_end(error: EngineStoppedError) -> None:
        told.append(error)
        ended.set()

    engine = make_engine(num_blocks=8, model=None, budget=16, tokenizer=LetterTokenizer())[0]
    thread = EngineThread(engine, lambda engine, result: None, on_end)

    class SlowError(EngineStoppedError):
        def __init__(self, message: str) -> None:
            ended.wait(0.2)  # the engine's thread goes first, if it may
            super().__init__(message)

    with monkeypatch.context() as patch:
        patch.setattr(engine_thread, "EngineStoppedError", SlowError)
        thread.stop()
    thread.join()
    assert [str(error) for error in told] == ["the engine has been closed"]
