# SPDX-License-Identifier: Apache-2.0
"""Environments for clients that the main one has no room for: made once for what a file pins.

They lie in build/clients of the working tree, one for each version of a requirements file (pip) or of a lock
file (npm), and are used again until it changes. What is in the main environment is never touched.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0
_LENT = re.compile(r"^# lent: (.+)$", re.MULTILINE)


class EnvironmentNotMade(Exception):
    """An environment can't be made here; the text says why."""


def python_environment(requirements: Path) -> Path:
    """The Python of an environment with what the file pins; all of it, since nothing is resolved.

    Packages named in a line `# lent: NAMES` are the main environment's, by links. Takes 15 to 90 s and 200 to
    600 MB where it has to be made first.

    Raises:
        EnvironmentNotMade: a package can't be had, or it took more than `LIMIT_S` seconds.
    """
    pins = requirements.read_bytes()
    home = _made_once(
        requirements.stem, pins + sys.version.encode(), lambda home: _make_python(home, requirements)
    )
    return _python(home)


def node_environment(folder: Path) -> Path:
    """A folder with the `node_modules` that the lock file of `folder` pins; no script of a package is run.

    Takes 5 to 20 s and 30 to 400 MB where it has to be made first.

    Raises:
        EnvironmentNotMade: no Node.js, or a package can't be had, or it took more than `LIMIT_S` seconds.
    """
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise EnvironmentNotMade("there is no Node.js: node and npm are needed")
    files = [folder / "package.json", folder / "package-lock.json"]

    def make(home: Path) -> None:
        home.mkdir()
        for file in files:
            shutil.copy(file, home)
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--fetch-retries=1"]
        _run([npm, "ci", *options], folder.name, cwd=home)

    return _made_once(folder.name, b"".join(file.read_bytes() for file in files), make)


def _made_once(name: str, pins: bytes, make: Callable[[Path], None]) -> Path:
    home = ROOT / "build" / "clients" / f"{name}-{hashlib.sha256(pins).hexdigest()[:12]}"
    home.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{home}.lock", timeout=LIMIT_S):
            # Written last: an environment that was not finished is made anew.
            finished = home / "finished"
            if not finished.exists():
                shutil.rmtree(home, ignore_errors=True)
                make(home)
                finished.touch()
    except Timeout:
        raise EnvironmentNotMade(f"another process holds {home}.lock") from None
    return home


def _python(home: Path) -> Path:
    return home / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def _make_python(home: Path, requirements: Path) -> None:
    venv.create(home, with_pip=False, symlinks=sys.platform != "win32")
    python = str(_python(home))
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--no-input"]
    options = ["-q", "--no-deps", "--no-compile", "--only-binary=:all:", "--retries=1", "--timeout=15"]
    _run([*pip, "install", *options, "-r", str(requirements)], requirements.name)
    for names in _LENT.findall(requirements.read_text()):
        _lend(home, names.split())


def _lend(home: Path, names: Sequence[str]) -> None:
    """Links to packages of the main environment, and to what is written about them."""
    own = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    main = Path(sysconfig.get_path("purelib"))
    for name in names:
        found = [main / name, *main.glob(f"{name}-*.dist-info")]
        if not found[0].exists():
            raise EnvironmentNotMade(f"the main environment has no {name} to lend")
        for path in found:
            (own / path.name).symlink_to(path)


def _run(command: Sequence[str], name: str, cwd: Path | None = None) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise EnvironmentNotMade(f"installing {name} took more than {LIMIT_S:.0f} s") from None
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2]
        raise EnvironmentNotMade(f"{name} can't be installed: {last}")
