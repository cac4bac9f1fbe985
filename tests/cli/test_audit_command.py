# SPDX-License-Identifier: Apache-2.0
"""`radixkv audit` as a user runs it: what it prints and writes, what it costs, and what it never tells."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from radixkv.cli.main import command_tree
from radixkv.errors import ConfigError

SECRET = "sk-very-secret-0123456789"


def audit(*args: object) -> str:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(command_tree(), ["audit", *map(str, args)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_the_example_shows_what_breaks_each_agent(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    output = audit("--example", "--rules", "anthropic", "--prefill-rate", 1000, "--json", target)
    report = json.loads(target.read_text())
    assert report["summary"]["requests"] == 25
    kinds = {found["kind"] for found in report["worst"]}
    assert {"timestamp", "working_directory", "tools_reordered", "compaction"} <= kinds
    for found in report["worst"]:
        assert found["lost_seconds"] == pytest.approx(found["lost_tokens"] / 1000)
        assert found["example"]["old"] != found["example"]["new"]
        assert found["example"]["what_to_move"]
    total = report["summary"]
    assert total["rules_hit_rate"] <= total["best_hit_rate"]
    assert sum(group["requests"] for group in report["by_conversation"]) == 25
    assert sum(point["requests"] for point in report["growth"]) == 25
    assert "A timestamp in the system prompt" in output


def test_estimated_tokens_come_near_those_that_were_reported(tmp_path: Path) -> None:
    audit("--example", "--json", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    told = report["summary"]["reported_cached_tokens"]
    assert report["summary"]["predicted_cached_tokens"] == pytest.approx(told, rel=0.03)
    differ = (one["predicted_cached_tokens"] - one["reported_cached_tokens"] for one in report["requests"])
    assert sum(map(abs, differ)) < 0.05 * told


def test_tools_first_tells_what_the_same_tools_behind_two_system_prompts_cost(tmp_path: Path) -> None:
    log, target = tmp_path / "tools.jsonl", tmp_path / "report.json"
    tool = {"type": "function", "function": {"name": "find", "description": "Find a ship. " * 200}}
    answer = {
        "object": "chat.completion",
        "choices": [{"message": {"role": "assistant", "content": "The second."}}],
        "usage": {"prompt_tokens": 700, "completion_tokens": 4},
    }
    lines = []
    for folder in ("/home/a", "/home/b"):
        messages = [{"role": "system", "content": f"Work in {folder}."}, {"role": "user", "content": "Go."}]
        request = {"model": "m", "messages": messages, "tools": [tool]}
        lines.append(json.dumps({"request": request, "response": answer}))
    log.write_text("\n".join(lines))
    found = []
    for flags in ((), ("--tools-first",)):
        audit(log, "--json", target, *flags)
        found.append(json.loads(target.read_text())["summary"]["predicted_cached_tokens"])
    assert found[0] < 20
    assert found[1] > 600
    with pytest.raises(ConfigError, match="--tools-first counts estimated"):
        audit(log, "--tools-first", "--tokenizer", "bytes")


def test_a_file_that_can_not_be_read_is_no_success(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good, bad = log_of(tmp_path), tmp_path / "bad.jsonl"
    bad.write_text("not JSON\n")
    for unread in (bad, tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ConfigError, match=f"no request could be read.*{re.escape(str(unread))}: "):
            audit(unread)
        done = CliRunner().invoke(command_tree(), ["audit", str(good), str(unread)])
        assert done.exit_code == 1
        assert f"nothing could be read of {unread}: " in done.stderr
        assert "hit rate" in done.stdout, "the other file's report is there"


def test_small_amounts_of_money_are_shown(tmp_path: Path) -> None:
    output = audit("--example", "--prices", "example", "--rules", "anthropic")
    amounts = re.findall(r"([\d.,]+) USD", output)
    assert amounts
    assert all(float(amount.replace(",", "")) > 0 for amount in amounts), output


def test_without_a_price_no_amount_is_shown(tmp_path: Path) -> None:
    prices, target = tmp_path / "prices.json", tmp_path / "report.json"
    prices.write_text(json.dumps({"date": "2026-11-01", "models": {"other": {"input": 1.0}}}))
    output = audit("--example", "--prices", prices, "--json", target)
    assert "USD" not in output
    assert "No price is known of smollm2-135m-instruct." in output
    money = json.loads(target.read_text())["money"]
    assert [money[name] for name in ("reported", "rules", "best", "lost")] == [None] * 4


def log_of(tmp_path: Path, num_requests: int = 3, **more: Any) -> Path:
    path = tmp_path / "log.jsonl"
    lines = []
    for number in range(num_requests):
        text = f"At {number:02d}:15:00. " + "Ships leave the harbour before the tide turns. " * 120
        messages = [{"role": "system", "content": text}, {"role": "user", "content": "Which ship?"}]
        answer = {
            "object": "chat.completion",
            "choices": [{"message": {"role": "assistant", "content": "The second."}}],
            "usage": {
                "prompt_tokens": 1500,
                "completion_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        }
        headers = {
            "Authorization": f"Bearer {SECRET}",
            "cookie": SECRET,
            "x-api-key": SECRET,
            "api-key": SECRET,
        }
        lines.append(
            {
                "time": 60.0 * number,
                "url": f"https://a.example/v1/chat/completions?api-key={SECRET}",
                "headers": headers,
                "request": {"model": "gpt-x", "messages": messages},
                "response": answer,
                **more,
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + f'{{"broken {SECRET}\n')
    return path


def test_no_output_holds_a_secret(tmp_path: Path) -> None:
    path = log_of(tmp_path, key=SECRET)
    output = audit(path, "--json", tmp_path / "r.json", "--html", tmp_path / "r.html", "--prices", "example")
    for text in (output, (tmp_path / "r.json").read_text(), (tmp_path / "r.html").read_text()):
        assert SECRET not in text
        assert "very-secret" not in text
    assert "log.jsonl:4" in output


def test_prices_make_money_of_tokens(tmp_path: Path) -> None:
    prices = tmp_path / "prices.json"
    models = {"gpt-*": {"input": 10.0, "cache_read": 1.0}}
    prices.write_text(
        json.dumps({"date": "2026-11-01", "per_tokens": 1000, "currency": "EUR", "models": models})
    )
    audit(log_of(tmp_path), "--rules", "vllm", "--prices", prices, "--json", tmp_path / "r.json")
    report = json.loads((tmp_path / "r.json").read_text())
    money, total = report["money"], report["summary"]
    assert (money["date"], money["currency"]) == ("2026-11-01", "EUR")
    assert money["reported"] == pytest.approx(45.0)
    assert money["rules"] == pytest.approx((4500 * 10 - total["predicted_cached_tokens"] * 9) / 1000)
    assert money["lost"] == pytest.approx(report["lost_tokens"] * 9 / 1000)
    assert report["lost_tokens"] > 2500


def test_the_page_is_one_file_that_asks_nobody(tmp_path: Path) -> None:
    audit("--example", "--html", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:)[^"']*|@import|url\((?!data:)""", page)
    assert not re.findall(r"https?://", page)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    value = json.loads(data[1])
    assert value["report"]["summary"]["requests"] == 25
    assert any("coding agent" in (node["text"] or "") for node in value["snapshot"]["nodes"])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "name files"),
        (["/no/such/file.jsonl"], "no such file"),
        (["--example", "--rules", "none"], "radixkv, vllm, sglang, anthropic, openai"),
        (["--example", "--memory", "1K"], "--memory"),
        (["--example", "--memory", "much"], "not a size"),
        (["--example", "--prices", "/no/such/prices.json"], "expected"),
        (["--example", "--json", "/no/such/folder/x.json"], "no folder"),
        (["--example", "--html", "/"], "a folder"),
    ],
)
def test_mistakes_are_told_with_what_to_do(args: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        audit(*args)


@pytest.mark.parametrize("content", ["", "\n\n", "[]", '{"log": {"entries": []}}'])
def test_a_log_without_requests_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"no request in empty\.jsonl"):
        audit(path, "--json", tmp_path / "report.json")


