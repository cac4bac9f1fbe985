# SPDX-License-Identifier: Apache-2.0
"""From a model's name to a model ready to serve.

    load_model(config)
      1. resolve    name -> folder (or GGUF file) on this machine, fetched where needed and allowed
      2. inspect    files whole and in their folder? weights in a form that is served? configuration servable?
                    (before gigabytes are read)
      3. load       tokenizer, weights; every weight accounted for
      4. dry run    the attention hook is called once per layer, as the configuration says
      5. identify   the fingerprint of all that its answers depend on

Each failure is a `ModelLoadError` of one paragraph. torch and transformers are imported inside functions, so
that importing this module (for the command line's help, say) costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError, ModelLoadError, WeightUpdateError
from radixkv.model.loading.checkpoint_formats import StoredForm, check_format
from radixkv.model.loading.fingerprint import fingerprint
from radixkv.model.loading.folder_checks import check_folder
from radixkv.model.loading.model_source import ModelSource, resolve_model
from radixkv.model.loading.pretrained import Pretrained
from radixkv.model.loading.quiet_transformers import quiet_transformers
from radixkv.model.loading.same_model import check_same_model
from radixkv.model.loading.sampling_defaults import sampling_defaults
from radixkv.model.loading.weight_files import stored_tensors

if TYPE_CHECKING:
    import torch

    from radixkv.images.image_processor import ImageProcessor
    from radixkv.model.attention.attention_shape import AttentionShape
    from radixkv.model.vision.vision_model import VisionModel
    from radixkv.scheduling.length_classes import LengthClasses
    from radixkv.text.tokenizer import Tokenizer

logger = logging.getLogger("radixkv")


@dataclass(frozen=True, slots=True, repr=False)
class LoadedModel:
    """A model that is ready to serve.

    Attributes:
        model: the transformers model in eval mode; its attention calls `attention_hook`.
        tokenizer: its tokenizer.
        hf_config: its text configuration.
        name: what clients call it.
        attention: heads and sizes of its layers, as the dry run saw them.
        max_model_len: the most tokens it is made for.
        vocab_size: width of its logits.
        eos_token_ids: ids that end an output.
        default_sampling: arguments of SamplingParams that its makers recommend.
        fingerprint: identifies weights, configuration, tokenizer and dtype; K/V of different ones don't mix.
        lengths: classes of lengths with rotary frequencies of their own; None: there is one.
        vision: the model's tower, and what prepares images for it; None: it takes text alone.
    """

    model: Any
    tokenizer: Tokenizer
    hf_config: Any
    name: str
    dtype: torch.dtype
    device: torch.device
    attention: AttentionShape
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: Mapping[str, Any]
    fingerprint: str
    lengths: LengthClasses | None = None
    vision: VisionModel | None = None

    def __repr__(self) -> str:
        kind = type(self.model).__name__
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"LoadedModel({self.name}, {kind}, {dtype} on {self.device}, {self.attention.num_layers} layers)"
        )


def load_model(config: EngineConfig, *, show_progress: bool = True) -> LoadedModel:
    """Find, check and load the model that `config` names.

    Args:
        config: `model`, `dtype`, `device`, `quantization`, `gguf`, `max_model_len`, `chat_template`,
            `allow_download` and `trust_remote_code` are used.
        show_progress: show bars on stderr while fetching and converting.

    Raises:
        ModelLoadError: unknown, unreachable, damaged or unsupported model.
        ConfigError: a dtype or device that this machine does not have.
    """
    source = find_model(config, show_progress)
    with quiet_transformers():
        return _load(config, source, show_progress)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    """The tokenizer of a model without its weights.

    Raises:
        ModelLoadError: unknown or unreachable model, unreadable tokenizer.
    """
    from radixkv.text.tokenizer import Tokenizer  # heavy: torch or transformers

    source = find_model(config, True, whole=False)
    with quiet_transformers():
        hf_tokenizer = _pretrained(config, source).tokenizer()
    return Tokenizer(hf_tokenizer, chat_template=config.chat_template)


def load_image_processor(config: EngineConfig) -> ImageProcessor | None:
    """The image processor of a model that sees, without its weights; None: it does not see.

    Raises:
        ModelLoadError: unknown or unreachable model, unreadable configuration.
    """
    from radixkv.model.vision.vision_model import has_image_settings, open_image_processor  # heavy: torch

    source = find_model(config, True, whole=False)
    if source.gguf_file is not None:
        return None
    files = _pretrained(config, source)
    hf_config = files.config()
    if not has_image_settings(hf_config, source.folder):
        return None
    return open_image_processor(source.name, hf_config, source.folder, files.tokenizer())


def tokenizer_of_file(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json that stands alone: it has no chat template.

    Raises:
        ModelLoadError: it can't be read.
    """
    from transformers import PreTrainedTokenizerFast  # heavy

    from radixkv.text.tokenizer import Tokenizer

    try:
        return Tokenizer(PreTrainedTokenizerFast(tokenizer_file=str(path)))
    except Exception as error:  # the library raises whatever it stumbles over
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelLoadError(f"{path} can't be read as a tokenizer.json ({reason}).") from None


