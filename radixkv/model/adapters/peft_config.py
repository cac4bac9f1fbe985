# SPDX-License-Identifier: Apache-2.0
"""adapter_config.json as PEFT writes it: plain LoRA is read, all else is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import regex

from radixkv.errors import AdapterLoadError
from radixkv.regular_file import open_regular

if TYPE_CHECKING:
    from radixkv.model.adapters.base_modules import BaseModules

CONFIG_NAME = "adapter_config.json"
_MAX_BYTES = 1 << 20
_MATCH_SECONDS = 1.0  # patterns come with the adapter, and may take for ever
_MAX_RANK = 4096
#: Fields about the adapter's training, storage or discovery, which do not affect its computation.
_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout", "task_type"),
        *("megatron_config", "megatron_core", "loftq_config", "eva_config", "qalora_group_size"),
        *("ensure_weight_tying", "fan_in_fan_out"),
    }
)
_READ = frozenset(
    {
        *(
            "peft_type",
            "base_model_name_or_path",
            "r",
            "lora_alpha",
            "use_rslora",
            "bias",
            "init_lora_weights",
        ),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("rank_pattern", "alpha_pattern", "alora_invocation_tokens"),
    }
)
#: Ways to begin that leave the base's weights as they are; the others (PiSSA, OLoRA, LoftQ) change them.
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
_ADVICE = {
    "use_dora": "DoRA is not served: train the adapter without use_dora, or merge it into its base",
    "modules_to_save": "whole modules beside the adapter are not served: train it without modules_to_save",
}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """A LoRA adapter's configuration, checked.

    Attributes:
        base: name of the base model in the file; empty: it is missing.
        rank, alpha: values for modules that match no pattern.
        invocation: tokens of a prompt that an activated adapter begins with, at their last place; empty: the
            adapter computes all of the prompt.
    """

    base: str
    rank: int
    alpha: float
    rank_stabilised: bool
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...]
    layer_lists: tuple[str, ...]
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    invocation: tuple[int, ...]

    @classmethod
    def read(cls, folder: Path) -> PeftConfig:
        """Read and check a folder's adapter_config.json.

        Raises:
            AdapterLoadError: it is missing, damaged, or asks for more than LoRA; names the field.
        """
        path = folder / CONFIG_NAME
        try:
            with open_regular(path) as file:
                text = file.read(_MAX_BYTES + 1)
            if len(text) > _MAX_BYTES:
                raise AdapterLoadError(f"{path} is larger than {_MAX_BYTES} bytes: it is no adapter's.")
            data = json.loads(text.decode("utf-8"))
        except OSError as error:
            raise AdapterLoadError(
                f"{path} can't be read ({error.strerror or error}); an adapter is a folder that PEFT's "
                "save_pretrained has written."
            ) from None
        except (ValueError, RecursionError):
            raise AdapterLoadError(f"{path} is damaged: it is no JSON.") from None
        if not isinstance(data, dict):
            raise AdapterLoadError(f"{path} must hold an object.")
        return _Fields(data, path).config()

    def is_target(self, path: str) -> bool:
        """Return True if the adapter changes the module at this path, by PEFT's rules."""
        if self.excluded and _names(self.excluded, path):
            return False
        if isinstance(self.targets, str) or path in self.targets:
            return _names(self.targets, path)
        if not _names(self.targets, path):
            return False
        return not self.layers or self._layer(path) in self.layers

    def _layer(self, path: str) -> int | None:
        lists = self.layer_lists or (r"[^.]*",)
        found = (_match(rf"(?:^|.*?\.){name}\.(?P<index>\d+)\.", path) for name in lists)
        return next((int(match["index"]) for match in found if match is not None), None)

    def rank_of(self, path: str) -> int:
        """Return the rank of the adapter's matrices at a path."""
        return _by_pattern(self.ranks, path, self.rank)

    def scale_of(self, path: str) -> float:
        """Return the factor of the adapter's product at a path."""
        rank, alpha = self.rank_of(path), _by_pattern(self.alphas, path, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)

    def check_targets(self, base: BaseModules) -> list[str]:
        """Return the paths that the adapter changes.

        Raises:
            AdapterLoadError: a target that no module of the base has, or none at all.
        """
        if isinstance(self.targets, tuple):
            for target in self.targets:
                if not any(path == target or path.endswith(f".{target}") for path in base.shapes):
                    raise AdapterLoadError(
                        f"the adapter's target_modules name {target!r:.80}, which no linear layer of the "
                        f"base's attention or MLP is called; it has {_leaves(base.shapes)}."
                    )
        paths = [path for path in base.shapes if self.is_target(path)]
        if not paths:
            raise AdapterLoadError(
                f"the adapter's target_modules, {self.targets!r:.200}, name no module of the base; it has "
                f"{_leaves(base.shapes)}."
            )
        return paths

    def check_base(self, base: BaseModules) -> None:
        """Compare the base model that the adapter names with the served one.

        Raises:
            AdapterLoadError: it names another one.
        """
        if not self.base:
            return
        same_folder = base.folder is not None and _is_folder(self.base, base.folder)
        if not same_folder and _short(self.base) not in {_short(name) for name in base.names}:
            raise AdapterLoadError(
                f"the adapter was trained on {self.base!r:.200}, but the base here is {base.names[0]!r}. If "
                f"the weights are the same, set base_model_name_or_path in {CONFIG_NAME} to that name."
            )


