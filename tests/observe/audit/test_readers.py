# SPDX-License-Identifier: Apache-2.0
"""Recorded requests out of files: every form, damaged ones, bounded memory, and nothing of anybody's key."""

from __future__ import annotations

import base64
import gzip
import json
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import by_day

from radixkv.observe.audit.prompt_units import PromptCoding, byte_coding
from radixkv.observe.audit.readers.recording import Recording
from radixkv.observe.audit.record import Record
from radixkv.observe.audit.rule_sets import RULE_SETS, rule_set
from radixkv.observe.audit.rules import Rules

SECRET = "sk-ant-very-secret-0123456789"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the crane?"}]
CHAT = {"model": "gpt-x", "messages": MESSAGES}
ANTHROPIC = {"model": "claude-x", "max_tokens": 5, "system": "Be brief.", "messages": MESSAGES[1:]}
RESPONSES = {"model": "gpt-x", "instructions": "Be brief.", "input": "Where is the crane?"}
BODIES = {"chat": CHAT, "messages": ANTHROPIC, "responses": RESPONSES}
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
ANSWERS: dict[str, dict[str, Any]] = {
    "chat": {
        "id": "c1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "At pier 3."}}],
        "usage": {
            "prompt_tokens": 40,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 8},
        },
    },
    "messages": {
        "id": "m1",
        "type": "message",
        "content": [{"type": "text", "text": "At pier 3."}],
        "usage": {
            "input_tokens": 16,
            "output_tokens": 5,
            "cache_read_input_tokens": 16,
            "cache_creation_input_tokens": 8,
        },
    },
    "responses": {
        "id": "r1",
        "object": "response",
        "output": [
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "At pier 3."}],
            }
        ],
        "usage": {
            "input_tokens": 40,
            "output_tokens": 5,
            "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 8},
        },
    },
}


def sse(*events: dict[str, Any], done: bool = False) -> str:
    lines = [f"event: {e.get('type', 'x')}\r\ndata: {json.dumps(e)}\r\n\r\n" for e in events]
    return "".join(lines) + ("data: [DONE]\n\n" if done else "")


STREAMS = {
    "chat": sse(
        {"id": "c1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": "At "}}]},
        {"id": "c1", "choices": [{"index": 0, "delta": {"content": "pier 3."}}]},
        {"id": "c1", "choices": [], "usage": ANSWERS["chat"]["usage"]},
        done=True,
    ),
    "messages": sse(
        {
            "type": "message_start",
            "message": {"id": "m1", "type": "message", "content": [], "usage": ANSWERS["messages"]["usage"]},
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "At "}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "pier 3."}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    ),
    "responses": sse(
        {"type": "response.created", "response": {"id": "r1", "output": []}},
        {"type": "response.output_text.delta", "delta": "At pier 3."},
        {"type": "response.completed", "response": ANSWERS["responses"]},
    ),
}


def har_entry(dialect: str, body: bytes, content: dict[str, Any], *, method: str = "POST") -> dict[str, Any]:
    return {
        "startedDateTime": "2026-11-20T10:00:00.500Z",
        "time": 1500.0,
        "request": {
            "method": method,
            "url": f"https://api.example.com{PATHS[dialect]}?key={SECRET}",
            "headers": [
                {"name": "X-Api-Key", "value": SECRET},
                {"name": "Cookie", "value": f"session={SECRET}"},
            ],
            "postData": {"mimeType": "application/json", "text": body.decode()},
        },
        "response": {
            "status": 200,
            "headers": [{"name": "Content-Encoding", "value": "br"}],
            "content": content,
        },
        "timings": {"send": 1, "wait": 700, "receive": 799},
    }


def litellm(dialect: str) -> dict[str, Any]:
    kinds = {"chat": "acompletion", "messages": "anthropic_messages", "responses": "aresponses"}
    body = BODIES[dialect]
    rest = {name: value for name, value in body.items() if name not in ("messages", "input", "model")}
    return {
        "id": "x",
        "call_type": kinds[dialect],
        "messages": body.get("messages", body.get("input")),
        "model": body["model"],
        "model_parameters": rest,
        "startTime": 1790000000.5,
        "completionStartTime": 1790000001.2,
        "endTime": 1790000002.0,
        "status": "success",
        "metadata": {"user_api_key_hash": SECRET, "headers": {"authorization": SECRET}},
        "response": ANSWERS[dialect],
    }


