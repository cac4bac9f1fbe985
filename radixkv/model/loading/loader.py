"""From a model's name to a model ready to serve: embedded name, folder, GGUF file or hub id.

    load_model(config)
      1. resolve    name -> folder (or GGUF file) on this machine, fetched where needed and allowed
      2. inspect    files whole? configuration servable? (before gigabytes are read)
      3. load       tokenizer, weights; every weight accounted for
      4. dry run    the attention hook is called once per layer, as the configuration says

Each failure is a `ModelLoadError` of one paragraph. torch and transformers are imported inside functions, so
that importing this module (for the command line's help, say) costs nothing.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.config import EngineConfig
from radixkv.errors import ConfigError, ModelLoadError
from radixkv.model.loading.embedded_model import EMBEDDED_MODELS, find_embedded, prepare_embedded
from radixkv.model.loading.gguf_conversion import align_special_tokens, check_gguf, dequantising_progress
from radixkv.model.loading.load_progress import progress_bar
from radixkv.model.loading.quiet_transformers import quiet_transformers
from radixkv.model.loading.weight_files import check_weight_files, fingerprint_files

if TYPE_CHECKING:
    import torch

    from radixkv.text.tokenizer import Tokenizer

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
#: What is fetched from a hub repository: its top level only, and no pickles (they can run code).
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are.

    Attributes:
        name: what clients call the model.
        folder: the folder that holds its files.
        gguf_file: name of the GGUF file in it, or None for a folder of safetensors.
    """

    name: str
    folder: Path
    gguf_file: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class LoadedModel:
    """A model that is ready to serve.

    Attributes:
        model: the transformers model in eval mode; its attention calls `attention_hook`.
        tokenizer: its tokenizer.
        hf_config: its text configuration.
        name: what clients call it.
        num_layers, num_query_heads, num_kv_heads, head_size: as the dry run saw them.
        max_model_len: the most tokens it is made for.
        vocab_size: width of its logits.
        eos_token_ids: ids that end an output.
        fingerprint: identifies configuration, weights and dtype; K/V of different ones must not mix.
    """

    model: Any
    tokenizer: Tokenizer
    hf_config: Any
    name: str
    dtype: torch.dtype
    device: torch.device
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str

    def __repr__(self) -> str:
        kind = type(self.model).__name__
        dtype = str(self.dtype).removeprefix("torch.")
        return f"LoadedModel({self.name}, {kind}, {dtype} on {self.device}, {self.num_layers} layers)"


def load_model(config: EngineConfig, *, show_progress: bool = True) -> LoadedModel:
    """Find, check and load the model that `config` names.

    Args:
        config: `model`, `dtype`, `device`, `max_model_len`, `chat_template` and `allow_download` are used.
        show_progress: show bars on stderr while fetching and converting.

    Raises:
        ModelLoadError: unknown, unreachable, damaged or unsupported model.
        ConfigError: a dtype or device that this machine does not have.
    """
    source = resolve_model(config.model, allow_download=config.allow_download, show_progress=show_progress)
    if source.gguf_file is None:
        check_weight_files(source.folder)
    with quiet_transformers():
        return _load(config, source, show_progress)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    """The tokenizer of a model without its weights.

    Raises:
        ModelLoadError: unknown or unreachable model, unreadable tokenizer.
    """
    from radixkv.text.tokenizer import Tokenizer

    source = resolve_model(config.model, allow_download=config.allow_download)
    with quiet_transformers():
        hf_tokenizer = _read_tokenizer(source)
        if source.gguf_file is not None:
            align_special_tokens(hf_tokenizer, _read_config(source))
    return Tokenizer(hf_tokenizer, chat_template=config.chat_template)


def pull(name: str, *, show_progress: bool = True) -> Path:
    """Fetch a model (and convert it, for the embedded one) without loading it; the folder it is in.

    Raises:
        ModelLoadError: unknown or unreachable model, damaged download, full disk.
    """
    source = resolve_model(name, show_progress=show_progress)
    if source.gguf_file is None:
        check_weight_files(source.folder)
        return source.folder
    return source.folder / source.gguf_file


