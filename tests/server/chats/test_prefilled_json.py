# SPDX-License-Identifier: Apache-2.0
"""An answer that goes on from its last message keeps to the grammar of the whole: JSON is begun once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from family_templates import CHATML, template
from live_server import live_server
from tiny_models import save_tiny_model

from radixkv import AsyncEngine, EngineConfig

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Lindholm", "Lund"]}, "ships": {"enum": [1, 12]}},
    "required": ["city", "ships"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "port", "schema": SCHEMA, "strict": True}}
#: The second one opens the model's thoughts.
TEMPLATES = {
    "plain": template(*CHATML, tools="{{ '' }}"),
    "thinking": template(*CHATML, tools="{{ '' }}", opened="<think>\n"),
}
PREFILLS = [
    "{",
    '{"ci',
    '{"city": "Li',
    '{ "city" : "Lund",',
    '{"city":"Lindholm","ships":1',
    '{\n  "city": "L',
]


@pytest.fixture(scope="module", params=TEMPLATES)
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), "llama")
    config = EngineConfig(
        model=str(folder),
        chat_template=TEMPLATES[request.param],
        num_blocks=64,
        device="cpu",
        warm_up="off",
    )
    with live_server(AsyncEngine.from_config(config)) as server, server.http() as http:
        yield http


def ask(client: httpx.Client, prefill: str, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Which port?"}, {"role": "assistant", "content": prefill}]
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    return client.post("/v1/chat/completions", json={"messages": messages, **going_on, **body})


@pytest.mark.parametrize("prefill", PREFILLS)
def test_json_goes_on_where_the_last_message_ends(client: httpx.Client, prefill: str) -> None:
    answer = ask(client, prefill, response_format=FORMAT, max_tokens=80).json()
    rest = answer["choices"][0]["message"]["content"]
    whole = json.loads(prefill + rest)
    assert whole["city"] in ("Lindholm", "Lund")
    assert whole["ships"] in (1, 12)


def test_an_answer_that_is_complete_has_nothing_to_add(client: httpx.Client) -> None:
    answer = ask(client, '{"city":"Lund","ships":12}', response_format=FORMAT, max_tokens=20).json()
    assert (answer["choices"][0]["message"]["content"] or "").strip() == ""
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("prefill", ['{"name": "', "The port is", '{"city": "Oslo"', "{" + "x" * 100])
def test_a_beginning_that_contradicts_the_schema_is_refused(client: httpx.Client, prefill: str) -> None:
    refused = ask(client, prefill, response_format=FORMAT)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "response_format"
    assert "goes on from contradicts its grammar at" in error["message"]


@pytest.mark.parametrize(
    ("fields", "prefill", "rest"),
    [({"guided_choice": ["red", "ready"]}, "rea", "dy"), ({"guided_regex": "abcd?x"}, "abcd", "x")],
)
def test_other_grammars_go_on_too(client: httpx.Client, fields: Any, prefill: str, rest: str) -> None:
    answer = ask(client, prefill, **fields).json()
    assert answer["choices"][0]["message"]["content"] == rest