def pull(name: str, *, show_progress: bool = True, trust_remote_code: bool = False) -> Path:
    """Fetch a model (and convert it, for the embedded one) without loading it; the folder or file it is in.

    Args:
        trust_remote_code: fetch a hub repository's Python files, too; nothing is run.

    Raises:
        ModelLoadError: unknown or unreachable model, damaged download, full disk.
    """
    return fetch(EngineConfig(model=name, trust_remote_code=trust_remote_code), show_progress=show_progress)


def fetch(config: EngineConfig, *, show_progress: bool = True) -> Path:
    """`pull` the model that `config` names, where it allows that.

    Raises:
        ModelLoadError: see `pull`.
    """
    return find_model(config, show_progress).path


def find_model(config: EngineConfig, show_progress: bool = True, *, whole: bool = True) -> ModelSource:
    """Find a model's files on this machine, fetched where needed and allowed, and check that they are whole.

    Raises:
        ModelLoadError: unknown, unreachable or damaged model.
    """
    source = resolve_model(
        config.model,
        allow_download=config.allow_download,
        show_progress=show_progress,
        with_code=config.trust_remote_code,
    )
    if source.gguf_file is None:
        check_folder(source.folder, weights=whole)
    return source


def check_stored_form(source: ModelSource) -> StoredForm | None:
    """Check a folder's files and the form of its weights by `check_folder` and `check_format`.

    Returns:
        The form; None: weights are plain numbers, or those of a GGUF file.

    Raises:
        ModelLoadError: a file is missing or damaged, or the weights are in a form that is not served.
    """
    if source.gguf_file is not None:
        return None
    return check_format(source.name, source.folder, check_folder(source.folder))


def _pretrained(config: EngineConfig, source: ModelSource) -> Pretrained:
    return Pretrained(source, config.trust_remote_code, config.allow_download)


def _load(config: EngineConfig, source: ModelSource, show_progress: bool) -> LoadedModel:

    from radixkv.model.attention.length_frequencies import classify_lengths
    from radixkv.model.loading import model_checks
    from radixkv.model.vision.vision_model import open_vision
    from radixkv.text.tokenizer import Tokenizer, check_chat_template

    form = check_stored_form(source)
    files = _pretrained(config, source)
    hf_config = files.config()
    plan = _plan(config, source, hf_config, form, source.folder)
    if not plan.sees:
        _say_why_blind(source, hf_config)
    limit = files.explained(
        "configuration", lambda: model_checks.check_config(source.name, hf_config, config.max_model_len)
    )
    hf_tokenizer = files.tokenizer()
    if config.chat_template is not None:
        check_chat_template(hf_tokenizer, config.chat_template)
    model = plan.read(files, hf_config, show_progress)
    lengths = classify_lengths(model, min(limit, config.max_model_len or limit))
    if lengths.ends:
        logger.info(
            "%s has other rotary frequencies for sequences of more than %s tokens: these share no prefixes "
            "with shorter ones",
            source.name,
            ", ".join(map(str, lengths.ends)),
        )
    text_config = model.config.get_text_config(decoder=True)
    vocab_size = int(text_config.vocab_size)
    tokenizer = files.explained(
        "tokenizer",
        lambda: Tokenizer(
            hf_tokenizer, chat_template=config.chat_template, eos_token_ids=_end_tokens(source.name, model)
        ),
    )
    defaults: dict[str, Any] = {}
    if config.generation_config == "auto":
        defaults = files.explained("generation config", lambda: sampling_defaults(source.name, model))
    shape = files.explained("weights", lambda: model_checks.check_model(source.name, model, limit))
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        hf_config=text_config,
        name=source.name,
        dtype=plan.dtype,
        device=plan.device,
        attention=shape,
        max_model_len=limit,
        vocab_size=vocab_size,
        # A token that the model can't choose ends nothing.
        eos_token_ids=tuple(token for token in tokenizer.eos_token_ids if 0 <= token < vocab_size),
        default_sampling=defaults,
        fingerprint=fingerprint(source, *plan.facts),
        lengths=lengths if lengths.ends else None,
        vision=open_vision(source.name, model, source.folder, hf_tokenizer) if plan.sees else None,
    )


