# SPDX-License-Identifier: Apache-2.0
"""LangChain's standard tests of chat models, with its classes for OpenAI's and Anthropic's APIs.

They ask for things that a random model doesn't say ("the value of magic_function(3)"), so that the scripted
server answers them (`langchain_answers` in tests/support/told_answers.py).
"""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import report


class Outcomes:
    """Counts, and what failed."""

    def __init__(self) -> None:
        self.passed, self.failed, self.skipped = [], [], []

    def pytest_runtest_logreport(self, report) -> None:
        name = report.nodeid.rpartition("::")[2]
        if report.failed:
            self.failed.append(f"{name} ({report.when})")
        elif report.skipped:
            self.skipped.append(name)
        elif report.when == "call":
            self.passed.append(name)


Path("pytest.ini").write_text(
    "[pytest]\nasyncio_mode = auto\nasyncio_default_test_loop_scope = session\n"
    "asyncio_default_fixture_loop_scope = session\nmarkers =\n    vcr\n    benchmark\n"
)
outcomes = Outcomes()
file = Path(__file__).with_name("langchain_standard.py")
options = ["-q", "--tb=short", "--noconftest", "-p", "no:cacheprovider", "-c", "pytest.ini", "--rootdir=."]
code = pytest.main([str(file), *options, "-o", "python_files=*.py", *sys.argv[2:]], plugins=[outcomes])
report.version(version("langchain-tests"))
report.note(f"{len(outcomes.passed)} passed, {len(outcomes.failed)} failed, {len(outcomes.skipped)} skipped")
if code != 0 or not outcomes.passed:
    raise SystemExit(f"failed: {', '.join(outcomes.failed)}")