def forms(dialect: str) -> dict[str, bytes]:
    """One request in every form of a log."""
    body, answer, stream = BODIES[dialect], ANSWERS[dialect], STREAMS[dialect]
    sent = json.dumps(body).encode()
    timed = {"time": "2026-11-20T10:00:00.500Z", "seconds": 1.5, "first_seconds": 0.7}
    headers = {"Authorization": f"Bearer {SECRET}", "Cookie": SECRET}
    whole = {**timed, "path": PATHS[dialect], "headers": headers, "request": body, "response": answer}
    coded = {"encoding": "base64", "text": base64.b64encode(gzip.compress(stream.encode())).decode()}
    har = {
        "log": {"version": "1.2", "creator": {"name": "x"}, "pages": [{"id": "p", "startedDateTime": "2026"}]}
    }
    entries = [
        har_entry(dialect, b"{}", {}, method="GET"),
        har_entry(dialect, sent, {"mimeType": "text/event-stream", "text": stream}),
    ]
    packed = [har_entry(dialect, sent, coded)]
    lines = {
        "pair": whole,
        "stream": {**whole, "response": stream},
        "text": {**whole, "request": sent.decode(), "response": json.dumps(answer)},
        "events": {**whole, "response": None, "events": _events(stream)},
        "litellm": litellm(dialect),
        "litellm nested": {"standard_logging_object": litellm(dialect)},
    }
    found = {name: json.dumps(value).encode() + b"\n" for name, value in lines.items()}
    found["har"] = json.dumps({"log": {**har["log"], "entries": entries}}).encode()
    found["har indented"] = json.dumps({"log": {**har["log"], "entries": packed}}, indent=2).encode()
    found["list"] = json.dumps([whole], indent=1).encode()
    found["over several lines"] = json.dumps(whole, indent=2).encode()
    return found


def _events(stream: str) -> list[Any]:
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]


def read(tmp_path: Path, data: bytes, name: str = "log.jsonl") -> tuple[list[Record], Recording]:
    path = tmp_path / name
    path.write_bytes(data)
    recording = Recording([path])
    return list(recording), recording


@pytest.mark.parametrize("dialect", sorted(BODIES))
@pytest.mark.parametrize("packed", [False, True])
def test_every_form_gives_the_same_record(tmp_path: Path, dialect: str, packed: bool) -> None:
    for form, data in forms(dialect).items():
        records, recording = read(tmp_path, gzip.compress(data) if packed else data)
        assert recording.problems.named == [], form
        assert len(records) == 1, form
        record = records[0]
        assert record.dialect == dialect, form
        assert record.model == BODIES[dialect]["model"]
        assert [(b.role, b.text) for b in record.blocks] == [
            ("system", "Be brief."),
            ("user", "Where is the crane?"),
        ], form
        assert [(b.role, b.text) for b in record.answer] == [("assistant", "At pier 3.")], form
        usage = record.usage
        assert (usage.prompt, usage.cached, usage.written, usage.output) == (40, 16, 8, 5), form
        assert record.seconds == pytest.approx(1.5), form
        assert record.first_seconds == pytest.approx(0.7, abs=0.01), form
        assert SECRET not in repr(record), form
        assert record.key.startswith("key-"), form


@pytest.mark.parametrize("dialect", sorted(BODIES))
def test_bodies_alone_are_prompts(tmp_path: Path, dialect: str) -> None:
    records, recording = read(tmp_path, json.dumps(BODIES[dialect]).encode())
    assert not recording.problems.count
    assert [record.dialect for record in records] == [dialect]
    assert records[0].usage.cached is None


def test_broken_lines_are_counted_and_named(tmp_path: Path) -> None:
    good = json.dumps({"time": 1.0, "request": CHAT}).encode()
    broken = [
        b"{not json " + SECRET.encode(),
        b"[1, 2]",
        b'"text"',
        b"{}",
        b'{"request": {"messages": 3}}',
        b'{"request": "{cut"}',
        b'{"messages": ["a"]}',
        b"\xff\xfe\x00" + SECRET.encode(),
        b'{"messages": [{"role": "user"}], "tools": 7}',
    ]
    records, recording = read(tmp_path, b"\n".join([good, *broken, b"", good]))
    assert len(records) == 2
    assert recording.problems.count == len(broken)
    assert [line.split(":")[:2] for line in recording.problems.named] == [
        ["log.jsonl", str(number)] for number in range(2, 2 + len(broken))
    ]
    told = json.dumps([recording.problems.named, dict(recording.problems.by_reason)])
    assert SECRET not in told