def resolve_model(name: str, *, allow_download: bool = True, show_progress: bool = True) -> ModelSource:
    """Turn a model's name into files on this machine, fetching them where needed and allowed.

    Tried in this order: embedded model, GGUF file, folder, hub id.

    Raises:
        ModelLoadError: none of them.
    """
    embedded = find_embedded(name)
    if embedded is not None:
        folder = prepare_embedded(embedded, allow_download=allow_download, show_progress=show_progress)
        return ModelSource(embedded.name, folder)
    path = Path(name).expanduser()
    if path.is_file():
        check_gguf(path)
        path = path.resolve()
        return ModelSource(path.stem, path.parent, path.name)
    if path.is_dir():
        return ModelSource(path.resolve().name, path.resolve())
    if name.lower().endswith(".gguf") or not _HUB_ID.fullmatch(name) or ".." in name:
        raise ModelLoadError(f"There is no file or folder {name}.{_suggestion(name)}")
    return ModelSource(name, _fetch_from_hub(name, allow_download, show_progress))


def _suggestion(name: str) -> str:
    known = [model.name for model in EMBEDDED_MODELS]
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f" Did you mean the embedded model {close[0]}?" if close else ""
    return f"{hint} A model is an embedded one ({', '.join(known)}), a folder, a .gguf file or a hub id."


def _fetch_from_hub(name: str, allow_download: bool, show_progress: bool) -> Path:
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not show_progress:
        disable_progress_bars()
    if "/" not in name and difflib.get_close_matches(
        name.lower(), [m.name for m in EMBEDDED_MODELS], cutoff=0.8
    ):
        raise ModelLoadError(f"There is no model {name}.{_suggestion(name)}")
    try:
        return Path(
            snapshot_download(
                name, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"], local_files_only=not allow_download
            )
        )
    except errors.GatedRepoError as error:
        raise ModelLoadError(
            f"The hub holds {name}, but access to it must be granted: accept its terms on its page, then log "
            "in with `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"There is no model {name} on the hub (or it is private: log in with `hf auth login` or set "
            f"HF_TOKEN).{_suggestion(name)}"
        ) from error
    except OSError as error:
        raise _hub_failure(name, error, allow_download) from error
    except Exception as error:  # HTTP libraries raise their own kinds
        raise _hub_failure(name, error, allow_download) from error


def _hub_failure(name: str, error: Exception, allow_download: bool) -> ModelLoadError:
    if not allow_download or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        reason = "downloads are switched off"
    else:
        cause: BaseException = error
        while cause.__cause__ is not None or cause.__context__ is not None:
            cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
        reason = f"the hub can't be reached ({' '.join(str(cause).split())[:200] or type(cause).__name__})"
    return ModelLoadError(
        f"{name} is neither a file nor a folder nor in the local hub cache, and {reason}. Check the name and "
        f"the connection (HF_ENDPOINT and proxy settings are respected), or give a folder.{_suggestion(name)}"
    )


def _load(config: EngineConfig, source: ModelSource, show_progress: bool) -> LoadedModel:
    from radixkv.model.loading import model_checks

    device = _device(config)
    dtype = _dtype(config, device)
    hf_config = _read_config(source)
    limit = model_checks.check_config(source.name, hf_config, config.max_model_len)
    hf_tokenizer = _read_tokenizer(source)
    if source.gguf_file is not None:
        align_special_tokens(hf_tokenizer, hf_config)
    model = _read_weights(source, hf_config, dtype, device, show_progress)
    eos = _end_tokens(model)
    from radixkv.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(hf_tokenizer, chat_template=config.chat_template, eos_token_ids=eos)
    shape = model_checks.check_model(source.name, model, limit)
    text_config = model.config.get_text_config(decoder=True)
    names = None if source.gguf_file is None else [source.gguf_file]
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        hf_config=text_config,
        name=source.name,
        dtype=dtype,
        device=device,
        num_layers=shape.num_layers,
        num_query_heads=shape.num_query_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        max_model_len=limit,
        vocab_size=int(text_config.vocab_size),
        eos_token_ids=tokenizer.eos_token_ids,
        fingerprint=fingerprint_files(source.folder, names, str(dtype), str(config.quantization)),
    )


