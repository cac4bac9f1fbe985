# SPDX-License-Identifier: Apache-2.0
"""A compiler that the tests of a file share."""

from __future__ import annotations

import pytest
from grammar_trials import make_compiler

from radixkv.grammar.compiler import GrammarCompiler


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return make_compiler()