def test_the_size_of_blocks_is_as_reported(tmp_path: Path) -> None:
    def block_size(cached: list[int], *args: object) -> int:
        path = log_of(tmp_path, len(cached))
        lines = [json.loads(line) for line in path.read_text().splitlines()[: len(cached)]]
        for line, tokens in zip(lines, cached, strict=True):
            line["response"]["usage"]["prompt_tokens_details"] = {"cached_tokens": tokens}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        audit(path, "--rules", "vllm", "--json", tmp_path / "r.json", *args)
        return int(json.loads((tmp_path / "r.json").read_text())["block_size"])

    assert block_size([0, 128, 640, 384]) == 128
    assert block_size([0, 48, 640, 384]) == 16
    assert block_size([0, 128, 128, 128]) == 16  # too few that differ to tell
    assert block_size([0, 128, 640, 384], "--block-size", 32) == 32


@pytest.mark.parametrize("size", [16, 128])
def test_the_size_of_blocks_is_what_explains_the_same_few_hits(tmp_path: Path, size: int) -> None:
    """Exact tokens tell it, though only one number was ever reported."""
    head = "Ships of this line leave the harbour before the tide turns. " * 5
    lengths = (0, 250, 139, 200, 135, 157) if size == 128 else (0, 143, 135, 130, 129, 128)
    with (tmp_path / "log.jsonl").open("w") as file:
        for number, length in enumerate(lengths):
            prompt = head[:length] + f"{number} ends otherwise than all the others."
            usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": 0}}
            if number > 1:
                usage["prompt_tokens_details"] = {"cached_tokens": 128}
            answer = {"object": "text_completion", "choices": [{"text": "Yes."}], "usage": usage}
            line = {"time": number, "request": {"model": "m", "prompt": prompt}, "response": answer}
            file.write(json.dumps(line) + "\n")
    audit(file.name, "--rules", "vllm", "--tokenizer", "bytes", "--json", tmp_path / "r.json")
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["block_size"] == size
    assert [one["predicted_cached_tokens"] for one in report["requests"]] == [0, 0, 128, 128, 128, 128]


