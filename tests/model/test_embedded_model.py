# SPDX-License-Identifier: Apache-2.0
"""The embedded model's way from the package index to the cache, and every way in which it can fail.

A tiny model stands in for the real one: its wheel lies in a folder to which pip is pointed by the
environment, as users point it at their own index. One test holds the real model to its GGUF file.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from nightly import by_day
from tiny_models import write_tiny_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixkv.engine.config import EMBEDDED_MODEL, EngineConfig
from radixkv.errors import ModelLoadError
from radixkv.model.loading import embedded_fetch, embedded_model, gguf_conversion, model_cache
from radixkv.model.loading.embedded_fetch import EmbeddedModel, largest_file
from radixkv.model.loading.embedded_model import conversion_facts, fetch_gguf, find_embedded, prepare_embedded
from radixkv.model.loading.loader import load_model, pull

GGUF_MEMBER = "tiny_gguf_model/tiny.Q8_0.gguf"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel, for pip's --find-links."""
    folder = tmp_path_factory.mktemp("index")
    gguf = write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf")
    info = "tiny_gguf_model-0.1.dist-info"
    with zipfile.ZipFile(folder / "tiny_gguf_model-0.1-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, GGUF_MEMBER)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf-model\nVersion: 0.1\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def model(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedModel:
    """The tiny embedded model, with an empty cache and pip pointed at the wheel's folder."""
    return install_tiny_model(index, tmp_path / "cache", monkeypatch)


def install_tiny_model(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedModel:
    monkeypatch.setenv("RADIXKV_CACHE", str(cache))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    wheel = next(index.glob("*.whl")).read_bytes()
    gguf = zipfile.ZipFile(next(index.glob("*.whl"))).read(GGUF_MEMBER)
    tiny = EmbeddedModel(
        name="tiny",
        aliases=("smallest",),
        requirement="tiny-gguf-model==0.1",
        package="tiny_gguf_model",
        wheel_size=len(wheel),
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        gguf_member=GGUF_MEMBER,
        gguf_size=len(gguf),
        gguf_sha256=hashlib.sha256(gguf).hexdigest(),
        converted_size=500_000,
    )
    monkeypatch.setattr(embedded_model, "EMBEDDED_MODELS", (tiny,))
    return tiny


def prepare(model: EmbeddedModel, **options: bool) -> Path:
    return prepare_embedded(model, show_progress=False, **options)


def refusal(model: EmbeddedModel, **options: bool) -> str:
    """The one paragraph with which preparing fails; it leaves no half-finished folder behind."""
    with pytest.raises(ModelLoadError) as caught:
        prepare(model, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert not model.folder.exists()
    if model_cache.models_folder().is_dir():
        assert not list(model_cache.models_folder().glob("*staging*"))
    return message


def cut_off_the_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    empty = tmp_path / "empty-index"
    empty.mkdir(exist_ok=True)
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty))


class TestPreparing:
    def test_weights_are_those_of_the_gguf_file(self, model: EmbeddedModel) -> None:
        folder = prepare(model)
        reference = AutoModelForCausalLM.from_pretrained(
            model.gguf_path.parent, gguf_file=model.gguf_path.name, dtype=torch.float32
        ).state_dict()
        converted = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert reference.keys() == converted.keys()
        for name, tensor in reference.items():
            assert converted[name].dtype == torch.float32
            assert torch.equal(converted[name], tensor), name

    def test_loads_by_name_and_alias(self, model: EmbeddedModel) -> None:
        for name in ("tiny", "smallest", "TINY"):
            loaded = load_model(EngineConfig(model=name, device="cpu"), show_progress=False)
            assert loaded.name == "tiny"
            assert loaded.eos_token_ids == (2,)
            ids = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
            assert ids[0] == 1

    def test_second_time_needs_neither_network_nor_work(
        self, model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        folder = prepare(model)
        before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
        cut_off_the_network(monkeypatch, tmp_path)
        assert prepare(model, allow_download=False) == folder
        assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before

    def test_its_makers_sampling_is_the_default(
        self, model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A folder that an earlier version made is completed, and not made again."""
        weights = prepare(model) / "model.safetensors"
        assert load_model(EngineConfig("tiny", device="cpu"), show_progress=False).default_sampling == {}
        before = weights.stat()
        said = {"do_sample": True, "temperature": 0.25, "top_p": 0.75}
        recommending = dataclasses.replace(model, sampling=said)
        monkeypatch.setattr(embedded_model, "EMBEDDED_MODELS", (recommending,))
        for _ in range(2):
            loaded = load_model(EngineConfig("tiny", device="cpu"), show_progress=False)
            assert loaded.default_sampling == {"temperature": 0.25, "top_p": 0.75}
        assert (weights.stat().st_ino, weights.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        shutil.rmtree(model.folder)
        assert (
            said.items() <= json.loads((prepare(recommending) / "generation_config.json").read_text()).items()
        )

    @pytest.mark.nightly
    def test_pull(self, model: EmbeddedModel) -> None:
        assert pull("tiny", show_progress=False) == model.folder

    def test_package_that_is_installed_already(
        self, model: EmbeddedModel, index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        cut_off_the_network(monkeypatch, tmp_path)
        site = tmp_path / "site"
        with zipfile.ZipFile(next(index.glob("*.whl"))) as wheel:
            wheel.extract(GGUF_MEMBER, site)
        (site / "tiny_gguf_model" / "__init__.py").write_text("raise ImportError('not to be imported')")
        monkeypatch.syspath_prepend(str(site))
        assert prepare(model, allow_download=False) == model.folder

    def test_progress_is_shown(self, model: EmbeddedModel, capfd: pytest.CaptureFixture[str]) -> None:
        prepare_embedded(model)
        shown = capfd.readouterr()
        assert shown.out == ""
        for step in ("Fetching tiny-gguf-model==0.1", "Writing the weights"):
            assert f"{step} ...\n" in shown.err
            assert f"{step} ... 100 %" in shown.err

    def test_folders_may_go_while_progress_is_measured(self, tmp_path: Path) -> None:
        (tmp_path / "wheel").write_bytes(b"12345")
        over = threading.Event()

        def come_and_go() -> None:
            while not over.is_set():
                (tmp_path / "pip" / "build" / "tracker").mkdir(parents=True)
                shutil.rmtree(tmp_path / "pip")

        worker = threading.Thread(target=come_and_go)
        worker.start()
        try:
            assert {largest_file(tmp_path) for _ in range(2_000)} == {5}
        finally:
            over.set()
            worker.join()

    @pytest.mark.nightly
    def test_files_can_be_read_by_others(self, model: EmbeddedModel) -> None:
        for path in prepare(model).iterdir():
            assert path.stat().st_mode & 0o444 == 0o444

    @pytest.mark.nightly
    def test_two_processes_at_once(self, model: EmbeddedModel) -> None:
        """Both come back with the same whole folder; one did the work."""
        script = (
            "from radixkv.model.loading.embedded_fetch import EmbeddedModel\n"
            "from radixkv.model.loading.embedded_model import prepare_embedded\n"
            f"print(prepare_embedded({model!r}))"
        )
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        results = [process.communicate(timeout=120) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], results
        assert {out.strip() for out, _ in results} == {str(model.folder)}
        assert sorted("Writing the weights" in err for _, err in results) == [False, True]
        assert model_cache.folder_damage(model.folder, conversion_facts(model)) is None


@pytest.fixture(scope="module")
def prepared_cache(index: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder in which the tiny model is prepared, to be copied."""
    cache = tmp_path_factory.mktemp("prepared") / "cache"
    with pytest.MonkeyPatch.context() as monkeypatch:
        prepare(install_tiny_model(index, cache, monkeypatch))
    return cache


class TestRepair:
    """A folder that is not exactly what was written is made anew, without the network."""

    @pytest.fixture
    def prepared(
        self, model: EmbeddedModel, prepared_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> EmbeddedModel:
        shutil.copytree(prepared_cache, tmp_path / "cache")
        assert model_cache.folder_damage(model.folder, conversion_facts(model)) is None
        cut_off_the_network(monkeypatch, tmp_path)
        return model

    def assert_repaired(self, model: EmbeddedModel) -> None:
        assert model_cache.folder_damage(model.folder, conversion_facts(model)) is not None
        prepare(model, allow_download=False)
        assert model_cache.folder_damage(model.folder, conversion_facts(model)) is None
        assert not [path for path in model_cache.models_folder().iterdir() if "staging" in path.name]

    @pytest.mark.parametrize(
        "name", ["manifest.json", "model.safetensors", "tokenizer.json", "config.json", "chat_template.jinja"]
    )
    def test_missing_file(self, prepared: EmbeddedModel, name: str) -> None:
        (prepared.folder / name).unlink()
        self.assert_repaired(prepared)

    @pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "tokenizer.json"])
    def test_truncated_file(self, prepared: EmbeddedModel, name: str) -> None:
        path = prepared.folder / name
        path.write_bytes(path.read_bytes()[:100])
        self.assert_repaired(prepared)

    @pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
    def test_flipped_bit(self, prepared: EmbeddedModel, name: str) -> None:
        path = prepared.folder / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        self.assert_repaired(prepared)

    @pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"files": 3}', '{"files": {"config.json": 1}}'])
    def test_nonsense_in_the_manifest(self, prepared: EmbeddedModel, manifest: str) -> None:
        (prepared.folder / "manifest.json").write_text(manifest)
        self.assert_repaired(prepared)

    def test_conversion_of_an_older_format(self, prepared: EmbeddedModel) -> None:
        path = prepared.folder / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "format": 0}))
        self.assert_repaired(prepared)

    def test_file_in_the_folders_place(self, prepared: EmbeddedModel) -> None:
        shutil.rmtree(prepared.folder)
        prepared.folder.write_text("in the way")
        self.assert_repaired(prepared)

    def test_killed_conversion(self, prepared: EmbeddedModel) -> None:
        """What a killed process leaves: a staging folder with half a model, and none under the final name."""
        staging = model_cache.models_folder() / ".tiny.staging-left"
        shutil.move(prepared.folder, staging / "tiny")
        self.assert_repaired(prepared)
        assert not staging.exists()

    @pytest.mark.nightly
    def test_damaged_gguf_is_fetched_again(
        self, model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: Path
    ) -> None:
        prepare(model)
        shutil.rmtree(model.folder)
        data = bytearray(model.gguf_path.read_bytes())
        data[-1] ^= 1
        model.gguf_path.write_bytes(data)
        prepare(model)
        assert fetch_gguf(model, allow_download=False, show_progress=False) == model.gguf_path