def _device(config: EngineConfig) -> torch.device:
    import torch

    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda was asked for, but torch sees no CUDA device; use --device cpu")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def _dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    import torch

    if config.dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if config.dtype == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError("this GPU has no bfloat16; use --dtype float16 or float32")
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def _gguf_keyword(source: ModelSource) -> dict[str, str]:
    return {} if source.gguf_file is None else {"gguf_file": source.gguf_file}


def _explained(source: ModelSource, what: str, read: Callable[[], Any]) -> Any:
    """Call a reader of transformers and turn whatever it raises into one paragraph."""
    try:
        return read()
    except ModelLoadError:
        raise
    except Exception as error:  # damaged files surface as any kind of error
        detail = " ".join(str(error).split())[:300] or type(error).__name__
        place = source.folder / (source.gguf_file or "")
        raise ModelLoadError(
            f"The {what} of {source.name} can't be read from {place}: {detail}. If the files are damaged or "
            "incomplete, fetch them again."
        ) from error


def _read_config(source: ModelSource) -> Any:
    from transformers import AutoConfig

    from radixkv.model.loading.model_checks import unsupported

    def read() -> Any:
        try:
            return AutoConfig.from_pretrained(source.folder, **_gguf_keyword(source))
        except (ValueError, KeyError) as error:
            text = str(error)
            found = re.search(r"model type `([^`]+)`|architecture (\S+) is not supported", text)
            if found is None and "Unrecognized model" not in text:
                raise
            name = (found[1] or found[2]) if found else "of an unnamed type"
            raise unsupported(
                source.name, name, "the installed transformers has no implementation of its own for it"
            ) from error

    return _explained(source, "configuration", read)


def _read_tokenizer(source: ModelSource) -> Any:
    from transformers import AutoTokenizer

    return _explained(
        source,
        "tokenizer",
        lambda: AutoTokenizer.from_pretrained(source.folder, **_gguf_keyword(source)),
    )


def _read_weights(
    source: ModelSource, hf_config: Any, dtype: torch.dtype, device: torch.device, show_progress: bool
) -> Any:
    from transformers import AutoModelForCausalLM

    from radixkv.model.attention_hook import ATTENTION_NAME, register_attention_hook
    from radixkv.model.loading.model_checks import architecture_name, unsupported

    def read() -> Any:
        try:
            return AutoModelForCausalLM.from_pretrained(
                source.folder,
                dtype=dtype,
                attn_implementation=register_attention_hook(),
                device_map=None if device.type == "cpu" else {"": device},
                output_loading_info=True,
                **({"use_safetensors": True} if source.gguf_file is None else _gguf_keyword(source)),
            )
        except (ValueError, KeyError) as error:
            text = str(error)
            if "Unrecognized configuration class" in text:
                reason = "it does not generate text"
            elif ATTENTION_NAME in text or "attn_implementation" in text:
                reason = "it does not go through transformers' attention interface"
            else:
                raise
            raise unsupported(source.name, architecture_name(hf_config), reason) from error

    if source.gguf_file is None:
        model, report = _explained(source, "weights", read)
    else:
        label = f"Dequantising {source.gguf_file}"
        with (
            progress_bar(label, 1, unit="percent", show=show_progress) as bar,
            dequantising_progress(bar.update),
        ):
            model, report = _explained(source, "weights", read)
    missing = sorted(report.get("missing_keys") or ())
    mismatched = sorted(str(key) for key in report.get("mismatched_keys") or ())
    if missing or mismatched:
        absent = [*missing, *mismatched]
        raise ModelLoadError(
            f"The weights of {source.name} in {source.folder} do not fit its configuration: {len(missing)} "
            f"tensors are missing and {len(mismatched)} have another shape (first: {absent[0]}). The folder "
            "may be incomplete, or its config.json belong to another model."
        )
    return model.eval().requires_grad_(False)


def _end_tokens(model: Any) -> list[int]:
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config, "eos_token_id", None)
    if eos is None:
        return []
    return [int(token) for token in (eos if isinstance(eos, list | tuple) else [eos])]
