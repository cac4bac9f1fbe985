# SPDX-License-Identifier: Apache-2.0
"""Loading: where models come from, what is refused and how, and that what loads computes the right thing."""

from __future__ import annotations

import itertools
import json
import struct
import threading
import types
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_configs import VOCAB_SIZE
from tiny_models import save_random_model, save_tiny_model, write_tiny_gguf
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
)

from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError, ModelLoadError
from radixkv.model.attention import own_attention
from radixkv.model.attention.attention_hook import PlainCausalStep
from radixkv.model.loading import load_progress
from radixkv.model.loading.loader import LoadedModel, load_model, pull
from radixkv.model.step_context import call_model
from radixkv.scheduling.length_classes import LengthClasses

TOKENS = list(range(5, 45))


def load(folder: Path | str, **options: object) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), device="cpu", **options), show_progress=False)  # type: ignore[arg-type]


@torch.inference_mode()
def logits_of(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    positions = torch.arange(len(tokens))
    return call_model(loaded.model, torch.tensor(tokens), positions, None, PlainCausalStep(positions))


@torch.inference_mode()
def reference_logits(folder: Path, tokens: list[int], **options: object) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, **options
    )
    logits: torch.Tensor = model.eval()(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def refusal(folder: Path | str, **options: object) -> str:
    """The message with which loading is refused: one paragraph that names the model."""
    with pytest.raises(ModelLoadError) as caught:
        load(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message


class TestFolder:
    def test_loads_and_computes(self, original: Path) -> None:
        loaded = load(original)
        assert loaded.name == "tiny-llama"
        assert repr(loaded) == "LoadedModel(tiny-llama, LlamaForCausalLM, float32 on cpu, 3 layers)"
        torch.testing.assert_close(
            logits_of(loaded, TOKENS), reference_logits(original, TOKENS), atol=1e-4, rtol=0
        )

    def test_loading_is_silent(self, original: Path, capfd: pytest.CaptureFixture[str]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load(original)
        assert capfd.readouterr() == ("", "")

    def test_logits_of_chosen_rows(self, original: Path) -> None:
        loaded = load(original)
        rows = torch.tensor([3, 17, 39])
        positions = torch.arange(40)
        with torch.inference_mode():
            logits = call_model(
                loaded.model, torch.tensor(TOKENS), positions, rows, PlainCausalStep(positions)
            )
        torch.testing.assert_close(logits, logits_of(loaded, TOKENS)[rows], atol=1e-5, rtol=0)

    def test_pull_returns_the_folder(self, original: Path) -> None:
        assert pull(str(original), show_progress=False) == original.resolve()

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_dtype(self, original: Path, dtype: str) -> None:
        loaded = load(original, dtype=dtype)
        assert loaded.dtype == getattr(torch, dtype)
        assert {p.dtype for p in loaded.model.parameters()} == {loaded.dtype}

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_no_gpu(self, original: Path) -> None:
        with pytest.raises(ConfigError, match="--device cpu"):
            load_model(EngineConfig(model=str(original), device="cuda"))

    def test_end_tokens_of_the_generation_config(self, folder: Path) -> None:
        (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
        assert load(folder).eos_token_ids == (7, 9, 2)  # 2 is the tokenizer's own

    def test_sampling_of_the_generation_config(self, folder: Path) -> None:
        file = folder / "generation_config.json"
        said = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
        file.write_text(json.dumps({**said, "do_sample": True, "max_new_tokens": 5}))
        assert load(folder).default_sampling == said
        assert load(folder, generation_config="none").default_sampling == {}
        file.write_text('{"temperature": 500.0}')
        with pytest.raises(ModelLoadError, match=r"temperature .* 500.*--generation-config none"):
            load(folder)

    def test_chat_template_from_the_configuration(self, original: Path) -> None:
        loaded = load(original, chat_template="{{ messages[0]['content'] }}!")
        ids = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
        assert loaded.tokenizer.decode(ids) == "hi!"

    def test_chat_template_that_is_none(self, original: Path) -> None:
        with pytest.raises(ConfigError, match=r"not valid Jinja: line 2: .*--chat-template"):
            load(original, chat_template="{% for message in messages %}\n{% endif %}")
        load(original, chat_template="{{ raise_exception('no user here') }}")


class TestFingerprint:
    def test_same_model_elsewhere(self, original: Path, folder: Path) -> None:
        assert load(original).fingerprint == load(folder).fingerprint

    def test_other_weights(self, folder: Path) -> None:
        before = load(folder).fingerprint
        state = load_file(folder / "model.safetensors")
        state["model.norm.weight"][0] += 1
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        assert load(folder).fingerprint != before

    def test_other_configuration(self, folder: Path) -> None:
        before = load(folder).fingerprint
        change_config(folder, rms_norm_eps=1e-3)
        assert load(folder).fingerprint != before

    def test_other_dtype(self, original: Path) -> None:
        assert load(original).fingerprint != load(original, dtype="bfloat16").fingerprint


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


class TestDamagedFiles:
    def test_no_config(self, folder: Path) -> None:
        (folder / "config.json").unlink()
        assert "no config.json" in refusal(folder)

    def test_broken_config(self, folder: Path) -> None:
        (folder / "config.json").write_text('{"model_type": "lla')
        assert "configuration of tiny-llama can't be read" in refusal(folder)

    def test_no_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        assert "no weights" in refusal(folder)

    def test_pickled_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}.")
        assert "can run code" in refusal(folder)

    def test_only_gguf(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "it.Q4_0.gguf").write_bytes(b"GGUF")
        assert "it.Q4_0.gguf" in refusal(folder)

    @pytest.mark.parametrize("keep", [0, 5, 200, 50_000, -1])
    def test_truncated_weights(self, folder: Path, keep: int) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        assert "model.safetensors is damaged" in refusal(folder)

    def test_overwritten_header(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        path.write_bytes(struct.pack("<Q", 2**40) + data[8:])
        assert "is damaged" in refusal(folder)
        path.write_bytes(data[:8] + b"<" + data[9:])
        assert "is damaged" in refusal(folder)

    def test_missing_part(self, folder: Path) -> None:
        index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "1 of 2 weight files are missing" in refusal(folder)

    def test_missing_tensor(self, folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        del state["model.layers.1.mlp.up_proj.weight"]
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        assert "model.layers.1.mlp.up_proj.weight" in refusal(folder)

    def test_weights_of_another_shape(self, folder: Path) -> None:
        change_config(folder, intermediate_size=128)
        assert "tiny-llama" in refusal(folder)

    def test_weights_that_are_not_finite(self, folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        state["model.layers.2.mlp.up_proj.weight"][0, 0] = float("nan")
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        assert "undefined logits" in refusal(folder)

    def test_broken_tokenizer(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")
        assert "tokenizer of tiny-llama can't be read" in refusal(folder)

    def test_no_tokenizer(self, folder: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (folder / name).unlink()
        assert "tokenizer of tiny-llama" in refusal(folder)


class TestUnsupported:
    """Each refusal names the architecture and lists those that work."""

    def refused(self, folder: Path, architecture: str) -> str:
        message = refusal(folder)
        assert architecture in message
        assert "Llama (llama)" in message
        assert "GPT-OSS (gpt_oss)" in message
        return message

    def made(self, tmp_path: Path, model_type: str, **settings: object) -> Path:
        base = {"vocab_size": VOCAB_SIZE, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1}
        return save_random_model(
            tmp_path / model_type, AutoConfig.for_model(model_type, **{**base, **settings})
        )

    def test_unknown_model_type(self, folder: Path) -> None:
        change_config(folder, model_type="quantum_llama", architectures=["QuantumLlama"])
        self.refused(folder, "quantum_llama")

    def test_encoder_decoder(self, folder: Path) -> None:
        config = AutoConfig.for_model("t5", d_model=32, num_layers=2, num_heads=2, d_ff=32)
        config.architectures = ["T5ForConditionalGeneration"]
        config.save_pretrained(folder)
        assert "encoder-decoder" in self.refused(folder, "T5ForConditionalGeneration")

    def test_ignores_the_attention_setting(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(own_attention, "MODEL_TYPES", ())
        folder = self.made(tmp_path, "bloom", hidden_size=64, n_layer=2, n_head=4)
        assert "ignores the attention setting" in self.refused(folder, "BloomForCausalLM")

    def test_does_not_know_the_attention_interface(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(own_attention, "MODEL_TYPES", ())
        folder = self.made(tmp_path, "gptj", n_embd=64, n_layer=2, n_head=4, rotary_dim=8)
        self.refused(folder, "GPTJForCausalLM")

    def test_layers_with_a_state_of_a_family_without_kernels(self, tmp_path: Path) -> None:
        folder = self.made(
            tmp_path,
            "qwen3",
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            layer_types=["full_attention", "linear_attention"],
        )
        assert "linear_attention" in self.refused(folder, "Qwen3ForCausalLM")

    def test_mask_of_its_own(self, tmp_path: Path) -> None:
        """Doge adds a learned mask, which the hook does not see: only the comparison with eager finds out."""
        folder = self.made(
            tmp_path,
            "doge",
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        assert "differ from transformers' own" in self.refused(folder, "DogeForCausalLM")

    def test_window_that_is_not_passed_on(self, tmp_path: Path) -> None:
        folder = self.made(
            tmp_path,
            "phimoe",
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            sliding_window=8,
            max_position_embeddings=512,
        )
        assert "asks for a window of None" in self.refused(folder, "PhimoeForCausalLM")

    def test_head_size_that_the_kernels_do_not_take(self, tmp_path: Path) -> None:
        folder = save_tiny_model(tmp_path / "wide", "llama", head_dim=584)
        assert "head size 584" in self.refused(folder, "LlamaForCausalLM")


class TestLengthDependentRope:
    """Frequencies that follow a sequence's length: see `test_length_frequencies`."""

    @pytest.fixture(params=["dynamic", "longrope"])
    def scaled(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        rope: dict[str, object] = {"rope_type": request.param, "rope_theta": 10_000.0}
        rope["original_max_position_embeddings"] = 64
        if request.param == "dynamic":
            rope["factor"] = 4.0
            limit = 64
        else:
            rope.update(short_factor=[1.1] * 8, long_factor=[4.0] * 8)
            limit = 256
        return save_tiny_model(
            tmp_path / request.param, "llama", rope_parameters=rope, max_position_embeddings=limit
        )

    def test_beyond_the_original_length(self, scaled: Path) -> None:
        """Lengths are in classes, and nothing else of the model depends on the limit."""
        loaded = load(scaled, max_model_len=96)
        assert loaded.max_model_len == 256
        assert loaded.lengths == LengthClasses((64,))
        assert loaded.fingerprint == load(scaled, max_model_len=64).fingerprint
        torch.testing.assert_close(
            logits_of(loaded, TOKENS), reference_logits(scaled, TOKENS), atol=1e-4, rtol=0
        )

    def test_served_within_the_original_length(self, scaled: Path) -> None:
        loaded = load(scaled, max_model_len=64)
        assert loaded.max_model_len == 64
        assert loaded.lengths is None
        torch.testing.assert_close(
            logits_of(loaded, TOKENS), reference_logits(scaled, TOKENS), atol=1e-4, rtol=0
        )


class TestNames:
    @pytest.mark.parametrize("name", ["/no/such/folder", "missing.gguf", "a/b/c", "../up", "with space"])
    def test_neither_file_nor_hub_id(self, name: str) -> None:
        message = refusal(name)
        assert name in message
        assert "smollm2-135m-instruct" in message

    def test_slip_of_the_embedded_name(self) -> None:
        assert "Did you mean the embedded model smollm2-135m-instruct" in refusal("smollm2-135m-instrct")

    def test_hub_id_without_downloads(self) -> None:
        assert "downloads are switched off" in refusal("no-such-owner/no-such-model", allow_download=False)


@pytest.fixture
def hub(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub on this machine that holds `owner/tiny`; yields the paths it was asked for."""
    from huggingface_hub import constants

    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), hub_handler(original, asked))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    try:
        yield asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def hub_handler(folder: Path, asked: list[str]) -> type[BaseHTTPRequestHandler]:
    commit = "0" * 40
    files = {path.name: path for path in folder.iterdir()}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.respond(body=False)

        def do_GET(self) -> None:
            self.respond(body=True)

        def respond(self, body: bool) -> None:
            path = self.path.partition("?")[0]
            asked.append(path)
            name = path.rpartition("/")[2]
            if path.startswith("/api/models/owner/tiny/tree"):
                tree = [
                    {"type": "file", "path": n, "size": p.stat().st_size, "oid": "1" * 40}
                    for n, p in files.items()
                ]
                self.send(json.dumps(tree).encode(), body, "application/json")
            elif path.startswith("/api/models/owner/tiny"):
                siblings = [{"rfilename": n} for n in [*files, "pytorch_model.bin", "onnx/model.json"]]
                info = {"id": "owner/tiny", "sha": commit, "siblings": siblings}
                self.send(json.dumps(info).encode(), body, "application/json")
            elif path.startswith("/owner/tiny/resolve/") and name in files:
                self.send(files[name].read_bytes(), body, "application/octet-stream", etag=name)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def send(self, data: bytes, body: bool, kind: str, etag: str = "x") -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


class TestHub:
    def test_fetches_once(self, hub: list[str], original: Path) -> None:
        loaded = load("owner/tiny")
        assert loaded.name == "owner/tiny"
        torch.testing.assert_close(
            logits_of(loaded, TOKENS), reference_logits(original, TOKENS), atol=1e-4, rtol=0
        )
        assert not [path for path in hub if path.endswith((".bin", "onnx/model.json"))]
        hub.clear()
        assert load("owner/tiny", allow_download=False).fingerprint == loaded.fingerprint
        assert not hub

    def test_unknown_repository(self, hub: list[str]) -> None:
        assert "There is no model owner/unknown on the hub" in refusal("owner/unknown")

    def test_unreachable(self, hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        assert "can't be reached" in refusal("owner/tiny")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf")


class TestGguf:
    def test_loads_and_computes(self, gguf_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
        loaded = load(gguf_file, gguf="float32")
        assert capfd.readouterr() == ("", "")
        assert loaded.name == "tiny.Q8_0"
        assert loaded.max_model_len == 128
        assert loaded.eos_token_ids == (2,)
        expected = reference_logits(gguf_file.parent, TOKENS, gguf_file=gguf_file.name)
        torch.testing.assert_close(logits_of(loaded, TOKENS), expected, atol=1e-4, rtol=0)
        ids = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "Grüße"}])
        assert loaded.tokenizer.decode(ids, skip_special_tokens=False).startswith(
            "<|im_start|>user\nGrüße<|im_end|>"
        )

    def test_configuration_is_what_transformers_reads(self, gguf_file: Path) -> None:
        expected = AutoConfig.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name).to_dict()
        found = load(gguf_file).hf_config.to_dict()
        other = ("_model_name_or_path", "architectures", "dtype", "unk_token_id")
        for name in other:  # of the file, and of how it was loaded
            expected.pop(name, None)
            found.pop(name, None)
        assert found == expected

    def test_pull_returns_the_file(self, gguf_file: Path) -> None:
        assert pull(str(gguf_file), show_progress=False) == gguf_file.resolve()

    def test_not_gguf(self, tmp_path: Path) -> None:
        path = tmp_path / "model.gguf"
        path.write_bytes(b"<html>not found</html>")
        assert "is not a GGUF file" in refusal(path)

    @pytest.mark.parametrize("keep", [10, 3_000, 60_000])
    def test_truncated(self, gguf_file: Path, tmp_path: Path, keep: int) -> None:
        path = tmp_path / "cut.gguf"
        path.write_bytes(gguf_file.read_bytes()[:keep])
        assert "cut" in refusal(path)


def test_a_log_shows_how_much_of_the_weights_is_read(
    original: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once that takes some seconds; a model that is there at once needs no lines."""
    load_model(EngineConfig(model=str(original), device="cpu"))
    assert "Reading weights" not in capsys.readouterr().err
    clock = itertools.count(0, 2)
    monkeypatch.setattr(load_progress, "time", types.SimpleNamespace(monotonic=lambda: float(next(clock))))
    load_model(EngineConfig(model=str(original), device="cpu"))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Reading weights")]
    assert [line.split("(")[0] for line in lines][-1] == "Reading weights ... 100 % "
    assert len(lines) == 4
