# SPDX-License-Identifier: Apache-2.0
"""Checks of all settings that need no torch: mistakes are known in a second, before a model is loaded."""

from __future__ import annotations

from pathlib import Path

from radixkv.engine.adapters import parse_lora
from radixkv.engine.config import EngineConfig
from radixkv.engine.policy_names import check_policies
from radixkv.errors import AdapterLoadError, ConfigError
from radixkv.model.adapters.lora_weights import WEIGHTS_NAME
from radixkv.model.adapters.peft_config import PeftConfig
from radixkv.model.early_checks import check_settings
from radixkv.model.loading.loader import check_stored_form, find_model
from radixkv.model.loading.model_source import is_on_hub
from radixkv.tiers.open_tiers import check_tiers
from radixkv.tiers.spec import parse_tiers


def check_start(config: EngineConfig, *, fetch: bool = False, is_loaded: bool = False) -> None:
    """Check policies, tiers, adapters, and the model's files with the settings that depend on them.

    Args:
        fetch: look for a hub id's files on the hub, too; False: it is checked when it is loaded.
        is_loaded: the model has been loaded before: its files are not looked at.

    Raises:
        ConfigError: a setting is wrong, or does not fit the model or the machine.
        ModelLoadError: the model can't be had or served; `AdapterLoadError`: an adapter can't.
    """
    check_policies(config)
    check_tiers(parse_tiers(config.kv_tier))
    _check_adapters(config)
    if not is_loaded and (fetch or not is_on_hub(config.model)):
        source = find_model(config)
        check_stored_form(source)
        check_settings(config, source)


def _check_adapters(config: EngineConfig) -> None:
    for name, folder in parse_lora(config.lora).items():
        try:
            adapter = PeftConfig.read(Path(folder))
            if not adapter.ranks and adapter.rank > config.max_lora_rank:
                raise AdapterLoadError(
                    f"it has rank {adapter.rank}, above the largest taken, {config.max_lora_rank} "
                    "(max_lora_rank)."
                )
            if not Path(folder, WEIGHTS_NAME).is_file():
                raise AdapterLoadError(
                    f"there is no file {Path(folder, WEIGHTS_NAME)}; an adapter is a folder that PEFT's "
                    "save_pretrained has written."
                )
        except AdapterLoadError as error:
            raise AdapterLoadError(f"The adapter {name!r} can't be loaded: {error}") from None
    if config.lora_dir is not None and not Path(config.lora_dir).expanduser().is_dir():
        raise ConfigError(f"--lora-dir {config.lora_dir}: there is no such folder; make it, or give another")
