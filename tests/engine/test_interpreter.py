# SPDX-License-Identifier: Apache-2.0
"""The garbage collector is off while anything starts, and as it was afterwards."""

from __future__ import annotations

import gc

import pytest

from radixkv.engine.interpreter import no_collections


def test_the_collector_is_on_again_after_the_last_block() -> None:
    first, second = no_collections(), no_collections()
    first.__enter__()
    second.__enter__()  # as another thread may
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
    with pytest.raises(KeyError), no_collections():
        raise KeyError
    assert gc.isenabled()


def test_a_program_s_own_choice_stays() -> None:
    gc.disable()
    try:
        with no_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