def test_what_a_har_has_besides_is_no_mistake(tmp_path: Path) -> None:
    entries = [
        {"startedDateTime": "2026-11-20T10:00:00Z", "request": {"method": "GET", "url": "https://a/"}},
        har_entry("chat", b"", {})
        | {"request": {"method": "POST", "url": "https://a/track", "postData": {"text": "x=1"}}},
    ]
    records, recording = read(tmp_path, json.dumps({"log": {"entries": entries}}).encode(), "a.har")
    assert (records, recording.skipped, recording.problems.count) == ([], 2, 0)


def test_a_file_that_ends_early_gives_what_came_before(tmp_path: Path) -> None:
    lines = b"".join(
        json.dumps({"time": float(n), "request": {**CHAT, "n": n}}).encode() + b"\n" for n in range(200)
    )
    packed = gzip.compress(lines)
    records, recording = read(tmp_path, packed[: len(packed) // 2])
    assert 0 < len(records) < 200
    assert recording.problems.count >= 1
    assert "cut short" in recording.problems.named[-1]
    entry = har_entry("chat", json.dumps(CHAT).encode(), {"text": "{}"})
    har = json.dumps({"log": {"entries": [entry] * 5}}).encode()
    records, recording = read(tmp_path, har[:-700])
    assert len(records) == 4
    assert "cut short" in recording.problems.named[-1]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_nothing_in_a_file_is_fatal(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    dialect = data.draw(st.sampled_from(sorted(BODIES)))
    _, content = data.draw(st.sampled_from(sorted(forms(dialect).items())))
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + data.draw(st.integers(0, 30))] = data.draw(st.binary(max_size=8))
        damaged = damaged or bytearray(b" ")
    folder = tmp_path_factory.mktemp("damaged")
    records, recording = read(folder, bytes(damaged))
    rules = Rules(rule_set("anthropic"), memory_bytes=16 << 20)
    for record in records:
        seen = rules.observe(record)
        assert 0 <= seen.cached_tokens <= seen.prompt_tokens
    rules.cache.check()
    assert SECRET not in repr(recording.problems)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "name", "input", "id"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(BODIES)),
    st.sampled_from(["messages", "system", "tools", "input", "model", "metadata", "cache_control", "usage"]),
    json_values,
)
def test_values_of_any_kind_are_records_or_problems(
    tmp_path_factory: pytest.TempPathFactory, dialect: str, name: str, value: Any
) -> None:
    body = {**BODIES[dialect], name: value}
    answer = {**ANSWERS[dialect], name: value}
    line = json.dumps({"path": PATHS[dialect], "request": body, "response": answer}).encode()
    records, recording = read(tmp_path_factory.mktemp("values"), line)
    assert len(records) + recording.problems.count == 1
    for record in records:
        Rules(rule_set("openai"), memory_bytes=16 << 20).observe(record)


def test_requests_come_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    rng = random.Random(5)
    paths = []
    for name in ("a.jsonl", "b.jsonl.gz"):
        times = sorted(rng.uniform(0, 100) for _ in range(300))
        ended = sorted(times, key=lambda t: t + rng.uniform(0, 3))  # written when answers ended
        data = b"".join(json.dumps({"time": t, "request": CHAT}).encode() + b"\n" for t in ended)
        path = tmp_path / name
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        paths.append(path)
    times = [record.time or 0.0 for record in Recording(paths)]
    assert len(times) == 600
    assert times == sorted(times)


def test_an_answer_that_is_gone_on_after_by_its_id_is_put_in_front(tmp_path: Path) -> None:
    second = {**RESPONSES, "input": "And the ship?", "previous_response_id": "r1"}
    third = {**RESPONSES, "input": "Why?", "previous_response_id": "unknown"}
    pairs = [(RESPONSES, ANSWERS["responses"]), (second, {}), (third, {})]
    data = b"".join(json.dumps({"request": r, "response": a}).encode() + b"\n" for r, a in pairs)
    records, recording = read(tmp_path, data)
    assert [block.text for block in records[1].blocks] == [
        *("Be brief.", "Where is the crane?", "At pier 3.", "And the ship?"),
    ]
    assert recording.problems.count == 1


@pytest.mark.nightly
def test_memory_is_bounded_whatever_the_log_holds(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    rng = random.Random(1)
    with path.open("w") as file:
        for number in range(1500):
            text = f"{number} " + rng.randbytes(20_000).hex()
            message = {"role": "user", "content": text}
            file.write(json.dumps({"time": number, "request": {**CHAT, "messages": [message]}}))
            file.write("\n")
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(path)], check=True, capture_output=True, text=True, timeout=120
    )
    before, after = map(int, done.stdout.split())
    assert after - before < 48 * 1024, f"{(after - before) >> 10} MiB for --memory 16M"


