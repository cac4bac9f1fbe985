# SPDX-License-Identifier: Apache-2.0
"""Pipes in folders of adapters and models are refused at once, in place of waiting for a writer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tiny_models import save_tiny_model

from radixkv import EngineConfig
from radixkv.errors import AdapterLoadError, ModelLoadError
from radixkv.model.adapters.peft_config import CONFIG_NAME, PeftConfig
from radixkv.model.loading.loader import find_model

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here"),
    pytest.mark.timeout(60),
]


def test_an_adapters_configuration(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / CONFIG_NAME)
    with pytest.raises(AdapterLoadError, match="no regular file"):
        PeftConfig.read(tmp_path)
    (tmp_path / CONFIG_NAME).unlink()
    (tmp_path / CONFIG_NAME).symlink_to("/dev/zero")
    with pytest.raises(AdapterLoadError, match="no regular file"):
        PeftConfig.read(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors"]
)
def test_a_models_files(tmp_path: Path, name: str) -> None:
    folder = save_tiny_model(tmp_path / "tiny", "llama", num_hidden_layers=1)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ModelLoadError, match=f"{name} is no regular file"):
        find_model(EngineConfig(model=str(folder)))
    shutil.rmtree(folder)
