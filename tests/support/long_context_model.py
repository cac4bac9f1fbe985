# SPDX-License-Identifier: Apache-2.0
"""A random Llama with 131,072 positions that answers a prompt of 30,000 tokens within seconds on a CPU.

Coding agents send tens of thousands of tokens with each turn, so they need a model that can be asked so much
anywhere. What this one says is noise, but noise that ends. Its tokens fall into eight classes, and after a
token of one class the likeliest are those of the next; after the last class comes the token that ends the
chat's turn, and where a grammar forbids that, those that close a string, an object and a list. An answer has
so seven tokens, greedy or sampled, and the strings and numbers of a forced call are no longer, whatever
`max_tokens` is.

    python tests/support/long_context_model.py FOLDER && radixkv serve FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tiny_models import randomize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

POSITIONS = 131_072
VOCAB_SIZE = 4096
END = "<|im_end|>"
CLASSES = 8
#: What an answer closes with, likeliest first: token -> weight in its logit, where other weights are about 1.
CLOSING = {END: 60.0, '"': 50.0, "}": 40.0, "]": 30.0, ",": 20.0}
#: What only the template writes.
MARKS = ("<|endoftext|>", "<|im_start|>", "<tool_call>", "</tool_call>")

#: As the templates of Hermes and Qwen: tools in the system message, calls and results in marks of their own.
CHAT_TEMPLATE = """\
{%- set first = messages[0] if messages and messages[0].role == 'system' else none %}
{%- if tools or first %}
    {{- '<|im_start|>system\\n' + (first.content if first else '') }}
    {%- if tools %}
        {{- '\\n\\nYou may call these functions:\\n<tools>' }}
        {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
        {{- '\\n</tools>\\n\\nCall one by writing\\n<tool_call>\\n'
            + '{"name": NAME, "arguments": ARGUMENTS}\\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not (loop.first and first) %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set arguments = call.function.arguments %}
            {{- '\\n' if message.content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
            {{- (arguments if arguments is string else arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def save_long_context_model(folder: Path, seed: int = 0) -> Path:
    """Write the model and its tokenizer to `folder`; 2 seconds, 1 MB."""
    tokenizer = long_context_tokenizer()
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS,
        rope_theta=1_000_000.0,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    _make_it_end(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def long_context_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 4,096 ids, trained on Python's own manual: 2.5 bytes of English or code a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 2,
        special_tokens=["<|endoftext|>", "<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sorted(topics.values()), trainer)
    marks = [AddedToken(mark, special=False, normalized=False) for mark in ("<tool_call>", "</tool_call>")]
    tokenizer.add_tokens(marks)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token=END,
        pad_token="<|endoftext|>",
        model_max_length=POSITIONS,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


@torch.no_grad()
def _make_it_end(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    """Give dimensions of the hidden state a meaning: one for each class of tokens, and one that always is.

    The embedding writes them, no layer does, and the output layer reads them.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    ids = tokenizer.convert_tokens_to_ids
    own = CLASSES + 1
    classes = torch.arange(len(tokenizer)) % CLASSES
    classes[ids(list(CLOSING))] = CLASSES - 1
    # What a prompt ends with: an answer begins with the second class.
    classes[tokenizer("\n").input_ids] = 0
    amount = 6 * embedding.std()
    embedding[:, -own:] = 0
    embedding[torch.arange(len(tokenizer)), classes - own] = amount
    embedding[:, -1] = amount
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[-own:] = 0
        layer.mlp.down_proj.weight[-own:] = 0
    model.model.norm.weight[-own:] = 1.0
    head[:, -own:] = 0
    after = classes > 0
    head[after, classes[after] - 1 - own] = 15.0
    for text, weight in CLOSING.items():
        head[ids(text)] = 0
        head[ids(text), -2] = weight
    head[ids(list(MARKS)), -1] = -100


if __name__ == "__main__":
    print(save_long_context_model(Path(sys.argv[1])))