class TestFailures:
    def test_downloads_switched_off(self, model: EmbeddedModel) -> None:
        assert "downloads are switched off" in refusal(model, allow_download=False)

    def test_no_such_package(
        self, model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        cut_off_the_network(monkeypatch, tmp_path)
        message = refusal(model)
        assert "pip could not fetch tiny-gguf-model==0.1" in message
        assert "No matching distribution found" in message
        assert str(model.gguf_path) in message

    @pytest.mark.nightly
    def test_unreachable_index(
        self, model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
        monkeypatch.setenv("PIP_RETRIES", "1")
        with pytest.raises(ModelLoadError, match="Connection refused"):
            prepare_embedded(model)
        assert "100 %" not in capfd.readouterr().err

    def test_another_file_of_that_name(
        self, model: EmbeddedModel, index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        other = tmp_path / "other"
        shutil.copytree(index, other)
        with zipfile.ZipFile(next(other.glob("*.whl")), "a") as wheel:
            wheel.writestr("tiny_gguf_model/extra.py", "surprise = True")
        monkeypatch.setenv("PIP_FIND_LINKS", str(other))
        assert "expected SHA-256 checksum" in refusal(model)

    def test_no_pip(self, model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        real = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else real(name, *rest)
        )
        monkeypatch.setenv("PATH", "")
        assert "pip is needed" in refusal(model)

    @pytest.mark.nightly
    def test_pip_of_the_path(
        self, model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        real = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else real(name, *rest)
        )
        pip = tmp_path / "bin" / "pip"
        pip.parent.mkdir()
        pip.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pip "$@"\n')
        pip.chmod(0o755)
        monkeypatch.setenv("PATH", f"{pip.parent}{os.pathsep}{os.defpath}")
        assert prepare(model) == model.folder

    def test_too_little_room(self, model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 300_000, 300_000))
        message = refusal(dataclasses.replace(model, converted_size=541_000_000))
        assert "disk is full" in message
        assert "541 MB" in message
        assert "RADIXKV_CACHE" in message

    @pytest.mark.parametrize("number", by_day([errno.ENOSPC, errno.EDQUOT], errno.ENOSPC))
    def test_disk_fills_up_while_writing(
        self, model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        import safetensors.torch
        from safetensors import SafetensorError

        def fail(*_: object, **__: object) -> None:
            raise SafetensorError(f"I/O error: {os.strerror(number)} (os error {number})")

        monkeypatch.setattr(safetensors.torch, "save_file", fail)
        assert "disk is full" in refusal(model)

    def test_pip_fills_the_disk(
        self, model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        pip = tmp_path / "pip"
        pip.write_text(
            "#!/bin/sh\necho 'ERROR: Could not install: [Errno 28] No space left on device'\nexit 1\n"
        )
        pip.chmod(0o755)
        monkeypatch.setattr(embedded_fetch, "_pip_command", lambda _: [str(pip)])
        assert "disk is full" in refusal(model)

    def test_cache_that_is_no_folder(
        self, model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("RADIXKV_CACHE", str(tmp_path / "file"))
        assert "can't be kept" in refusal(model)

    @pytest.mark.nightly
    def test_unreadable_gguf(self, model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> None:
            raise ValueError("unknown\nquantisation")

        monkeypatch.setattr(gguf.quants, "dequantize", fail)
        assert "unknown quantisation" in refusal(model)

    def test_interrupt_leaves_nothing(self, model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(gguf_conversion, "convert_gguf", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(model)
        assert not model.folder.exists()
        assert not list(model_cache.models_folder().glob("*staging*"))


class TestCacheFolder:
    def test_order_of_settings(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("RADIXKV_CACHE", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert model_cache.cache_home() == tmp_path / ".cache" / "radixkv"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        assert model_cache.cache_home() == tmp_path / ".cache" / "radixkv"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert model_cache.cache_home() == tmp_path / "xdg" / "radixkv"
        monkeypatch.setenv("RADIXKV_CACHE", str(tmp_path / "own"))
        assert model_cache.models_folder() == tmp_path / "own" / "models"


@pytest.mark.nightly
def test_the_real_model() -> None:
    """SmolLM2's converted weights and tokenizer against what transformers reads from its GGUF file."""
    model = find_embedded(EMBEDDED_MODEL)
    assert model is not None
    try:
        folder = prepare(model)
        gguf = fetch_gguf(model, show_progress=False)
    except ModelLoadError as error:
        pytest.skip(f"the embedded model can't be fetched here: {error}")
    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    converted = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    reference = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).state_dict()
    assert reference.keys() == converted.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in reference.items())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    original = AutoTokenizer.from_pretrained(**source)
    text = "Hello, 12 apples\n\n 3.5 naïve 東京 👩‍🚀 <|im_start|>user\n\tdef f(x): return x"
    assert tokenizer(text).input_ids == original(text).input_ids
    assert tokenizer.chat_template == original.chat_template
