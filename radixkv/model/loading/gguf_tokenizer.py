# SPDX-License-Identifier: Apache-2.0
"""Tokenizer of a GGUF file, built from its vocabulary.

    tokenizer.huggingface.json   a whole tokenizer.json: taken as it is
    tokenizer.ggml.model         gpt2: merges of bytes; `tokenizer.ggml.pre` names how text is split before
                                 llama, gemma4: merges of characters; where none are listed, scores imply them

Names of splits are llama.cpp's; patterns are those of the tokenizer.json of the models that a name was made
for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from radixkv.errors import ModelLoadError
from radixkv.model.loading.gguf_file import GGUFFile
from radixkv.text.incremental_decoding import byte_alphabet

logger = logging.getLogger("radixkv")

#: Types of tokens.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _words(digits: str) -> str:
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_THREE, _ONE = (_words(r"\p{N}{1,3}"),), (_words(r"\p{N}"),)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased_words(contractions: str, digits: str) -> str:
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{contractions}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{contractions}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_TEKKEN = (_cased_words("", r"\p{N}"),)
_GPT4O = (_cased_words(rf"{_CONTRACTIONS}?", r"\p{N}{1,3}"),)
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
_SEED = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
#: Split at every digit, and then as GPT-2 does.
_DIGITS = (r"\p{N}",)
#: Names of splits -> patterns of consecutive splits; none: as GPT-2 does.
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "olmo", "mpt", "jais", "exaone4", "trillion", "dots1"), ()),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS
    ),
    **dict.fromkeys(
        (
            *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
            *("jina-v5-nano", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"),
        ),
        _THREE,
    ),
    **dict.fromkeys(
        (
            *("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"),
            *("stablelm2", "hunyuan", "solar-open", "grok-2"),
        ),
        _ONE,
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    "tekken": _TEKKEN,
    "qwen35": _QWEN35,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK),
    "deepseek-coder": _CODER,
    "seed-coder": _SEED,
}


def tokenizer_of(file: GGUFFile) -> Any:
    """The tokenizer of a file, as a transformers tokenizer.

    Raises:
        KeyError: its vocabulary, or the scores of that, are missing.
        ModelLoadError: it has a kind of tokenizer that can't be built.
    """
    from transformers import PreTrainedTokenizerFast  # heavy

    values = file.values
    kind = values.get("tokenizer.ggml.model")
    whole = values.get("tokenizer.huggingface.json")
    options: dict[str, Any] = {
        name: values[key]
        for name, key in (
            ("chat_template", "tokenizer.chat_template"),
            ("add_bos_token", "tokenizer.ggml.add_bos_token"),
            ("add_eos_token", "tokenizer.ggml.add_eos_token"),
        )
        if key in values
    }
    if isinstance(whole, str):
        backend = Tokenizer.from_str(whole)
        options = {name: value for name, value in options.items() if name == "chat_template"}
    elif kind in _KINDS:
        backend = _KINDS[kind](file)
        _add_tokens(backend, values)
        if kind == "llama":  # llama.cpp's default, for files that do not say
            options.setdefault("add_bos_token", True)
        elif kind == "gemma4":  # its chat template writes the token itself
            options["add_bos_token"] = False
    else:
        raise ModelLoadError(
            f"{file.path} has a tokenizer of the kind {kind!r}, which can't be built from a GGUF file. These "
            f"can: {', '.join(sorted(_KINDS))}. Serve the model's folder with its tokenizer.json instead."
        )
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = values.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token, int) and 0 <= token < backend.get_vocab_size():
            options[f"{name}_token"] = backend.id_to_token(token)
        else:
            options[f"{name}_token"] = None
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def _add_tokens(backend: Tokenizer, values: Any) -> None:
    """Let control tokens and those of users be matched whole, as llama.cpp does."""
    types = values.get("tokenizer.ggml.token_type") or ()
    typed = list(zip(values["tokenizer.ggml.tokens"], types, strict=False))
    special = [token for token, kind in typed if kind in (_UNKNOWN, _CONTROL)]
    own = [token for token, kind in typed if kind == _USER_DEFINED]
    for tokens, is_special in ((special, True), (own, False)):
        found = [token for token in tokens if backend.token_to_id(token) is not None]
        added = [AddedToken(token, normalized=False, special=is_special) for token in found]
        backend.add_special_tokens(added) if is_special else backend.add_tokens(added)


def _byte_level(file: GGUFFile) -> Tokenizer:
    values = file.values
    letters = byte_alphabet()
    spelling = {byte: letter for letter, byte in letters.items()}
    types = values.get("tokenizer.ggml.token_type") or ()
    vocab: dict[str, int] = {}
    for index, token in enumerate(values["tokenizer.ggml.tokens"]):
        is_text = index >= len(types) or types[index] not in (_CONTROL, _USER_DEFINED)
        if is_text and not letters.keys() >= set(token):
            token = "".join(spelling[byte] for byte in token.encode())
        vocab[token] = index
    tokenizer = Tokenizer(
        models.BPE(
            vocab, _merges(file, vocab), continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False
        )
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(file)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(file: GGUFFile) -> Any:
    """Return the splitter of text that the file names; warn if the name is unknown."""
    name = str(file.values.get("tokenizer.ggml.pre", "not stated"))
    patterns = _SPLITS.get(name)
    if patterns is None:
        logger.warning(
            "%s splits text in a way unknown here (%s): some text may become other tokens", file.path, name
        )
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=patterns in ((), _DIGITS))
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, last]) if splits else last


def _characters(file: GGUFFile) -> Tokenizer:
    """A vocabulary as SentencePiece makes it; the space before a text depends on the model's family."""
    if file.architecture in ("gemma", "gemma2", "gemma3") or file.values["tokenizer.ggml.model"] == "gemma4":
        return _gemma(file)
    vocab = {token: index for index, token in enumerate(file.values["tokenizer.ggml.tokens"])}
    tokenizer = Tokenizer(models.BPE(vocab, _merges(file, vocab), fuse_unk=True, byte_fallback=True))
    chain = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    has_prefix = bool(file.values.get("tokenizer.ggml.add_space_prefix", True))
    if file.architecture == "phi3":  # its tokenizer.json; a Metaspace would not double a text's own space
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
        )
    else:
        scheme = "first" if has_prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    if has_prefix:
        chain.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(chain)
    return tokenizer


