# SPDX-License-Identifier: Apache-2.0
"""Whatever stands in a model's files: it loads, or it is refused with a sentence."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_model_loader import load, refusal
from tiny_models import write_tiny_gguf

from radixkv.errors import ModelLoadError
from radixkv.model.loading.folder_checks import check_folder

few_examples = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
#: No large numbers: a configuration may ask for any number of layers.
any_setting = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def loads_or_says_why(folder: Path) -> None:
    message = ""
    try:
        load(folder)
    except ModelLoadError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 1500


class TestWeightFiles:
    @pytest.mark.parametrize("weight_map", [5, {"a": 5}, {"a": None}, {"a": ["x"]}, {}, [], {"a": ""}, None])
    def test_index_of_other_types(self, folder: Path, weight_map: Any) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert "model.safetensors.index.json" in refusal(folder)

    @pytest.mark.parametrize(
        "offsets", [["a", 5], [0, "5"], [0], [None, None], 5, [0.0, 4.0], [0, -1], [[], {}]]
    )
    def test_offsets_of_other_types(self, folder: Path, offsets: Any) -> None:
        header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
        data = struct.pack("<Q", len(header)) + header + bytes(4)
        (folder / "model.safetensors").write_bytes(data)
        assert "model.safetensors is damaged" in refusal(folder)

    @few_examples
    @given(index=anything)
    def test_any_index(self, folder: Path, index: Any) -> None:
        (folder / "model.safetensors").unlink(missing_ok=True)
        for content in (index, {"weight_map": index}, {"weight_map": {"a": index}}):
            (folder / "model.safetensors.index.json").write_text(json.dumps(content))
            with pytest.raises(ModelLoadError):
                check_folder(folder)

    @few_examples
    @given(header=anything)
    def test_any_header(self, folder: Path, header: Any) -> None:
        for content in (header, {"x": header}, {"x": {"data_offsets": header}}):
            data = json.dumps(content).encode()
            (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data + b"!")
            with pytest.raises(ModelLoadError, match="damaged"):
                check_folder(folder)

    @few_examples
    @given(data=st.binary(max_size=60))
    def test_any_bytes(self, folder: Path, data: bytes) -> None:
        (folder / "model.safetensors").write_bytes(data)
        with pytest.raises(ModelLoadError, match="damaged"):
            check_folder(folder)


SETTINGS = [
    *("eos_token_id", "sliding_window", "layer_types", "rope_parameters", "rope_scaling", "vocab_size"),
    *("max_position_embeddings", "head_dim", "num_key_value_heads", "architectures", "model_type"),
    *("quantization_config", "auto_map", "torch_dtype", "hidden_act", "rms_norm_eps", "tie_word_embeddings"),
]


class TestConfigurations:
    @pytest.mark.parametrize("number", [10**9, 0, -1])
    def test_impossible_numbers_of_layers_are_refused_before_they_are_made(
        self, folder: Path, number: int
    ) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": number}))
        with pytest.raises(ModelLoadError, match=f"num_hidden_layers {number}"):
            load(folder)

    @few_examples
    @given(name=st.sampled_from(SETTINGS), value=any_setting)
    def test_any_setting(self, folder: Path, name: str, value: Any) -> None:
        path = folder / "config.json"
        before = path.read_text()
        path.write_text(json.dumps({**json.loads(before), name: value}))
        loads_or_says_why(folder)
        path.write_text(before)

    @pytest.mark.parametrize("content", ["null", "[]", "5", '"x"', "{}", "[" * 100_000, "\x00", ""])
    @pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
    def test_files_that_are_not_objects(self, folder: Path, name: str, content: str) -> None:
        (folder / name).write_text(content)
        loads_or_says_why(folder)

    @pytest.mark.parametrize("eos", ["abc", 1.5, [2, "abc"], {"a": 1}, [[2]], True])
    @pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
    def test_end_tokens_that_are_no_ids(self, folder: Path, name: str, eos: Any) -> None:
        if name == "config.json":
            (folder / "generation_config.json").unlink()
        content = json.loads((folder / "config.json").read_text()) if name == "config.json" else {}
        (folder / name).write_text(json.dumps({**content, "eos_token_id": eos}))
        message = refusal(folder)
        assert "eos_token_id" in message

    @pytest.mark.parametrize("eos", [-1, [-1, 2], [2, 10**6], [-1, 10**30]])
    def test_end_tokens_that_mean_none(self, folder: Path, eos: Any) -> None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        assert load(folder).eos_token_ids == (2,)  # the tokenizer's own


class TestNames:
    @pytest.mark.parametrize(
        "name", ["x" * 5_000, "a/" * 2_500, "x" * 300, "nul\0nul", "~nobody-of-this-name/model"]
    )
    def test_names_that_no_file_can_have(self, name: str) -> None:
        assert "There is no model" in refusal(name)

    def test_linked_gguf_file_goes_by_its_link(self, tmp_path: Path) -> None:
        blobs = tmp_path / "blobs"
        blobs.mkdir()
        write_tiny_gguf(blobs / "0123abcd")
        (tmp_path / "tiny.Q8_0.gguf").symlink_to(blobs / "0123abcd")
        assert load(tmp_path / "tiny.Q8_0.gguf").name == "tiny.Q8_0"
