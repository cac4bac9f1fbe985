# SPDX-License-Identifier: Apache-2.0
"""These tests run the Triton source in Triton's interpreter: `TRITON_INTERPRET=1 pytest
tests/kernels/interpreted`.

The variable must be set before triton is first imported, and would disturb every other user of triton in
the same process, so the rest of the suite runs this folder in a process of its own (see
test_attention_interpreter.py).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreter_repairs

    interpreter_repairs.install()
else:
    collect_ignore_glob = ["test_*.py"]