def reload_model(config: EngineConfig, served: LoadedModel, weights: str) -> LoadedModel:
    """Load a served model with other weights of the same configuration.

    Tokenizer, limits and names stay those of the served model.

    Args:
        config: the engine's; names the served model's own files.
        served: the model; its weights are not looked at, and may be None.
        weights: a folder with a config.json and safetensors, or a GGUF file where the model is one.

    Raises:
        WeightUpdateError: unreadable or incomplete weights, or another model's.
    """
    source = find_model(config, False)
    try:
        new = find_model(replace(config, model=weights, allow_download=False), False)
        with quiet_transformers():
            return _reload(config, served, source, new)
    except (ModelLoadError, ConfigError) as error:
        raise WeightUpdateError(f"The weights of {served.name} were not changed: {error}") from error


def _reload(config: EngineConfig, served: LoadedModel, source: ModelSource, new: ModelSource) -> LoadedModel:

    from radixkv.model.loading import model_checks
    from radixkv.model.vision.vision_model import open_vision

    if config.takes_adapters:
        raise ModelLoadError(
            "an engine with adapters (--lora, --lora-dir) keeps its base model; merge the adapter into the "
            "new weights and serve them without, or restart it."
        )
    if (source.gguf_file is None) != (new.gguf_file is None):
        kind = "a folder of safetensors" if source.gguf_file is None else "a GGUF file"
        raise ModelLoadError(f"{new.path} is not {kind}, as the served model is.")
    form = check_stored_form(new)
    files = _pretrained(config, new)
    hf_config = files.config()
    check_same_model(_pretrained(config, source).config(), hf_config, new.path)
    plan = _plan(config, new, hf_config, form, source.folder)
    if plan.device.type == "cuda":
        if form is not None or config.quantization is not None or new.gguf_file is not None:
            raise ModelLoadError(
                "on a GPU only weights of 16 or 32 bits can be changed while the engine runs; restart it "
                "with the new ones"
            )
        # Beside the served weights and the K/V, the GPU may have no room for them.
        plan = replace(plan, device=plan.device.__class__("cpu"), dtype=served.dtype)
    model = plan.read(files, hf_config, False)
    unknown = sorted(files.unread.difference(_names(source)))
    if unknown:
        raise ModelLoadError(
            f"the served model has no tensors of {len(unknown)} names (first: {unknown[0]!r:.200}). Give the "
            "names of its checkpoint, or those of transformers' named_parameters()."
        )
    limit = served.max_model_len
    shape = files.explained("weights", lambda: model_checks.check_model(new.name, model, limit))
    if shape != served.attention:
        raise ModelLoadError(f"The attention of {new.path} has other sizes than the served model's.")
    vision = None
    if plan.sees:
        vision = open_vision(source.name, model, source.folder, _pretrained(config, source).tokenizer())
    return replace(
        served,
        model=model,
        hf_config=model.config.get_text_config(decoder=True),
        device=plan.device,
        fingerprint=fingerprint(new, *plan.facts, text_of=source.folder),
        vision=vision,
    )


def _names(source: ModelSource) -> Collection[str]:
    return () if source.gguf_file is not None else stored_tensors(source.folder)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Plan of reading a model's weights.

    Attributes:
        form: stored form of the weights that readers of ours read; None: transformers reads them.
        sees: with the parts that encode images.
        keeps: how stored weights are kept as they are; None: they are expanded.
        blocks: the same of a GGUF file's.
    """

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    form: StoredForm | None
    sees: bool
    keeps: Literal["panels", "tiles"] | None
    blocks: Literal["panels", "tiles"] | None

    @property
    def facts(self) -> tuple[str, str]:
        """Settings that the model's numbers depend on beside its files."""
        return str(self.dtype), _form_name(self.blocks or self.keeps) or str(self.config.quantization)

    def read(self, files: Pretrained, hf_config: Any, show_progress: bool) -> Any:
        """Return the transformers model."""
        for_ranks = self.config.tensor_parallel > 1
        if self.blocks:
            is_on_gpu = self.blocks == "tiles"
            return files.block_model(
                hf_config,
                show_progress,
                for_ranks=for_ranks,
                dtype=self.dtype if is_on_gpu else None,
                device=self.device if is_on_gpu else None,
            )
        return files.model(
            hf_config,
            self.dtype,
            self.device,
            show_progress,
            sees=self.sees,
            form=self.form,
            keeps=self.keeps,
            for_ranks=for_ranks,
        )


