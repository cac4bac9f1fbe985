"""Environments for clients that the main one has no room for: made once for what a requirements file pins.

They lie in build/clients of the working tree, one for each version of a file, and are used again until the
file changes. What is in the main environment is never touched.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from filelock import FileLock, Timeout

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 200.0


class EnvironmentNotMade(Exception):
    """An environment can't be made here; the text says why."""


def client_environment(requirements: Path) -> Path:
    """The Python of an environment with what the file pins; all of it, since nothing is resolved.

    Takes 15 to 60 s and about 200 MB where it has to be made first.

    Raises:
        EnvironmentNotMade: a package can't be had, or it took more than `LIMIT_S` seconds.
    """
    digest = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()[:12]
    home = ROOT / "build" / "clients" / f"{requirements.stem}-{digest}"
    python = home / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    home.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{home}.lock", timeout=LIMIT_S):
            # Written last: an environment that was not finished is made anew.
            finished = home / "finished"
            if not finished.exists():
                _make(home, python, requirements)
                finished.touch()
    except Timeout:
        raise EnvironmentNotMade(f"another process holds {home}.lock") from None
    return python


def _make(home: Path, python: Path, requirements: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=False, symlinks=sys.platform != "win32")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--no-input"]
    options = ["-q", "--no-deps", "--no-compile", "--only-binary=:all:", "--retries=1", "--timeout=15"]
    try:
        done = subprocess.run(
            [*pip, "install", *options, "-r", str(requirements)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentNotMade(f"pip took more than {LIMIT_S:.0f} s for {requirements.name}") from None
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2]
        raise EnvironmentNotMade(f"pip can't install {requirements.name}: {last}")
