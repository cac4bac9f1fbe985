# SPDX-License-Identifier: Apache-2.0
"""FoundWeights: the result of a reader, and the words for one that does not fit its format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from radixkv.errors import ModelLoadError
from radixkv.model.stored_weights.stored_weight import StackedWeights, StoredWeight

#: Last parts of names of scales that numbers of weights do without: of inputs and outputs of a product, which
#: are not rounded here, and of keys and values, which the engine stores in its own way.
_OF_ACTIVATIONS = re.compile(
    r"(input|output|activation|act)_(scale|zero_point|global_scale|scale_ub)|[kvq]_(scale|zero_point)|kv_scale"
    r"|prob(_output)?_scale"
)


@dataclass(slots=True)
class FoundWeights:
    """Stored weights of a folder.

    Attributes:
        weights: name that the plain weight would have in the folder -> its stored form.
        read: names of all tensors that they consist of, and of those that are not needed.
        renamed: plain tensors by names that differ from those in the files, which are among `read`.
    """

    weights: dict[str, StoredWeight | StackedWeights] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    renamed: dict[str, Tensor] = field(default_factory=dict)

    def leave_out_activations(self, names: Iterator[str] | Mapping[str, Tensor]) -> None:
        """Count scales of activations, keys and values as read."""
        self.read.update(name for name in names if _OF_ACTIVATIONS.fullmatch(name.rpartition(".")[2]))


@contextmanager
def damage_named(name: str) -> Iterator[None]:
    """Turn an error about shapes and types within the block into one that names the weight.

    Raises:
        ModelLoadError: the block raised ValueError, KeyError or another sign of tensors that do not fit.
    """
    try:
        yield
    except ModelLoadError:
        raise
    except KeyError as error:
        raise damaged(name, f"{error.args[0] if error.args else error} is missing") from error
    except (ValueError, RuntimeError, TypeError, IndexError) as error:
        raise damaged(name, " ".join(str(error).split())[:200]) from error


def damaged(name: str, reason: str) -> ModelLoadError:
    """The error about a weight whose tensors contradict each other or the configuration."""
    return ModelLoadError(
        f"The quantised weight {name} does not fit its format: {reason}. The folder is damaged or "
        "incomplete, or its config.json belongs to another model; fetch it again."
    )