def _plan(
    config: EngineConfig, source: ModelSource, hf_config: Any, form: StoredForm | None, settings: Path
) -> _Plan:
    """Plan the reading of a model whose image settings, if it has some, lie in the folder `settings`."""
    from radixkv.model.loading.stored_forms.readers import READERS
    from radixkv.model.vision.vision_model import has_sight

    device = _device(config)
    is_read = form is not None and form.method in READERS
    sees = source.gguf_file is None and has_sight(hf_config, settings)
    keeps = _kept_form(config, device, sees) if is_read else None
    dtype = _dtype(config, device, narrow=is_read and keeps is None and not _has_experts(hf_config))
    return _Plan(
        config,
        device,
        dtype,
        form if is_read else None,
        sees=sees,
        keeps=keeps,
        blocks=_kept_blocks(config, source, device),
    )


def _say_why_blind(source: ModelSource, hf_config: Any) -> None:
    """Log why a model that reads images elsewhere reads text alone here."""
    from radixkv.model.vision.families import reason_without_sight

    reason = reason_without_sight(hf_config)
    if reason:
        logger.warning("%s reads text alone, and gets a word for each image: %s", source.name, reason)


def _device(config: EngineConfig) -> torch.device:
    import torch  # heavy

    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda was asked for, but torch sees no CUDA device; use --device cpu")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def _kept_blocks(
    config: EngineConfig, source: ModelSource, device: torch.device
) -> Literal["panels", "tiles"] | None:
    """Return the form in which a GGUF file's blocks are kept, as `--gguf` says; None: they are expanded.

    Raises:
        ConfigError: they must be kept, and can't.
    """
    if source.gguf_file is None or config.gguf == "float32":
        return None
    on_gpu = _has_tiles(config, device)
    reason: str | None = None
    if config.quantization is not None or (config.dtype != "auto" and not on_gpu):
        reason = "--dtype and --quantization choose what the weights become instead"
    elif not on_gpu and device.type != "cpu":
        reason = f"--attention-backend {config.attention_backend} has no kernels for blocks on a GPU"
    elif not on_gpu:
        from radixkv.model.loading.gguf_blocks import reason_against  # heavy: torch or transformers

        reason = reason_against()
    if reason is not None:
        if config.gguf == "packed":
            raise ConfigError(f"--gguf packed is not possible for {source.path.name}: {reason}; leave it out")
        return None
    return "tiles" if on_gpu else "panels"


def _form_name(keeps: Literal["panels", "tiles"] | None) -> str | None:
    """Return the word for kept weights in a model's fingerprint."""
    return {"panels": "blocks", "tiles": "tiles", None: None}[keeps]


def _kept_form(config: EngineConfig, device: torch.device, sees: bool) -> Literal["panels", "tiles"] | None:
    """Return the form in which stored weights are kept; None: they are expanded.

    On a CPU, --dtype says what they become; on a GPU, what their products compute in.
    """
    if config.quantization is not None:
        return None
    if _has_tiles(config, device):
        return "tiles"
    if device.type != "cpu":
        return None
    from radixkv.model.loading.gguf_blocks import reason_against

    return "panels" if config.dtype == "auto" and not sees and reason_against() is None else None


def _has_tiles(config: EngineConfig, device: torch.device) -> bool:
    """Return True if a GPU's kernels compute the layers (or, in tests, their interpreter)."""
    return config.attention_backend == "triton" or (
        config.attention_backend == "auto" and device.type != "cpu"
    )


def _has_experts(hf_config: Any) -> bool:
    text = hf_config.get_text_config(decoder=True)
    return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _dtype(config: EngineConfig, device: torch.device, *, narrow: bool) -> torch.dtype:
    """Dtype of the model; `narrow`: on a CPU it is bfloat16 where nothing else is asked for.

    Experts are computed by torch there, slowly in bfloat16 and not each row alone.
    """
    import torch  # heavy

    if config.dtype == "auto":
        if device.type == "cpu":
            return torch.bfloat16 if narrow else torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if config.dtype == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError("this GPU has no bfloat16; use --dtype float16 or float32")
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def _end_tokens(name: str, model: Any) -> list[int]:
    """Ids that end an output, by `generation_config.json` or else `config.json`; negative ones mean none."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if found is None:
        found = getattr(model.config, "eos_token_id", None)
    if found is None:
        return []
    tokens = found if isinstance(found, list | tuple) else [found]
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ModelLoadError(
                f"eos_token_id of {name} must be a token id or a list of them, not {found!r:.100}; correct "
                "it in generation_config.json (or config.json)."
            )
    return [token for token in tokens if token >= 0]