def completions(path: Path, prompts: list[str], **more: Any) -> Path:
    lines = [json.dumps({"request": {"model": "m", "prompt": prompt}, **more}) for prompt in prompts]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_bytes_are_tokens_where_the_tokenizer_is_bytes(tmp_path: Path) -> None:
    text = "Größe: ship, harbour, tide. " * 40
    path = completions(tmp_path / "log.jsonl", [text, text + "More.", text[:300] + "else " * 9, text])
    length, shared = len(text.encode()), len(text[:300].encode())
    for rules, block in (("radixkv", 1), ("vllm", 16)):
        audit(path, "--tokenizer", "bytes", "--rules", rules, "--json", tmp_path / "r.json")
        report = json.loads((tmp_path / "r.json").read_text())
        assert report["tokens_are"] == "bytes"
        assert [one["prompt_tokens"] for one in report["requests"]] == [
            length,
            length + 5,
            shared + 45,
            length,
        ]
        assert [one["predicted_cached_tokens"] for one in report["requests"]] == [
            0,
            length // block * block,
            shared // block * block,
            (length - 1) // block * block,
        ]


def test_every_request_is_told_of_in_the_order_read(tmp_path: Path) -> None:
    """However many there are, whatever their times, and whatever else stands between them."""
    path = tmp_path / "log.jsonl"
    with path.open("w") as file:
        for number in range(1300):
            line = {"time": (number * 37) % 1300, "request": {"model": f"m{number}", "prompt": "A ship."}}
            file.write(json.dumps(line) + "\n")
            if number % 100 == 0:
                file.write('{"broken\n[]\n')
    other = completions(tmp_path / "other.jsonl", ["One.", "Two."], time=5.0)
    audit(path, other, "--json", tmp_path / "r.json")
    report = json.loads((tmp_path / "r.json").read_text())
    assert [one["model"] for one in report["requests"]] == [*(f"m{n}" for n in range(1300)), "m", "m"]
    assert report["summary"]["requests"] == 1302
    assert report["summary"]["skipped_lines"] == 26
    assert all(one["reported_cached_tokens"] is None for one in report["requests"])


def test_pipes_are_read_like_files(tmp_path: Path) -> None:
    path = completions(tmp_path / "log.jsonl", ["A ship sails.", "A ship sails home."])
    for packed in (path.read_bytes(), gzip.compress(path.read_bytes())):
        done = CliRunner().invoke(
            command_tree(),
            ["audit", "-", "--rules", "vllm", "--json", str(tmp_path / "r.json")],
            input=packed,
        )
        assert done.exit_code == 0, done.output
        report = json.loads((tmp_path / "r.json").read_text())
        assert [one["place"] for one in report["requests"]] == ["stdin:1", "stdin:2"]
