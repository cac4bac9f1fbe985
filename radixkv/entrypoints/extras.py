# SPDX-License-Identifier: Apache-2.0
"""Packages that the base install does without, and the command that installs them.

The base brings the cache, the audit and the proxy. The extras `cpu` and `gpu` bring the packages that serve a
model; their import names are here.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from radixkv.errors import MissingPackageError

SERVING = frozenset(
    {
        *("torch", "transformers", "tokenizers", "huggingface_hub", "jinja2", "filelock", "safetensors"),
        *("gguf", "accelerate", "numpy", "llguidance", "prometheus_client", "prompt_toolkit", "psutil"),
        "websockets",
    }
)
_ENGINE = ("torch", "transformers", "numpy")


def missing_package(error: ModuleNotFoundError, needed_for: str) -> MissingPackageError | None:
    """Return the error for a module that could not be imported; None: no extra would bring it."""
    package = (error.name or "").partition(".")[0]
    return _missing(package, needed_for) if package in SERVING else None


def require_engine(needed_for: str) -> None:
    """Nothing, where a model can be served; imports nothing.

    Raises:
        MissingPackageError: names what to install.
    """
    for package in _ENGINE:
        if find_spec(package) is None:
            raise _missing(package, needed_for)


def _missing(package: str, needed_for: str) -> MissingPackageError:
    return MissingPackageError(
        f"{needed_for} needs {package}, which the base install does without: "
        f"{install_command('cpu')}, or [gpu] on a machine with a GPU",
        name=package,
    )


def install_command(extra: str) -> str:
    """Return the command that installs an extra from the source of this installation."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e '{checkout}[{extra}]'"
    try:
        origin = json.loads(distribution("radixkv").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    where = f" @ {origin['url']}" if "url" in origin else ""
    return f"pip install 'radixkv[{extra}]{where}'"
