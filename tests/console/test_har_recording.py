# SPDX-License-Identifier: Apache-2.0
"""A HAR file that a browser recorded is what `radixkv audit` reads, and says nothing of keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from live_server import live_server
from scripted_engine import ScriptedEngine

from radixkv.observe.audit.readers.recording import Recording

KEY = "sk-of-a-user-0123456789"
ASK = """async ([path, body]) => {
  const headers = { "Content-Type": "application/json", Authorization: "Bearer KEY" };
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
  return [answer.status, await answer.text()];
}""".replace("KEY", KEY)


@pytest.mark.nightly
def test_what_a_browser_recorded(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "recorded.har"
    messages = [{"role": "user", "content": "Which berth is free?"}]
    bodies = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 4},
        "/v1/messages": {"model": "scripted", "messages": messages, "max_tokens": 4},
        "/v1/responses": {"input": "Which berth is free?", "max_output_tokens": 4},
    }
    with live_server(ScriptedEngine(), api_keys=(KEY,)) as server:
        context = browser.new_context(record_har_path=path, record_har_content="embed")
        try:
            page = context.new_page()
            page.goto(server.url)
            for route, body in bodies.items():
                for stream in (False, True):
                    status, text = page.evaluate(ASK, [route, {**body, "stream": stream}])
                    assert status == 200, text
        finally:
            context.close()
    recording = Recording([path])
    records = list(recording)
    assert not recording.problems.named
    assert recording.skipped > 0  # the page's own files
    assert [record.dialect for record in records] == [
        *("chat", "chat", "messages", "messages", "responses", "responses"),
    ]
    for record in records:
        assert [block.text for block in record.blocks] == ["Which berth is free?"]
        assert record.key.startswith("key-")
        assert record.time is not None
        assert record.answer
        assert record.usage.output or (record.dialect, record.body["stream"]) == ("chat", True)
    assert KEY in path.read_text()
    assert KEY not in repr(records)