#: Peak memory in KiB before and after the log is read.
_PEAK = """
import resource, sys
from pathlib import Path
from radixkv.observe.audit.readers.recording import Recording
from radixkv.observe.audit.rule_sets import rule_set
from radixkv.observe.audit.rules import Rules
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before, size = peak(), 16 << 20
rules = Rules(rule_set("radixkv"), memory_bytes=size * 3 // 4)
for record in Recording([Path(sys.argv[1])], size // 4):
    rules.observe(record)
rules.cache.check()
print(before, peak())
"""


@pytest.mark.parametrize(
    "line",
    [
        f'{{"request": {{"prompt": "x"}}, "time": {"9" * 400}}}',
        '{"request": {"prompt": "x"}, "time": NaN, "seconds": 1e999}',
        f'{{"request": {{"prompt": "x"}}, "response": {{"usage": {{"prompt_tokens": {"9" * 300}}}}}}}',
        '{"request": {"prompt": "x"}, "response": {"usage": {"prompt_tokens": -4}}}',
        '{"startedDateTime": 5, "request": {"method": "POST", "url": "/v1/completions", "postData": '
        '{"text": "{\\"prompt\\": \\"x\\"}"}}, "response": {"status": "200 OK"}}',
    ],
)
def test_numbers_that_are_none_are_not_told(line: str, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(line + "\n")
    recording = Recording([tmp_path / "log.jsonl"])
    (record,) = recording
    assert record.time in (None, 5.0)
    assert (record.seconds, record.usage.prompt) == (None, None)
    assert not recording.problems.count


@pytest.mark.parametrize(
    "line",
    [
        '{"request": {"model": "claude", "messages": [{"role": "user", "content": "x"}]}, "response": '
        '"data: {\\"type\\": \\"content_block_start\\", \\"index\\": [1], \\"content_block\\": {}}\\n\\n"}',
        f'{{"request": {"[" * 90000}1{"]" * 90000}}}',
    ],
)
def test_what_is_of_the_wrong_kind_is_named_and_stops_nothing(line: str, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(f'{line}\n{{"prompt": "x"}}\n')
    recording = Recording([tmp_path / "log.jsonl"])
    assert [record.place for record in recording] == ["log.jsonl:2"]
    assert recording.problems.named[0].startswith("log.jsonl:1: ")


def litellm_lines(*payloads: dict[str, Any]) -> bytes:
    usual = {"model": "m", "model_parameters": {}, "status": "success", "metadata": {}}
    return b"".join(json.dumps({**usual, **payload}).encode() + b"\n" for payload in payloads)


def test_litellm_logs_completions_as_chats_and_messages_answers_as_completions(tmp_path: Path) -> None:
    data = litellm_lines(
        {
            "call_type": "atext_completion",
            "messages": [{"role": "user", "content": "The ship sails."}],
            "response": {"object": "text_completion", "choices": [{"text": " Home."}]},
        },
        {
            "call_type": "anthropic_messages",
            "messages": BODIES["messages"]["messages"],
            "response": ANSWERS["chat"],
        },
    )
    records, recording = read(tmp_path, data)
    assert not recording.problems.named
    assert [(r.dialect, r.answer[0].text) for r in records] == [
        ("completions", " Home."),
        ("messages", "At pier 3."),
    ]
    assert records[0].blocks[0].text == "The ship sails."
    assert records[1].usage.cached == 16


def test_litellms_ids_of_responses_lead_back_to_their_own(tmp_path: Path) -> None:
    text = b"litellm:custom_llm_provider:openai;model_id:None;response_id:resp_1"
    packed = "resp_" + base64.b64encode(text).decode()
    call = {"call_type": "aresponses", "messages": [{"role": "user", "content": "Where is it?"}]}
    for named, told in ((packed, "resp_1"), ("resp_1", packed), (packed, packed), ("abcd", "abcd")):
        data = litellm_lines(
            {**call, "response": {**ANSWERS["responses"], "id": told}},
            {**call, "model_parameters": {"previous_response_id": named}, "response": ANSWERS["responses"]},
        )
        records, recording = read(tmp_path, data)
        assert not recording.problems.named
        assert [block.text for block in records[1].blocks] == ["Where is it?", "At pier 3.", "Where is it?"]


@pytest.mark.parametrize("streamed", [False, True])
def test_each_sample_of_an_answer_is_read(tmp_path: Path, streamed: bool) -> None:
    texts = ("At pier 3.", "At pier 4.")
    if streamed:
        deltas = [{"index": n, "delta": {"content": part}} for n in (0, 1) for part in texts[n].split("3")]
        events = [{"id": "c", "choices": [delta]} for delta in deltas]
        answer: Any = sse(*events, {"id": "c", "choices": [{"index": 1, "finish_reason": "length"}]})
        texts = ("At pier .", texts[1])
    else:
        answer = {"choices": [{"index": n, "message": {"content": text}} for n, text in enumerate(texts)]}
    line = {"path": PATHS["chat"], "request": {**CHAT, "n": 2}, "response": answer}
    records, _ = read(tmp_path, json.dumps(line).encode())
    assert records[0].answer[0].text == texts[0]
    assert [other[0].text for other in records[0].other_answers] == [texts[1]]


def test_an_echoed_prompt_is_no_answer(tmp_path: Path) -> None:
    answer = {"object": "text_completion", "choices": [{"text": "The ship sails. Home."}]}
    line = {"request": {"prompt": "The ship sails.", "echo": True}, "response": answer}
    records, _ = read(tmp_path, json.dumps(line).encode())
    assert records[0].answer[0].text == " Home."


def peak_bytes(paths: list[Path]) -> tuple[int, Recording, list[Record]]:
    """Memory that reading takes at most, with 16 MiB to be had, and what came of it."""
    tracemalloc.start()
    try:
        recording = Recording(paths, 16 << 20)
        records = list(recording)
        return tracemalloc.get_traced_memory()[1], recording, records
    finally:
        tracemalloc.stop()


def packed_file(path: Path, *parts: bytes) -> Path:
    with gzip.open(path, "wb", 1) as file:
        file.writelines(parts)
    return path


@pytest.mark.parametrize("before", [b'["', b'{"log":{"entries":["', b'{\n"', b'{"a":"', b'[[["'])
def test_a_string_of_any_length_takes_no_memory(before: bytes, tmp_path: Path) -> None:
    path = packed_file(tmp_path / "log.gz", before, b"x" * (48 << 20), b'\\"', b"]}" * 100_000, b'"')
    peak, _, records = peak_bytes([path])
    assert peak < 24 << 20  # of 48
    assert not records


def test_strings_end_at_their_quotes_however_escapes_lie_in_them(tmp_path: Path) -> None:
    rng = random.Random(3)
    pieces = ['"', "\\", '\\"', "\n", "]}", "x" * 70, "y" * 300_000]
    texts = ["".join(rng.choices(pieces, [5, 5, 5, 5, 5, 5, 1], k=40)) for _ in range(8)]
    log = [{"request": {"model": "m", "messages": [{"role": "user", "content": text}]}} for text in texts]
    path = packed_file(tmp_path / "log.json.gz", json.dumps(log).encode())
    recording = Recording([path], 64 << 20)
    assert [record.blocks[0].text for record in recording] == texts
    assert not recording.problems.named


def test_small_pieces_and_packed_answers_take_no_memory_either(tmp_path: Path) -> None:
    many = tmp_path / "many.jsonl"
    lists = b"[]," * 1_000_000
    many.write_bytes(b'{"request": "[%s[]]"}\n{"messages": [%s[]]}\n' % (lists, lists))
    bomb = base64.b64encode(gzip.compress(b'{"a": "' + b"x" * (64 << 20))).decode()
    sent = {"method": "POST", "url": "https://e.org/v1/messages", "postData": {"text": '{"messages": []}'}}
    content = {"encoding": "base64", "text": bomb}
    entry = {"startedDateTime": "2026-01-01T00:00:00Z", "request": sent, "response": {"content": content}}
    har = tmp_path / "log.har"
    har.write_text(json.dumps({"log": {"entries": [entry]}}))
    peak, recording, records = peak_bytes([many, har])
    assert peak < 40 << 20
    assert recording.problems.count == 2
    assert len(records) == 1


@pytest.mark.parametrize("form", by_day(["lines", "list", "har"], "lines"))
def test_a_damaged_file_costs_no_other_one(form: str, tmp_path: Path) -> None:
    body = b'{"messages":[{"role":"user","content":"hi"}]}'
    text = {"lines": body + b"\n", "list": b"[" + body + b"]", "har": b'{"log":{"entries":[]}}'}[form]
    packed = gzip.compress(text * 2000)
    good = tmp_path / "good.jsonl"
    good.write_bytes(body + b"\n")
    for at in (*range(2, 40), len(packed) // 2, len(packed) - 5):
        damaged = tmp_path / "damaged.gz"
        damaged.write_bytes(packed[:at] + bytes([packed[at] ^ 0x55]) + packed[at + 1 :])
        recording = Recording([damaged, good])
        assert [record.place for record in recording][-1] == "good.jsonl:1"
    damaged.write_bytes(packed[:30])
    recording = Recording([damaged, good])
    assert len(list(recording)) == 1
    assert "damaged or cut short" in recording.problems.named[0]


def thread(turns: Iterable[tuple[int, int]], padding: str = "", **more: Any) -> Iterator[str]:
    """Lines of a log: each turn goes on after an earlier one; -1: after nothing."""
    for turn, before in turns:
        said = {
            "type": "message",
            "role": "assistant",
            "content": f"It is {turn}, said number {turn} of them.{padding}",
        }
        after = {"previous_response_id": f"r{before}"} if before >= 0 else {}
        request = {"input": f"Which number is {turn}, of all?", "instructions": "Be brief.", **after, **more}
        response = {"object": "response", "id": f"r{turn}", "output": [said], "model": "m"}
        yield json.dumps({"time": 10.0 * turn, "request": request, "response": response}) + "\n"


def counted_calls(work: Callable[[], object]) -> int:
    """Calls of functions, resumed generators included."""
    count = 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("rules", by_day(["radixkv", "anthropic", "openai"], "openai"))
def test_threads_are_audited_in_what_each_turn_adds(tmp_path: Path, rules: str) -> None:
    """In calls of functions, which do not depend on the machine: twice as many turns, about twice as many."""

    def calls(num_turns: int) -> int:
        path = tmp_path / f"{num_turns}.jsonl"
        path.write_text("".join(thread((turn, turn - 1) for turn in range(num_turns))))
        records, observer = list(Recording([path])), Rules(rule_set(rules), memory_bytes=64 << 20)
        return counted_calls(lambda: [observer.observe(record) for record in records])

    assert calls(300) < 2.6 * calls(150)


@pytest.mark.parametrize("rules", sorted(RULE_SETS))
@pytest.mark.parametrize("coding", [None, byte_coding])
@pytest.mark.parametrize("memory", [16 << 20, 60_000])
def test_threads_with_forks_are_audited_as_their_whole_prompts_are(
    tmp_path: Path, rules: str, coding: Callable[[], PromptCoding] | None, memory: int
) -> None:
    rng, path = random.Random(8), tmp_path / "log.jsonl"
    turns = [(turn, rng.choice((turn - 1, turn - 1, rng.randrange(-1, turn)))) for turn in range(1, 90)]
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    lines = list(thread([(0, -1), *turns[:60]])) + list(thread(turns[60:], tools=tools))
    path.write_text("".join(lines))
    records = list(Recording([path]))
    assert len(records) == 90
    # The same texts in blocks of their own: nothing is the same object in two of them.
    apart = [replace(one, blocks=tuple(block._replace() for block in one.blocks)) for one in records]
    seen = []
    for log in (records, apart):
        observer = Rules(rule_set(rules), coding and coding(), memory_bytes=memory)
        seen.append([observer.observe(record) for record in log])
    assert seen[0] == seen[1]


def test_a_turn_of_a_thread_copies_nothing_of_its_prompt(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(thread(((turn, turn - 1) for turn in range(40)), padding="." * 20_000)))
    observer, taken = Rules(rule_set("radixkv"), memory_bytes=256 << 20), []
    tracemalloc.start()
    try:
        for record in Recording([path]):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            seen = observer.observe(record)
            taken.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert seen.reason == "hit"
    assert sorted(taken[-10:])[5] < 1_000_000  # the prompt's 800,000 characters take four bytes each


def test_threads_are_rendered_once_however_long_they_are(tmp_path: Path) -> None:
    """In calls of functions, which do not depend on the machine: twice as many turns, about twice as many."""

    def calls(num_turns: int) -> int:
        path = tmp_path / f"{num_turns}.jsonl"
        path.write_text("".join(thread((turn, turn - 1) for turn in range(num_turns))))
        *_, last = list(Recording([path]))
        assert len(last.blocks) == 2 * num_turns
        assert [block.message for block in last.blocks] == list(range(2 * num_turns))
        return counted_calls(lambda: list(Recording([path])))

    assert calls(200) < 2.5 * calls(100)
