# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every family, and small tokenizers of every kind, made on the spot.

The models are random but not degenerate: every parameter is drawn (norm weights around one), so that a wrong
window, softcap, sink or head mapping shows in the logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

from tests.support.tiny_configs import VOCAB_SIZE, tiny_config

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_tiny_model(folder: Path, name: str, seed: int = 0, **changes: Any) -> Path:
    """Write a random model of a name in `tiny_configs`, with a byte-level tokenizer, to `folder`."""
    return save_random_model(folder, tiny_config(name, **changes), seed)


def save_random_model(folder: Path, config: Any, seed: int = 0) -> Path:
    """Write a random model of any configuration, with a byte-level tokenizer, to `folder`."""
    # The list of models that these two are in.
    sees = config.model_type in ("mistral4", "qwen3_5")
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    model.save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            parameter.copy_(1.0 + 0.2 * noise)
        elif parameter.ndim > 1:
            parameter.copy_(noise * (0.7 / parameter.shape[-1] ** 0.5) * 1.5)
        else:
            parameter.copy_(0.3 * noise)


_CORPUS = [
    "The quick brown fox jumps over the lazy dog. 0123456789",
    "Wie schön, daß Vögel über Bäume fliegen – nächstes Jahr wieder!",
    "東京は日本の首都です。 Привет, мир! 👩‍🚀🚀 naïve café",
    "def f(x):\n    return {'a': [1, 2, 3], 'b': x ** 2}\n\n\n\tprint(f(10))",
]


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE (GPT-2's scheme), 320 ids, chat control tokens, a template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return _wrapped(tokenizer, bos="<|im_start|>", eos="<|im_end|>")


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """BPE over characters with byte tokens for the rest (Llama 2's scheme), and a leading space."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=40,
        show_progress=False,
    )
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in _CORPUS], trainer)
    # As in Llama 2's tokenizer.json, byte tokens are ordinary entries of the vocabulary.
    state = _state(tokenizer)
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < 3]
    tokenizer = _from_state(state)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _wrapped(tokenizer, bos="<s>", eos="</s>", unk="<unk>")


def unigram_tokenizer() -> PreTrainedTokenizerFast:
    """Unigram with Metaspace (T5's and XLM-R's scheme); its vocabulary holds `</s>` with the best score."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0)]
    letters = sorted({char for text in _CORPUS for char in text if not char.isspace()})
    pieces += [(char, -5.0) for char in letters]
    pieces += [("▁the", -3.0), ("▁quick", -3.5), ("▁brown", -3.5), ("ing", -4.0), ("▁o", -3.0), ("ver", -4.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _wrapped(tokenizer, bos="<s>", eos="</s>", unk="<unk>")


def wordpiece_tokenizer() -> PreTrainedTokenizerFast:
    """WordPiece (BERT's scheme)."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return _wrapped(tokenizer, bos="[CLS]", eos="[SEP]", unk="[UNK]")


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": byte_level_tokenizer,
    "byte-fallback": byte_fallback_tokenizer,
    "unigram": unigram_tokenizer,
    "wordpiece": wordpiece_tokenizer,
}


def llama_gguf_writer(
    path: Path, *, hidden: int, inner: int, layers: int, context: int, split: int = 0, vocab: int = 0
) -> tuple[Any, int]:
    """A writer of a GGUF Llama with the byte-level tokenizer, without tensors, and the vocabulary's size.

    Args:
        split: the most tensors of a part; 0 for one file.
        vocab: the least size of the vocabulary.
    """
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama", split_max_tensors=split)
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    vocab = add_byte_level_tokenizer(writer, vocab)
    writer.add_vocab_size(vocab)
    return writer, vocab


def add_byte_level_tokenizer(writer: Any, size: int = 0) -> int:
    """Add the byte-level tokenizer to a writer of a GGUF file, with unused tokens up to a size; returns the
    size of its vocabulary."""
    tokenizer = byte_level_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    vocab += [f"<unused{number}>" for number in range(len(vocab), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocab)
    writer.add_token_types([3 if index < 3 else 1 for index in range(len(vocab))])
    merges = state["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)
    return len(vocab)


def add_llama_tensors(
    add: Callable[..., None], *, vocab: int, hidden: int, inner: int, layers: int, tied: bool = True
) -> None:
    """Call `add` with name (without `.weight`) and shape of each tensor of `llama_gguf_writer`'s model."""
    kv = hidden // 2
    add("token_embd", vocab, hidden)
    add("output_norm", hidden)
    if not tied:
        add("output", vocab, hidden)
    for layer in range(layers):
        for name, *shape in (
            ("attn_norm", hidden), ("attn_q", hidden, hidden), ("attn_k", kv, hidden),
            ("attn_v", kv, hidden), ("attn_output", hidden, hidden), ("ffn_norm", hidden),
            ("ffn_gate", inner, hidden), ("ffn_up", inner, hidden), ("ffn_down", hidden, inner),
        ):  # fmt: skip
            add(f"blk.{layer}.{name}", *shape)


def finish_gguf(writer: Any) -> None:
    """Write the file of a GGUF writer, and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tiny_gguf(path: Path) -> Path:
    """A tiny Llama with a byte-level tokenizer as a GGUF file with 8-bit weights."""
    import gguf

    writer, vocab = llama_gguf_writer(path, hidden=64, inner=96, layers=2, context=128)
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        data = random.standard_normal(shape).astype(np.float32) / np.float32(shape[-1] ** 0.5)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", 1 + data)
            return
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", gguf.quantize(data, kind), raw_dtype=kind)

    add_llama_tensors(add, vocab=vocab, hidden=64, inner=96, layers=2)
    finish_gguf(writer)
    return path


def _wrapped(tokenizer: Tokenizer, *, bos: str, eos: str, unk: str | None = None) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=eos, unk_token=unk
    )
    wrapped.chat_template = CHAT_TEMPLATE.replace("<|im_start|>", bos).replace("<|im_end|>", eos)
    return wrapped


def _state(tokenizer: Tokenizer) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(tokenizer.to_str())
    return state


def _from_state(state: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(state))
