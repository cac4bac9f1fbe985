# SPDX-License-Identifier: Apache-2.0
"""How many files and forms a streamed chat passes, counted on a trace of one."""

from __future__ import annotations

from pathlib import Path

from request_path import trace_chat

MAX_FILES, MAX_FORMS = 55, 12


def test_a_chat_passes_few_files_in_few_forms(tmp_path: Path) -> None:
    path = trace_chat(tmp_path)
    assert len(path.files) <= MAX_FILES, "\n".join(sorted(path.files))
    assert len(path.forms) <= MAX_FORMS, "\n".join(sorted(path.forms))
