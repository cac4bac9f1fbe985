# SPDX-License-Identifier: Apache-2.0
"""A model read through transformers: configuration, tokenizer, weights. Every failure is one sentence.

Code that comes with a model runs only where `trust_remote_code` says so, and nothing is ever asked on
standard input. Unless it does, transformers reads what lies in the folder and never reaches for the hub.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from radixkv.errors import ConfigError, ModelLoadError
from radixkv.model.loading.checkpoint_formats import is_left_out_scale
from radixkv.model.loading.gguf_configs import complete_config, own_config, unread
from radixkv.model.loading.gguf_conversion import align_special_tokens
from radixkv.model.loading.gguf_extras import check_size, divide_frequencies, own_tokenizer
from radixkv.model.loading.gguf_splits import split_text
from radixkv.model.loading.load_progress import counted_tensors, progress_bar
from radixkv.model.loading.model_source import ModelSource

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Pretrained:
    """Reads the parts of one model through transformers.

    Attributes:
        source: where its files are.
        trust_remote_code: run Python code that comes with the model where transformers has none of its own.
        allow_download: such code may refer to other repositories: they may be fetched.
    """

    source: ModelSource
    trust_remote_code: bool = False
    allow_download: bool = True

    def config(self) -> Any:
        """The transformers configuration.

        Raises:
            ModelLoadError: unreadable, of an unknown type, or in need of code that is not trusted.
        """
        from transformers import AutoConfig

        from radixkv.model.loading.model_checks import unsupported

        def read() -> Any:
            own = None if self.source.gguf_file is None else own_config(self.source.path)
            if own is not None:
                return own
            try:
                found = AutoConfig.from_pretrained(self.source.folder, **self._keywords())
                if self.source.gguf_file is not None:
                    complete_config(self.source.path, found)
                return found
            except (ValueError, KeyError) as error:
                text = str(error)
                found = re.search(r"model type `([^`]+)`|architecture (\S+) is not supported", text)
                if found is None and "Unrecognized model" not in text:
                    raise
                name = (found[1] or found[2]) if found else "of an unnamed type"
                if self.source.gguf_file is not None and found is not None:
                    raise unread(self.source.path, name) from error
                raise unsupported(
                    self.source.name,
                    name,
                    "the installed transformers has no implementation of its own for it",
                ) from error

        return self.explained("configuration", read)

    def tokenizer(self, hf_config: Any = None) -> Any:
        """The transformers tokenizer.

        Args:
            hf_config: of a GGUF file: names its special tokens; read where it is needed and not given.

        Raises:
            ModelLoadError: unreadable, or in need of code that is not trusted.
        """
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        def read() -> Any:
            if self.source.gguf_file is not None:
                whole = own_tokenizer(self.source.path)
                if whole is not None:
                    return whole
                if own_config(self.source.path) is not None:
                    tokenizer = PreTrainedTokenizerFast.from_pretrained(
                        self.source.folder, **self._keywords()
                    )
                    split_text(self.source.path, tokenizer)
                    return tokenizer
            return AutoTokenizer.from_pretrained(self.source.folder, **self._keywords())

        tokenizer = self.explained("tokenizer", read)
        if self.source.gguf_file is not None:
            align_special_tokens(tokenizer, self.config() if hf_config is None else hf_config)
        return tokenizer

    def model(self, hf_config: Any, dtype: torch.dtype, device: torch.device, show_progress: bool) -> Any:
        """The transformers model in eval mode, its attention going through the hook; no tensor made up.

        Raises:
            ModelLoadError: unreadable or incomplete weights, an architecture that can't be served.
        """
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, core_model_loading

        from radixkv.model.attention_hook import ATTENTION_NAME, register_attention_hook
        from radixkv.model.latent_attention import absorb_latents
        from radixkv.model.loading.model_checks import architecture_name, unsupported
        from radixkv.model.own_attention import call_hook_from_own_attention, has_own_attention

        gguf = self.source.gguf_file
        if gguf is not None and own_config(self.source.path) is not None:
            return self._file_model(hf_config, show_progress, dtype).to(device)
        own = has_own_attention(str(getattr(hf_config, "model_type", "")))

        # Models that also read images are in a list of their own.
        kind = AutoModelForCausalLM if _has_causal_class(hf_config) else AutoModelForImageTextToText

        def read() -> Any:
            try:
                return kind.from_pretrained(
                    self.source.folder,
                    dtype=dtype,
                    attn_implementation="eager" if own else register_attention_hook(),
                    device_map=None if device.type == "cpu" else {"": device},
                    output_loading_info=True,
                    **({"use_safetensors": True} if gguf is None else {"config": hf_config}),
                    **self._keywords(),
                )
            except (ValueError, KeyError) as error:
                text = str(error)
                if "Unrecognized configuration class" in text:
                    reason = "it does not generate text"
                elif ATTENTION_NAME in text or "attn_implementation" in text:
                    reason = "it does not go through transformers' attention interface"
                else:
                    raise
                raise unsupported(self.source.name, architecture_name(hf_config), reason) from error

        if gguf is not None and kind is AutoModelForCausalLM:
            self.explained("weights", lambda: check_size(self.source.path, hf_config))
        with (
            progress_bar(
                "Reading weights" if gguf is None else f"Dequantising {gguf}",
                1,
                unit="percent",
                show=show_progress,
                patience=2.0 if gguf is None else 0.0,
            ) as update,
            counted_tensors(core_model_loading if gguf is None else _gguf_reading(), update),
        ):
            model, report = self.explained("weights", read)
        self._check_all_loaded(model, report)
        if gguf is not None:
            divide_frequencies(self.source.path, model)
        if own:
            call_hook_from_own_attention(model)
        absorb_latents(model, ATTENTION_NAME)
        return model.eval().requires_grad_(False)

    def block_model(self, hf_config: Any, show_progress: bool, *, for_ranks: bool = False) -> Any:
        """The model of a GGUF file with its weights in blocks, as `model` gives it in float32; for a CPU.

        Args:
            for_ranks: see `load_gguf`.

        Raises:
            ModelLoadError: see `model`.
        """
        return self._file_model(hf_config, show_progress, for_ranks=for_ranks)

    def _file_model(
        self, hf_config: Any, show_progress: bool, dtype: torch.dtype | None = None, for_ranks: bool = False
    ) -> Any:
        """The model of a GGUF file, read tensor by tensor; `dtype`: dequantised, None: as blocks."""
        from radixkv.model.attention_hook import ATTENTION_NAME, register_attention_hook
        from radixkv.model.latent_attention import absorb_latents
        from radixkv.model.loading.gguf_blocks import load_gguf
        from radixkv.model.own_attention import call_hook_from_own_attention, has_own_attention

        path = self.source.path
        own = has_own_attention(str(hf_config.model_type))
        attention = "eager" if own else register_attention_hook()
        if dtype is not None:
            self.explained("weights", lambda: check_size(path, hf_config))
        model = self.explained(
            "weights",
            lambda: load_gguf(
                path, hf_config, attention, dtype=dtype, show_progress=show_progress, for_ranks=for_ranks
            ),
        )
        divide_frequencies(path, model)
        if own:
            call_hook_from_own_attention(model)
        absorb_latents(model, ATTENTION_NAME)
        return model

    def explained(self, what: str, read: Callable[[], _T]) -> _T:
        """Call `read` and turn whatever it raises into one sentence.

        Raises:
            ModelLoadError: it raised anything but an error of ours.
        """
        try:
            return read()
        except (ModelLoadError, ConfigError):
            raise
        except BaseException as error:  # damaged files surface as any kind of error
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise  # the tokenizers library panics where a list of merges contradicts the vocabulary
            if "trust_remote_code" in str(error):
                raise self._needs_code(what) from error
            detail = " ".join(str(error).split())[:300] or type(error).__name__
            raise ModelLoadError(
                f"The {what} of {self.source.name} can't be read from {self.source.path}: {detail}. If the "
                "files are damaged or incomplete, fetch them again."
            ) from error

    def _needs_code(self, what: str) -> ModelLoadError:
        return ModelLoadError(
            f"The {what} of {self.source.name} needs Python code that comes with the model (auto_map in "
            f"{self.source.folder}), because transformers has none of its own for it. Such code can do "
            "whatever you can, so it is not run: read it, and if you trust it, pass --trust-remote-code."
        )

    def _keywords(self) -> dict[str, Any]:
        keywords: dict[str, Any] = {
            "trust_remote_code": self.trust_remote_code,
            "local_files_only": not (self.trust_remote_code and self.allow_download),
        }
        if self.source.gguf_file is not None:
            keywords["gguf_file"] = self.source.gguf_file
        return keywords

    def _check_all_loaded(self, model: Any, report: Any) -> None:
        """Refuse missing weights, which transformers fills with random numbers, and scales that it left out.

        Further tensors of a file are those of parts that aren't served, such as layers that guess tokens.
        """
        missing = sorted(report.get("missing_keys") or ())
        mismatched = sorted(str(key) for key in report.get("mismatched_keys") or ())
        if missing or mismatched:
            absent = [*missing, *mismatched]
            raise ModelLoadError(
                f"The weights of {self.source.name} in {self.source.folder} do not fit its configuration: "
                f"{len(missing)} tensors are missing and {len(mismatched)} have another shape (first: "
                f"{absent[0]}). The folder may be incomplete, or its config.json belong to another model."
            )
        modules = dict(model.named_modules())
        scales = sorted(
            key
            for key in report.get("unexpected_keys") or ()
            if key.rpartition(".")[0] in modules and is_left_out_scale(key)
        )
        if scales:
            raise ModelLoadError(
                f"The weights of {self.source.name} in {self.source.folder} have {len(scales)} tensors that "
                f"no layer reads (first: {scales[0]}): scales of a quantised form, without which its answers "
                "would be wrong. Give the model's folder in bfloat16 or float16, or a GGUF file of it."
            )


def _has_causal_class(hf_config: Any) -> bool:
    """Return False if transformers has a class for text and images alone for a configuration."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind = getattr(hf_config, "model_type", "")
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def _gguf_reading() -> Any:
    """Import transformers' reader of GGUF files: half a second, which other models need not take."""
    from transformers import modeling_gguf_pytorch_utils

    return modeling_gguf_pytorch_utils