def _gemma(file: GGUFFile) -> Tokenizer:
    """Gemma's, whose files spell runs of spaces as such, and whose scores are not the order of merges."""
    tokens = file.values["tokenizer.ggml.tokens"]
    if file.values["tokenizer.ggml.model"] != "gemma4":
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocab = {token: index for index, token in enumerate(tokens)}
    order = {token: -float(index) for token, index in vocab.items()}
    unknown = {"unk_token": "<unk>"} if "<unk>" in vocab else {}
    tokenizer = Tokenizer(
        models.BPE(vocab, _merges(file, vocab, order), fuse_unk=True, byte_fallback=True, **unknown)
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _merges(
    file: GGUFFile, vocab: dict[str, int], scores: dict[str, float] | None = None
) -> Sequence[tuple[str, str]]:
    """The merges that a file lists, or those that its vocabulary implies: the best scores first."""
    listed = file.values.get("tokenizer.ggml.merges")
    if listed is not None:
        return [(merge[: (at := merge.index(" ", 1))], merge[at + 1 :]) for merge in listed]
    if scores is None:
        scores = dict(zip(vocab, file.values["tokenizer.ggml.scores"], strict=False))
    found = []
    for token, score in scores.items():
        halves = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [pair for pair in halves if pair[0] in vocab and pair[1] in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(score, *pair) for pair in pairs]
    found.sort(key=lambda each: (each[0], len(each[1]), len(each[2])), reverse=True)
    return [(left, right) for _, left, right in found]


_KINDS: dict[Any, Callable[[GGUFFile], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _characters,
    "gemma4": _characters,
}
