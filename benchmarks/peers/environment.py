# SPDX-License-Identifier: Apache-2.0
"""A virtual environment per peer, outside the project, filled from the package registry pip is set to."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from radixkv.model.loading.model_cache import cache_home


class PeerUnavailable(Exception):
    """A peer could not be installed or started; the message says why."""


@dataclass(frozen=True)
class Environment:
    """A ready virtual environment."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return next((self.folder / "lib").glob("python*/site-packages"))

    def add(self, requirement: str, *, timeout: float, dependencies: bool = True) -> None:
        """Install one more `NAME==VERSION`, if it is not there, with what it depends on or alone.

        Raises:
            PeerUnavailable: it can't be installed.
        """
        name, _, version = requirement.partition("==")
        if self.versions(name).get(name) != version:
            pip = [
                str(self.python),
                "-m",
                "pip",
                "install",
                "-q",
                "--disable-pip-version-check",
                "--no-input",
            ]
            alone = [] if dependencies else ["--no-deps"]
            run_step([*pip, *alone, requirement], timeout=timeout, what=f"pip install {requirement}")

    def versions(self, *names: str) -> dict[str, str]:
        """Installed versions of these distributions (missing ones are left out)."""
        code = (
            "import importlib.metadata as m, json, sys\n"
            "found = {}\n"
            "for name in sys.argv[1:]:\n"
            "    try: found[name] = m.version(name)\n"
            "    except m.PackageNotFoundError: pass\n"
            "print(json.dumps(found))"
        )
        output = run_step([str(self.python), "-c", code, *names], timeout=60, what="reading versions")
        return dict(json.loads(output))


def environment_folder(name: str) -> Path:
    """Where `prepare_environment` makes the environment of that name."""
    return cache_home() / "peers" / name


def prepare_environment(
    name: str,
    requirements: Sequence[str],
    *,
    timeout: float,
    finish: Callable[[Environment], None] | None = None,
) -> Environment:
    """The environment `peers/NAME` in the user's cache folder, made first where it is missing.

    Args:
        requirements: what pip is asked for; a change makes the environment anew.
        timeout: seconds that the installation may take.
        finish: run once after the installation.

    Raises:
        PeerUnavailable: the installation failed or took too long.
    """
    folder = environment_folder(name)
    stamp = folder / "installed.json"
    environment = Environment(folder)
    wanted = {"requirements": list(requirements), "python": sys.version.split()[0]}
    if stamp.exists() and json.loads(stamp.read_text(encoding="utf-8")) == wanted:
        return environment
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"[{name}] installing {' '.join(requirements)} into {folder}", flush=True)
    run_step([sys.executable, "-m", "venv", str(folder)], timeout=120, what="making the environment")
    pip = [str(environment.python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-input"]
    run_step([*pip, *requirements], timeout=timeout, what=f"pip install {' '.join(requirements)}")
    if finish is not None:
        finish(environment)
    stamp.write_text(json.dumps(wanted), encoding="utf-8")
    return environment


def run_step(command: Sequence[str], *, timeout: float, what: str) -> str:
    """Run one command of a set-up and return what it printed, to standard error if to nothing else.

    Raises:
        PeerUnavailable: it failed or took longer than `timeout` seconds.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise PeerUnavailable(f"{what}: no end after {timeout:.0f} s") from error
    except OSError as error:
        raise PeerUnavailable(f"{what}: {error}") from error
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
        raise PeerUnavailable(f"{what}: exit code {done.returncode}: {errors[-1][:300]}")
    return done.stdout or done.stderr