class _Fields:
    """Fields of an adapter_config.json, each checked where it is read."""

    def __init__(self, data: dict[str, Any], path: Path) -> None:
        self._data, self._path = data, path

    def config(self) -> PeftConfig:
        data = self._data
        if data.get("peft_type") != "LORA":
            raise self._wrong("peft_type", '"LORA"')
        for name, value in data.items():
            if name not in _READ and name not in _WITHOUT_EFFECT and value not in (None, False, "", [], {}):
                raise AdapterLoadError(
                    f"{self._path}: {name} is set ({value!r:.80}); "
                    f"{_ADVICE.get(name, 'this part of PEFT is not served')}."
                )
        if data.get("bias", "none") != "none":
            raise self._wrong("bias", '"none": trained biases are not served')
        if data.get("init_lora_weights", True) not in _PLAIN_STARTS:
            raise self._wrong(
                "init_lora_weights",
                "true: other ways to begin change the base's weights (convert the adapter)",
            )
        if data.get("task_type") not in (None, "CAUSAL_LM"):
            raise self._wrong("task_type", '"CAUSAL_LM"')
        targets = self._texts("target_modules")
        if not targets:
            raise self._wrong("target_modules", "a list of module names, or a regular expression")
        base = data.get("base_model_name_or_path") or ""
        if not isinstance(base, str):
            raise self._wrong("base_model_name_or_path", "a text")
        return PeftConfig(
            base=base,
            rank=self._rank("r", data.get("r", 8)),
            alpha=self._number("lora_alpha", data.get("lora_alpha", 8)),
            rank_stabilised=self._flag("use_rslora"),
            targets=targets,
            excluded=self._texts("exclude_modules"),
            layers=self._layers(),
            layer_lists=self._list("layers_pattern"),
            ranks={key: self._rank("rank_pattern", value) for key, value in self._table("rank_pattern")},
            alphas={key: self._number("alpha_pattern", value) for key, value in self._table("alpha_pattern")},
            invocation=self._invocation(),
        )

    def _wrong(self, name: str, expected: str) -> AdapterLoadError:
        return AdapterLoadError(
            f"{self._path}: {name} must be {expected}, not {self._data.get(name)!r:.200}."
        )

    def _rank(self, name: str, value: object) -> int:
        if type(value) is not int or not 1 <= value <= _MAX_RANK:
            raise self._wrong(name, f"made of whole numbers from 1 to {_MAX_RANK}")
        return value

    def _number(self, name: str, value: object) -> float:
        if type(value) not in (int, float) or not abs(value) < 1e6:  # type: ignore[arg-type]
            raise self._wrong(name, "made of numbers below a million")
        return float(value)  # type: ignore[arg-type]

    def _flag(self, name: str) -> bool:
        value = self._data.get(name, False)
        if type(value) is not bool:
            raise self._wrong(name, "true or false")
        return value

    def _texts(self, name: str) -> str | tuple[str, ...]:
        value = self._data.get(name)
        return value if isinstance(value, str) else self._list(name)

    def _list(self, name: str) -> tuple[str, ...]:
        value = self._data.get(name)
        if isinstance(value, str):
            return (value,)
        if value is not None and not _is_list_of(value, str):
            raise self._wrong(name, "a text or a list of texts")
        return tuple(value or ())

    def _layers(self) -> tuple[int, ...]:
        value = self._data.get("layers_to_transform")
        if type(value) is int:
            return (value,)
        if value is not None and not _is_list_of(value, int):
            raise self._wrong("layers_to_transform", "a whole number or a list of them")
        return tuple(value or ())

    def _invocation(self) -> tuple[int, ...]:
        value = self._data.get("alora_invocation_tokens")
        if value is None:
            return ()
        if not _is_list_of(value, int) or not value or not 0 <= min(value) <= max(value) < 2**31:
            raise self._wrong("alora_invocation_tokens", "a list of at least one token id")
        return tuple(value)

    def _table(self, name: str) -> Iterable[tuple[str, object]]:
        value = self._data.get(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return (value or {}).items()


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _names(targets: str | tuple[str, ...], path: str) -> bool:
    if isinstance(targets, str):
        return _match(targets, path, whole=True) is not None
    return any(path == target or path.endswith(f".{target}") for target in targets)


def _by_pattern(patterns: Mapping[str, Any], path: str, otherwise: Any) -> Any:
    """The value of the first pattern that names the end of a path."""
    return next(
        (value for key, value in patterns.items() if _match(rf"(.*\.)?({key})$", path) is not None), otherwise
    )


def _match(pattern: str, path: str, *, whole: bool = False) -> Any:
    try:
        match = regex.fullmatch if whole else regex.match
        return match(pattern, path, timeout=_MATCH_SECONDS)
    except (regex.error, TimeoutError, RecursionError, MemoryError, OverflowError):
        raise AdapterLoadError(
            f"the adapter's pattern {pattern!r:.200} is no regular expression that can be matched."
        ) from None


def _leaves(paths: Iterable[str]) -> str:
    return ", ".join(sorted({path.rpartition(".")[2] for path in paths})) or "none"


def _short(name: str) -> str:
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2].lower()


def _is_folder(name: str, folder: Path) -> bool:
    try:
        return Path(name).resolve() == folder.resolve()
    except (OSError, ValueError, RuntimeError):
        return False
