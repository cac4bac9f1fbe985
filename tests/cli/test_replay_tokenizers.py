# SPDX-License-Identifier: Apache-2.0
"""Message logs through real tokenizers: folders with a chat template, and plain tokenizer.json files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from typer import Typer
from typer.testing import CliRunner

from radixkv.cli.replay import replay_command, simulate_command
from radixkv.cli.replay.message_log import plain_text
from radixkv.cli.replay.readers import ReadOptions, read_trace
from radixkv.cli.replay.trace import TraceError

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no critics') }}{% endif %}"
    "<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "You answer questions about the weather of the town. " * 8},
    {"role": "user", "content": "Will it rain <|im_end|> today?"},
    CALL,
    {"role": "tool", "content": [{"type": "text", "text": "no rain"}]},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "And tomorrow, in the town on the other side of the hill?"},
]


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([plain_text(TALK, None)], trainer)
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=train(), eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "talk.jsonl"
    lines = [{"n": 0, "messages": TALK}, {"n": 1, "messages": TALK[:2]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    schedule = [
        {"t": t, "session": s, "upto": u, "max_tokens": 5} for t, s, u in ((0, 0, 2), (1, 1, 2), (2, 0, 6))
    ]
    (tmp_path / "talk_schedule.jsonl").write_text("".join(json.dumps(line) + "\n" for line in schedule))
    return path


def test_chat_template(log: Path, folder: Path) -> None:
    trace = read_trace(log, ReadOptions(block_size=4, tokenizer=str(folder)))
    trace.check()
    shorter = read_trace(log, ReadOptions(block_size=4))
    assert (trace.input_lengths < shorter.input_lengths).all()  # words are tokens, not bytes
    assert trace.input_lengths[0] == trace.input_lengths[1]
    assert trace.path(0).tolist() == trace.path(1).tolist()
    # the later turn begins with the earlier one, up to where an answer would have begun
    shared = len(set(trace.path(0).tolist()) & set(trace.path(2).tolist()))
    assert len(trace.path(0)) - shared <= 3
    assert trace.output_lengths.tolist() == [5, 5, 5]


def test_control_tokens_in_a_message_are_text(log: Path, folder: Path) -> None:
    plain = [{"role": "user", "content": "a<|im_end|>b"}]
    log.write_text(json.dumps({"n": 0, "messages": plain}) + "\n")
    log.with_name("talk_schedule.jsonl").unlink()
    as_text = read_trace(log, ReadOptions(tokenizer=str(folder))).num_tokens
    log.write_text(json.dumps({"n": 0, "messages": [{"role": "user", "content": "ab"}]}) + "\n")
    assert as_text > read_trace(log, ReadOptions(tokenizer=str(folder))).num_tokens + 2


def test_tokenizer_file_without_a_template(log: Path, folder: Path) -> None:
    trace = read_trace(log, ReadOptions(block_size=4, tokenizer=str(folder / "tokenizer.json")))
    expected = train().encode(plain_text(TALK[:2], None)).ids
    assert trace.input_lengths[0] == len(expected)


def test_replay_command_with_a_tokenizer(log: Path, folder: Path, tmp_path: Path) -> None:
    rates = tmp_path / "rates.json"
    options = ["--tokenizer", str(folder), "--block-size", "4", "--capacity", "8,inf", "--json", str(rates)]
    app = Typer()
    replay_command.add_commands(app)
    simulate_command.add_commands(app)
    result = CliRunner().invoke(app, ["replay", str(log), *options])
    assert result.exit_code == 0, result.output
    rows = json.loads(rates.read_text())
    unlimited = [row for row in rows if row["capacity_blocks"] is None]
    assert len({row["hit_blocks"] for row in unlimited}) == 1
    assert unlimited[0]["hit_blocks"] > 0


@pytest.mark.parametrize("what", ["missing", "empty folder", "damaged"])
def test_no_such_tokenizer(log: Path, tmp_path: Path, what: str) -> None:
    name = tmp_path / "nothing"
    if what == "empty folder":
        name.mkdir()
    elif what == "damaged":
        name.write_text("{", encoding="utf-8")
    with pytest.raises(
        TraceError, match=r"can't be loaded .*give a folder, a tokenizer.json, a hub id"
    ) as caught:
        read_trace(log, ReadOptions(tokenizer=str(name)))
    assert "\n" not in str(caught.value)


def test_messages_that_the_template_refuses(log: Path, folder: Path) -> None:
    messages = [{"role": "critic", "content": "bad"}]
    log.write_text(json.dumps({"n": 0, "messages": messages}) + "\n")
    log.with_name("talk_schedule.jsonl").unlink()
    with pytest.raises(TraceError, match=r"line 1: tokenizer .*no critics"):
        read_trace(log, ReadOptions(tokenizer=str(folder)))
