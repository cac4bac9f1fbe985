# SPDX-License-Identifier: Apache-2.0
"""Models from anywhere: nothing that comes with one runs unasked, and none reads files outside its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from quantised_checkpoints import block_fp8, quantise
from test_model_loader import load, refusal

from radixkv.engine.config import EngineConfig
from radixkv.errors import ModelLoadError
from radixkv.model.loading.loader import load_tokenizer

_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({mark!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a model's code leaves when it runs. Whoever asks is told to go on."""
    from transformers import dynamic_module_utils

    def agree(*_: object) -> str:
        (tmp_path / "asked").touch()
        return "yes"

    monkeypatch.setattr("builtins.input", agree)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    return tmp_path / "the-code-ran"


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def add_code(folder: Path, mark: Path, *, model_type: str) -> None:
    (folder / "own.py").write_text(_CODE.format(mark=str(mark)))
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    change(folder / "config.json", model_type=model_type, architectures=["OwnModel"], auto_map=auto_map)


class TestCode:
    def test_is_refused(self, folder: Path, mark: Path) -> None:
        add_code(folder, mark, model_type="own_llama")
        message = refusal(folder)
        assert "--trust-remote-code" in message
        assert str(folder) in message
        assert not mark.exists()
        assert not mark.with_name("asked").exists()

    def test_of_a_tokenizer_is_not_run(self, folder: Path, mark: Path) -> None:
        (folder / "own.py").write_text(_CODE.format(mark=str(mark)))
        names = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
        change(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=names)
        with pytest.raises(ModelLoadError, match="--trust-remote-code"):
            load_tokenizer(EngineConfig(model=str(folder)))
        assert "--trust-remote-code" in refusal(folder)
        assert not mark.exists()
        assert not mark.with_name("asked").exists()

    def test_is_not_needed_where_transformers_has_its_own(self, folder: Path, mark: Path) -> None:
        add_code(folder, mark, model_type="llama")
        assert type(load(folder).model).__name__ == "LlamaForCausalLM"
        assert not mark.exists()
        assert not mark.with_name("asked").exists()

    def test_runs_when_it_is_trusted(self, folder: Path, mark: Path) -> None:
        add_code(folder, mark, model_type="own_llama")
        assert type(load(folder, trust_remote_code=True).model).__name__ == "OwnModel"
        assert mark.exists()
        assert not mark.with_name("asked").exists()

    def test_of_a_quantised_model(self, folder: Path, mark: Path, tmp_path: Path) -> None:
        add_code(folder, mark, model_type="own_llama")
        settings = {"quant_method": "fp8", "weight_block_size": [32, 32]}
        quantise(folder, block_fp8, settings, plain=Path(shutil.copytree(folder, tmp_path / "plain")))
        assert "--trust-remote-code" in refusal(folder)
        assert not mark.exists()
        assert type(load(folder, trust_remote_code=True).model).__name__ == "OwnModel"
        assert not mark.with_name("asked").exists()


def split(folder: Path, name: str) -> None:
    """Make the folder one whose index names `name` as its only weight file."""
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


class TestPlaces:
    @pytest.mark.parametrize("place", ["../{}", "{parent}/{}", "sub/../../{}", "..\\{}"])
    def test_index_that_leaves_the_folder(self, folder: Path, place: str) -> None:
        (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
        split(folder, place.format("elsewhere.safetensors", parent=folder.parent))
        assert "elsewhere.safetensors" in refusal(folder)
        assert "not the name of a file" in refusal(folder)

    def test_index_through_a_linked_folder(self, folder: Path) -> None:
        elsewhere = folder.parent / "elsewhere"
        elsewhere.mkdir()
        (folder / "model.safetensors").rename(elsewhere / "part.safetensors")
        (folder / "sub").symlink_to(elsewhere)
        split(folder, "sub/part.safetensors")
        assert "outside its model's folder" in refusal(folder)

    @pytest.mark.parametrize(
        "name",
        ["model.safetensors", "chat_template.jinja", "tokenizer.json", "additional_chat_templates/a.jinja"],
    )
    def test_link_that_leaves_the_folder(self, folder: Path, name: str) -> None:
        elsewhere = folder.parent / "secret"
        elsewhere.write_text("a secret")
        (folder / name).unlink(missing_ok=True)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(elsewhere)
        message = refusal(folder)
        assert name in message
        assert "outside its model's folder" in message

    def test_links_of_the_hub_cache(self, folder: Path, tmp_path: Path) -> None:
        repository = tmp_path / "models--owner--tiny"
        snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for path in folder.iterdir():
            path.rename(blobs / f"blob-of-{path.stem}{path.suffix}")
            (snapshot / path.name).symlink_to(f"../../blobs/blob-of-{path.stem}{path.suffix}")
        assert load(snapshot).name == "abc"

    def test_links_within_the_folder(self, folder: Path) -> None:
        (folder / "parts").mkdir()
        (folder / "model.safetensors").rename(folder / "parts" / "a.safetensors")
        (folder / "model.safetensors").symlink_to("parts/a.safetensors")
        assert load(folder).name == "tiny-llama"

    def test_linked_folder(self, folder: Path) -> None:
        link = folder.parent / "by-link"
        link.symlink_to(folder)
        assert load(link).name == "by-link"

    def test_config_that_names_weights(self, folder: Path) -> None:
        change(folder / "config.json", transformers_weights="other.safetensors")
        assert "transformers_weights" in refusal(folder)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_attention_code_of_a_repository_is_refused(folder, key):
    change(folder / "config.json", **{key: "owner/kernel"})
    assert "'owner/kernel'" in refusal(folder)
    assert "take attn_implementation out of the file" in refusal(folder)
