# SPDX-License-Identifier: Apache-2.0
"""Reading traces: every form, and every mistake with its line."""

from __future__ import annotations

import gzip
import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from radixkv.cli.replay.readers import Arrivals, ReadOptions, read, read_trace
from radixkv.cli.replay.trace import TraceError, infer_block_size


def write(path: Path, *lines: Any) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def line(ids: list[Any], length: int, **more: Any) -> dict[str, Any]:
    return {"timestamp": 1500, "input_length": length, "output_length": 3, "hash_ids": ids, **more}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_hash_ids(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"small{suffix}", line([5, 9], 1000), "", line([5, 7, 8], 1100))
    trace = read_trace(path)
    trace.check()
    assert trace.name == "small"
    assert (trace.num_requests, trace.num_blocks, trace.num_unique, trace.num_tokens) == (2, 5, 4, 2100)
    assert trace.block_size == 512
    assert trace.arrivals.tolist() == [1.5, 1.5]
    assert trace.path(0)[0] == trace.path(1)[0]
    assert trace.path(0)[1] != trace.path(1)[1]


def test_hex_ids_and_explicit_block_size(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", line(["ab", "cd"], 32), line(["ab"], 17))
    assert read_trace(path, ReadOptions(block_size=16)).num_unique == 2


def test_content_ids_are_told_apart_by_their_prefix(tmp_path: Path) -> None:
    first = line([1, 2, 1], 48, chat_id=1, parent_chat_id=-1, turn=1, type="text", timestamp=61.25)
    path = write(tmp_path / "t.jsonl", first, line([2, 1], 32, chat_id=2))
    trace = read_trace(path)
    trace.check()
    assert trace.num_unique == 5
    assert trace.arrivals[0] == 61.25


@pytest.mark.parametrize(
    ("lengths", "counts", "size"),
    [([1000, 1100], [2, 3], 512), ([100, 64], [1, 1], 64), ([15, 40], [0, 2], 16), ([10, 10], [1, 7], None)],
)
def test_block_size_is_inferred(lengths: list[int], counts: list[int], size: int | None) -> None:
    assert infer_block_size(lengths, counts) == size


WRONG = {
    "not json": (["{nope"], "line 1: neither a JSON line nor a CSV"),
    "late not json": ([line([1], 512), "{nope"], "line 2: not JSON"),
    "a list": ([line([1], 512), [1, 2]], "line 2: expected a JSON object"),
    "no ids": ([line([1], 512), {"input_length": 5}], "line 2: hash_ids must be a list"),
    "odd ids": ([line([1.5], 512)], "line 1: hash_ids must be integers or strings"),
    "no length": ([{"hash_ids": [1]}], "line 1: input_length is missing"),
    "negative length": ([line([1], -5)], "line 1: input_length must be a non-negative integer"),
    "text length": ([line([1], "many")], "line 1: input_length must be a non-negative integer"),  # type: ignore[arg-type]
    "nan time": (['{"hash_ids":[1],"input_length":9,"timestamp":NaN}'], "line 1: timestamp"),
    "more ids than tokens": ([line([1, 2, 3], 2)], "line 1: 3 hash_ids for an input_length of 2"),
    "two parents": ([line([1, 2], 1000), line([3, 2], 1000)], "line 2: block id 2 stands after block 3"),
    "a cycle": ([line([1, 2, 1], 1500)], "line 1: block id 1 stands after block 2"),
    "no such size": ([line([1, 2], 10), line([1], 900)], "block size can't be told"),
    "unknown": ([{"question": 5}], "line 1: a trace line is an object with hash_ids or messages"),
    "empty": ([], "empty"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_name_the_line(tmp_path: Path, case: str) -> None:
    lines, message = WRONG[case]
    path = write(tmp_path / "bad.jsonl", *lines)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_block_size_names_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", line([1, 2], 1000))
    with pytest.raises(TraceError, match=r"line 1: 2 hash_ids do not fit an input_length of 1000"):
        read_trace(path, ReadOptions(block_size=64))


def test_damaged_files(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(json.dumps(line([n], 512)).encode() + b"\n" for n in range(5000)))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="cut short"):
        read_trace(cut)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(bytes(range(128, 256)))
    with pytest.raises(TraceError, match="not UTF-8"):
        read_trace(binary)
    with pytest.raises(TraceError, match="no such file"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(TraceError, match="a folder"):
        read_trace(tmp_path)


def chat_log(folder: Path) -> Path:
    say = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": None}]
    write(folder / "log_tools.json", {"t": [{"name": "f"}]})
    write(
        folder / "log_schedule.jsonl", {"t": 0, "session": 0, "upto": 1}, {"t": 2.5, "session": 0, "upto": 2}
    )
    return write(folder / "log.jsonl", {"n": 0, "tools": "t", "messages": say})


def test_message_log_with_schedule(tmp_path: Path) -> None:
    path = chat_log(tmp_path)
    trace = read_trace(path, ReadOptions(block_size=8))
    text = '<tools>[{"name": "f"}]</tools>\n<|user|>hello\n<|assistant|>'
    assert trace.input_lengths.tolist() == [len(text), len(text) + len("\n<|assistant|>")]
    assert trace.arrivals.tolist() == [0.0, 2.5]
    # the second prompt begins with the first one
    assert trace.path(1)[: len(trace.path(0))].tolist() == trace.path(0).tolist()
    by_schedule = read_trace(tmp_path / "log_schedule.jsonl", ReadOptions(block_size=8))
    assert by_schedule.block_ids.tolist() == trace.block_ids.tolist()


def test_message_log_without_schedule(tmp_path: Path) -> None:
    path = write(tmp_path / "plain.jsonl", {"messages": [{"role": "user", "content": "x" * 50}]})
    assert read_trace(path).num_requests == 1


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"session": 7, "upto": 1}, "line 1: no session 7"),
        ({"session": 0, "upto": 9}, "line 1: upto must be from 1 to 2"),
        ({"session": 0, "upto": 1, "t": -1}, "line 1: t must be"),
    ],
)
def test_schedule_mistakes(tmp_path: Path, schedule: dict[str, Any], message: str) -> None:
    path = chat_log(tmp_path)
    write(tmp_path / "log_schedule.jsonl", schedule)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert message in str(caught.value)


def test_arrivals(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
    )
    arrivals = read(path)
    assert isinstance(arrivals, Arrivals)
    assert arrivals.input_lengths.tolist() == [374, 396]
    assert arrivals.arrivals[1] == pytest.approx(4.3146, abs=1e-3)
    with pytest.raises(TraceError, match="without prefix information"):
        read_trace(path)
    write(path, "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,many,44")
    with pytest.raises(TraceError, match="line 2: not a number"):
        read(path)


def test_what_an_audit_reads_is_a_trace_too(tmp_path: Path) -> None:
    example = Path(str(resources.files("radixkv.observe.audit") / "example_log.jsonl.gz"))
    trace = read_trace(example)
    assert trace.num_requests == 25
    assert trace.num_unique < trace.num_blocks / 2
    assert trace.arrivals[0] == 0.0
    assert (trace.output_lengths > 0).all()
    with gzip.open(example, "rt") as lines:
        bodies = [json.loads(line)["request"] for line in lines]
    har = tmp_path / "log.har"
    entries = [
        {
            "startedDateTime": "2026-11-20T10:00:00Z",
            "request": {
                "method": "POST",
                "url": "https://a/v1/messages",
                "postData": {"text": json.dumps(body)},
            },
        }
        for body in bodies
    ]
    har.write_text(json.dumps({"log": {"entries": entries}}))
    assert (read_trace(har).block_ids == trace.block_ids).all()
