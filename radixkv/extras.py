"""What the base install does without, and what to say where it is needed.

`pip install radixkv` brings the cache, the audit and the proxy. Extras (`cpu`, `gpu`) bring what serves a
model; the import names of those packages are here.
"""

from __future__ import annotations

from importlib.util import find_spec

from radixkv.errors import MissingPackageError

SERVING = frozenset(
    {
        *("torch", "transformers", "tokenizers", "huggingface_hub", "jinja2", "filelock", "safetensors"),
        *("gguf", "accelerate", "numpy", "llguidance", "prometheus_client", "prompt_toolkit", "psutil"),
    }
)
_ENGINE = ("torch", "transformers", "numpy")


def missing_package(error: ModuleNotFoundError, needed_for: str) -> MissingPackageError | None:
    """What to say of a module that could not be imported; None: no extra would bring it."""
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
        "pip install 'radixkv[cpu]', or 'radixkv[gpu]' on a machine with a GPU",
        name=package,
    )
