# SPDX-License-Identifier: Apache-2.0
"""A model's parts as transformers has them: configuration, tokenizer, weights. Every failure is one sentence.

A folder is read by transformers, a GGUF file by the modules `gguf_*` beside this one. Code that comes with a
model runs only where `trust_remote_code` says so, and nothing is ever asked on standard input. Unless it
does, transformers reads what lies in the folder and never reaches for the hub.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from radixkv.errors import ConfigError, ModelLoadError
from radixkv.model.loading.checkpoint_formats import StoredForm, is_left_out_scale
from radixkv.model.loading.gguf_configs import config_of
from radixkv.model.loading.gguf_file import GGUFFile, open_gguf
from radixkv.model.loading.load_progress import counted_weights, progress_bar
from radixkv.model.loading.model_source import ModelSource

if TYPE_CHECKING:
    import torch

    from radixkv.model.loading.stored_checkpoint import StoredCheckpoint

logger = logging.getLogger("radixkv")

_T = TypeVar("_T")

#: Held while transformers reads a model: it changes state of its whole process meanwhile, such as how weights
#: are initialised and tied, so that another thread's model would lack tensors.
_ALONE = threading.Lock()


class Pretrained:
    """Reads the parts of one model.

    Args:
        source: where its files are.
        trust_remote_code: run Python code that comes with the model where transformers has none of its own.
        allow_download: such code may refer to other repositories: they may be fetched.

    Attributes:
        unread: names of the folder's tensors that `model` found no use for.
    """

    def __init__(
        self, source: ModelSource, trust_remote_code: bool = False, allow_download: bool = True
    ) -> None:
        self.source = source
        self.unread: frozenset[str] = frozenset()
        self._keywords = {
            "trust_remote_code": trust_remote_code,
            "local_files_only": not (trust_remote_code and allow_download),
        }

    @functools.cached_property
    def file(self) -> GGUFFile:
        """The model's GGUF file, where it is one.

        Raises:
            ModelLoadError: it can't be read.
        """
        return self.explained("header", lambda: open_gguf(self.source.path))

    def config(self) -> Any:
        """The transformers configuration.

        Raises:
            ModelLoadError: unreadable, of an unknown type, or in need of code that is not trusted.
        """
        if self.source.gguf_file is not None:
            config = self.explained("configuration", lambda: config_of(self.file))
            config.name_or_path = str(self.source.folder)  # adapters of the file's model name it so
            return config
        from transformers import AutoConfig

        from radixkv.model.loading.model_checks import unsupported  # heavy: torch or transformers

        def read() -> Any:
            try:
                return AutoConfig.from_pretrained(self.source.folder, **self._keywords)
            except (ValueError, KeyError) as error:
                text = str(error)
                found = re.search(r"model type `([^`]+)`", text)
                if found is None and "Unrecognized model" not in text:
                    raise
                raise unsupported(
                    self.source.name,
                    found[1] if found else "of an unnamed type",
                    "the installed transformers has no implementation of its own for it",
                ) from error

        return self.explained("configuration", read)

    def tokenizer(self) -> Any:
        """The transformers tokenizer.

        Raises:
            ModelLoadError: unreadable, or in need of code that is not trusted.
        """
        if self.source.gguf_file is not None:
            from radixkv.model.loading.gguf_tokenizer import tokenizer_of  # heavy: torch or transformers

            return self.explained("tokenizer", lambda: tokenizer_of(self.file))
        from transformers import AutoTokenizer  # heavy

        return self.explained(
            "tokenizer", lambda: AutoTokenizer.from_pretrained(self.source.folder, **self._keywords)
        )

    def model(
        self,
        hf_config: Any,
        dtype: torch.dtype,
        device: torch.device,
        show_progress: bool,
        *,
        sees: bool = False,
        form: StoredForm | None = None,
        keeps: Literal["panels", "tiles"] | None = None,
        for_ranks: bool = False,
    ) -> Any:
        """The transformers model in eval mode, its attention going through the hook; no tensor made up.

        Args:
            sees: with the parts that encode images, where transformers has a class for the text alone, too.
            form: of weights that are read by `stored_forms`; None: by transformers.
            keeps: those stay as they are stored, in `panels` for a CPU, where the model computes in float32,
                or in `tiles` for a GPU. None: they are expanded to `dtype`.
            for_ranks: with `keeps`, see `pack_stored_weights` and `tile_stored_weights`.

        Raises:
            ModelLoadError: unreadable or incomplete weights, an architecture that can't be served.
        """
        if self.source.gguf_file is not None:
            return self._file_model(hf_config, show_progress, dtype, expand_on=device)
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # heavy

        from radixkv.model.attention.attention_hook import ATTENTION_NAME
        from radixkv.model.loading.model_checks import architecture_name, unsupported

        # Models that also read images are in a list of their own.
        text_alone = _has_causal_class(hf_config) and not sees
        kind = AutoModelForCausalLM if text_alone else AutoModelForImageTextToText
        stored = None if form is None else self._stored(form, dtype, keeps is not None)
        if stored is not None and keeps == "panels":
            dtype = stored.dtype

        def read() -> Any:
            arguments = {
                "dtype": dtype,
                "attn_implementation": _attention(hf_config),
                # Weights that stay as they are go to the device one by one, after all.
                "device_map": None if device.type == "cpu" or keeps is not None else {"": device},
                "output_loading_info": True,
                "ignore_mismatched_sizes": True,  # they are in the report, and refused with their names
            }
            try:
                if stored is not None:
                    return stored.load(kind, hf_config, arguments, self._keywords["trust_remote_code"])
                return kind.from_pretrained(
                    self.source.folder, use_safetensors=True, **arguments, **self._keywords
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

        with (
            _ALONE,
            progress_bar("Reading weights", 1, unit="percent", show=show_progress, patience=2.0) as update,
            counted_weights(update),
        ):
            model, report = self.explained("weights", read)
        self.unread = frozenset(map(str, report.get("unexpected_keys") or ()))
        self._check_all_loaded(model, report)
        if keeps == "panels":
            import torch  # heavy

            from radixkv.model.cpu_layers.pack_stored import pack_stored_weights  # needs numba, an extra

            rounded = self.explained("weights", lambda: pack_stored_weights(model, for_ranks=for_ranks))
            self._tell_expanded(rounded, torch.bfloat16)
        elif keeps == "tiles":
            from radixkv.model.gpu_layers.stored_modules import (
                tile_stored_weights,  # needs triton, which is optional
            )

            expanded = self.explained(
                "weights", lambda: tile_stored_weights(model, device, dtype, for_ranks=for_ranks)
            )
            self._tell_expanded(expanded, dtype)
        return _with_our_attention(model).eval().requires_grad_(False)

    def _tell_expanded(self, expanded: Mapping[str, int], dtype: torch.dtype) -> None:
        """Log which weights no kernel of this device reads."""
        if expanded:
            kinds = ", ".join(f"{count} of {title}" for title, count in sorted(expanded.items()))
            name = str(dtype).removeprefix("torch.")
            logger.warning(
                "%s: no kernel reads them, so they are expanded to %s: %s", self.source.name, name, kinds
            )

    def _stored(self, form: StoredForm, dtype: torch.dtype, keep: bool) -> StoredCheckpoint:
        """The folder's quantised weights, with a line that says what becomes of them."""
        from radixkv.model.loading.stored_checkpoint import StoredCheckpoint

        stored = self.explained("weights", lambda: StoredCheckpoint(self.source, form, keep=keep))
        if keep:
            logger.info(
                "%s: weights are multiplied as they are stored: %s", self.source.name, stored.summary()
            )
        else:
            logger.info(
                "%s: weights are expanded to %s: %s",
                self.source.name,
                str(dtype).removeprefix("torch."),
                stored.summary(),
            )
        return stored

    def block_model(
        self,
        hf_config: Any,
        show_progress: bool,
        *,
        for_ranks: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Any:
        """The model of a GGUF file with its weights in blocks, as `model` gives it.

        Args:
            for_ranks, dtype, device: see `load_gguf`.

        Raises:
            ModelLoadError: see `model`.
        """
        return self._file_model(hf_config, show_progress, dtype, for_ranks, device)

    def _file_model(
        self,
        hf_config: Any,
        show_progress: bool,
        dtype: torch.dtype | None = None,
        for_ranks: bool = False,
        device: torch.device | None = None,
        expand_on: torch.device | None = None,
    ) -> Any:
        """The model of a GGUF file, read tensor by tensor."""
        from radixkv.model.loading.gguf_blocks import load_gguf  # heavy: torch or transformers

        model = self.explained(
            "weights",
            lambda: load_gguf(
                self.file,
                hf_config,
                _attention(hf_config),
                dtype=dtype,
                device=device,
                expand_on=expand_on,
                show_progress=show_progress,
                for_ranks=for_ranks,
            ),
        )
        return _with_our_attention(model)

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

    def _check_all_loaded(self, model: Any, report: Any) -> None:
        """Refuse missing weights, which transformers fills with random numbers, and scales that it left out.

        Further tensors of a file are those of parts that aren't served, such as layers that guess tokens.
        """
        missing = sorted(report.get("missing_keys") or ())
        mismatched = sorted(_mismatch(key) for key in report.get("mismatched_keys") or ())
        if missing or mismatched:
            absent = [*missing, *mismatched]
            unknown = sorted(map(str, report.get("unexpected_keys") or ()))
            others = (
                f" {len(unknown)} of its tensors have names that the model does not know (first: "
                f"{unknown[0]}): if a tool wrote them so, give a folder with its authors' names."
                if missing and unknown
                else ""
            )
            raise ModelLoadError(
                f"The weights of {self.source.name} in {self.source.folder} do not fit its configuration: "
                f"{len(missing)} tensors are missing and {len(mismatched)} have another shape (first: "
                f"{absent[0]}). The folder may be incomplete, or its config.json belong to another model."
                f"{others}"
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


def _mismatch(key: Any) -> str:
    """A tensor of another shape than its model's in transformers' report, in words."""
    if not isinstance(key, tuple) or len(key) != 3:
        return str(key)
    name, found, expected = key
    return f"{name}, which is {list(found)} and not {list(expected)}"


def _has_causal_class(hf_config: Any) -> bool:
    """Return False if transformers has a class for text and images alone for a configuration."""
    from transformers.models.auto.modeling_auto import (  # heavy
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind = getattr(hf_config, "model_type", "")
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def _attention(hf_config: Any) -> str:
    """Name of the attention that a model is built with."""
    from radixkv.model.attention.attention_hook import register_attention_hook  # heavy: torch or transformers
    from radixkv.model.attention.own_attention import has_own_attention

    return "eager" if has_own_attention(str(hf_config.model_type)) else register_attention_hook()


def _with_our_attention(model: Any) -> Any:
    """The model with all of its attention going through the hook."""
    from radixkv.model.attention.attention_hook import ATTENTION_NAME  # heavy: torch or transformers
    from radixkv.model.attention.latent_attention import absorb_latents
    from radixkv.model.attention.own_attention import call_hook_from_own_attention, has_own_attention
    from radixkv.model.attention.query_scale import scale_queries_by_position

    if has_own_attention(str(model.config.model_type)):
        call_hook_from_own_attention(model)
    absorb_latents(model, ATTENTION_NAME)
    scale_queries_by_position(model)
    return model
