# SPDX-License-Identifier: Apache-2.0
"""Structured output and forced tool calls through the APIs: what each spells becomes one grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine

from radixkv.text.chat_formats.formats import FORMATS

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
NAMED = {"name": "thing", "schema": SCHEMA}
GRAMMARS: list[tuple[str, dict[str, Any], str]] = [
    ("structured_outputs", {"structured_outputs": {"json": SCHEMA}}, '{"a":0,"b":"x"}'),
    ("guided_json", {"guided_json": SCHEMA}, '{"a":0,"b":"x"}'),
    ("guided_json text", {"guided_json": json.dumps(SCHEMA)}, '{"a":0,"b":"x"}'),
    ("guided_regex", {"guided_regex": "[a-c]{3}"}, "aaa"),
    ("guided_choice", {"guided_choice": ["red", "blue"]}, "blue"),
    ("guided_grammar", {"guided_grammar": 'start: "x" "y"?'}, "x"),
    ("guided_grammar EBNF", {"guided_grammar": 'root ::= "x" "y"?'}, "x"),
    ("structured_outputs EBNF", {"structured_outputs": {"grammar": 'root ::= "x" tail\ntail ::= "y"'}}, "xy"),
    ("SGLang's regex", {"regex": "[a-c]{3}"}, "aaa"),
    ("SGLang's ebnf", {"ebnf": 'root ::= "yes" | "no"'}, "no"),
    ("SGLang's json_schema", {"json_schema": json.dumps(SCHEMA)}, '{"a":0,"b":"x"}'),
    ("llama.cpp's json_schema", {"json_schema": SCHEMA}, '{"a":0,"b":"x"}'),
    ("llama.cpp's grammar", {"grammar": 'root ::= "n" root | "o"'}, "no"),
    ("json_schema", {"response_format": {"type": "json_schema", "json_schema": NAMED}}, '{"a":0,"b":"x"}'),
    (
        "json_schema strict",
        {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": True}}},
        '{"a":0,"b":"x"}',
    ),
    ("json_object", {"response_format": {"type": "json_object"}}, "{}"),
    ("text", {"response_format": {"type": "text"}}, "none"),
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Looks.", "strict": True, "parameters": SCHEMA},
    },
    {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "not": {}}}},
]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(), chat_format="plain") as running:
        yield running


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def ask(http: httpx.Client, path: str, **fields: Any) -> Any:
    prompt: dict[str, Any]
    if path == TEXT:
        prompt = {"prompt": "say:none", "max_tokens": 200}
    elif path == CHAT:
        prompt = {"messages": [{"role": "user", "content": "say:none"}]}
    else:
        prompt = {"input": "say:none"}
    return http.post(path, json={**prompt, **fields})


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "text"), [case[1:] for case in GRAMMARS], ids=[case[0] for case in GRAMMARS]
)
def test_every_spelling(http: httpx.Client, path: str, fields: dict[str, Any], text: str) -> None:
    answer = ask(http, path, **fields).json()
    choice = answer["choices"][0]
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == text
    assert choice["finish_reason"] == "stop"


def test_fields_that_ask_for_nothing_change_nothing(http: httpx.Client) -> None:
    """llama.cpp's own page sends an empty grammar."""
    answer = ask(http, CHAT, grammar="", regex=None, json_schema=None, guided_decoding_backend="xgrammar")
    assert answer.json()["choices"][0]["message"]["content"] == "none"
    assert "guided_decoding_backend" in answer.headers["warning"]


def test_what_is_cut_off_says_so(http: httpx.Client) -> None:
    answer = ask(http, CHAT, response_format={"type": "json_object"}, max_tokens=1).json()
    assert answer["choices"][0]["finish_reason"] == "length"


def test_responses(http: httpx.Client) -> None:
    wanted = {"type": "json_schema", **NAMED, "strict": True}
    answer = ask(http, RESPONSES, text={"format": wanted}).json()
    jsonschema.validate(json.loads(answer["output"][0]["content"][0]["text"]), SCHEMA)
    assert answer["text"]["format"] == wanted
    answer = ask(http, RESPONSES, text={"format": {"type": "json_object"}}).json()
    assert json.loads(answer["output"][0]["content"][0]["text"]) == {}


def test_messages(http: httpx.Client) -> None:
    body = {"max_tokens": 200, "messages": [{"role": "user", "content": "say:none"}]}
    wanted = {"type": "json_schema", "schema": SCHEMA}
    answer = http.post("/v1/messages", json={**body, "output_config": {"format": wanted}}).json()
    jsonschema.validate(json.loads(answer["content"][0]["text"]), SCHEMA)
    wanted["schema"] = {"not": {}}
    answer = http.post("/v1/messages", json={**body, "output_config": {"format": wanted}})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "output_config.format" in message
    assert '"not"' in message


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}},
     "response_format", '"not"'),
    (CHAT, {"structured_outputs": {"json": {"multipleOf": 1000003}}}, "structured_outputs", "multipleOf"),
    (TEXT, {"guided_json": {"uniqueItems": True}}, "guided_json", "uniqueItems"),
    (TEXT, {"guided_regex": "((a{1,100}){1,100}){1,100}"}, "guided_regex", "repetition"),
    (CHAT, {"regex": "((a{1,100}){1,100}){1,100}"}, "regex", "repetition"),
    (CHAT, {"regex": "(?=a)"}, "regex", "look-around"),
    (CHAT, {"regex": ""}, "regex", "empty"),
    (CHAT, {"regex": 5}, "regex", "string"),
    (TEXT, {"ebnf": 'root ::= "a" (= "b")'}, "ebnf", "line 1, column 15: lookahead"),
    (CHAT, {"ebnf": 'start: "a"'}, "ebnf", "line 1, column 6"),
    (CHAT, {"ebnf": ""}, "ebnf", "root"),
    (CHAT, {"ebnf": {"root": "a"}}, "ebnf", "string"),
    (CHAT, {"ebnf": "root ::= (((\"a\"{1,999}){1,999}){1,999}){1,999}"}, "ebnf", "too many"),
    (CHAT, {"ebnf": 'root ::= root "a"'}, "ebnf", ""),
    (CHAT, {"grammar": "root ::= other"}, "grammar", "other"),
    (CHAT, {"guided_grammar": "root ::= other"}, "guided_grammar", "other"),
    (CHAT, {"json_schema": "{"}, "json_schema", "JSON"),
    (TEXT, {"json_schema": {"uniqueItems": True}}, "json_schema", "uniqueItems"),
    (TEXT, {"json_schema": [SCHEMA]}, "json_schema", ""),
    (CHAT, {"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "exclude"),
    (CHAT, {"json_schema": "{}", "guided_json": {}}, "json_schema", "exclude"),
    (TEXT, {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"if": {}}}}},
     "text.format", '"if"'),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
     "tool_choice", "other"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", "tools"),
    (CHAT, {"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "required"),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
     "tool_choice", "at least one"),
    (RESPONSES, {"tools": [{"type": "function", "name": "look"}],
     "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
     "tool_choice", "'f'"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields", "param", "word"), REFUSED)
def test_refusals_name_field_and_keyword(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str, word: str, stream: bool
) -> None:
    answer = ask(http, path, **fields, stream=stream)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert word in error["message"]


@pytest.fixture(scope="module")
def hermes() -> Iterator[httpx.Client]:
    """A server whose model calls tools as Hermes and Qwen do."""
    with live_server(ScriptedEngine(), chat_format="hermes") as running, running.http() as client:
        yield client


def calls_of(answer: Any) -> list[tuple[str, Any]]:
    calls = answer["choices"][0]["message"]["tool_calls"]
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def test_a_required_call(hermes: httpx.Client) -> None:
    answer = ask(hermes, CHAT, tools=TOOLS, tool_choice="required", max_tokens=300).json()
    ((name, arguments),) = calls_of(answer)[:1]
    assert name == "look"
    jsonschema.validate(arguments, SCHEMA)
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("parameters", [{"type": "array"}, {"type": ["object", "null"]}, {"type": "string"}])
def test_arguments_are_an_object_whatever_the_schema_says(
    hermes: httpx.Client, parameters: dict[str, Any]
) -> None:
    tool = {"type": "function", "function": {"name": "wait", "parameters": parameters}}
    answer = ask(hermes, CHAT, tools=[tool], tool_choice="required", max_tokens=300).json()
    assert calls_of(answer)[0] == ("wait", {})


def test_a_named_call(hermes: httpx.Client) -> None:
    choice = {"type": "function", "function": {"name": "wait"}}
    answer = ask(hermes, CHAT, tools=TOOLS, tool_choice=choice, max_tokens=300).json()
    assert calls_of(answer) == [("wait", {})]


def test_strict_tools_hold_the_calls_of_a_free_answer(hermes: httpx.Client) -> None:
    asked = 'say:Hm. <tool_call>\n{"name": "look", "arguments": {"a": "seven", "c": 1}}\n</tool_call>'
    answer = hermes.post(
        CHAT, json={"messages": [{"role": "user", "content": asked}], "tools": TOOLS, "max_tokens": 300}
    ).json()
    ((name, arguments),) = calls_of(answer)
    assert name == "look"
    jsonschema.validate(arguments, SCHEMA)
    assert answer["choices"][0]["message"]["content"].startswith("Hm.")
    free = ask(hermes, CHAT, tools=TOOLS).json()
    assert free["choices"][0]["message"]["content"] == "none"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_the_only_ones_called(hermes: httpx.Client, mode: str) -> None:
    """The prompt still shows them all: it stays the one that the cache knows."""
    asked = 'say:<tool_call>\n{"name": "look", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'
    body = {"messages": [{"role": "user", "content": asked}], "tools": TOOLS, "max_tokens": 300}
    free = hermes.post(CHAT, json=body).json()
    assert calls_of(free) == [("look", {"a": 1, "b": "x"})]
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "wait"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = hermes.post(CHAT, json={**body, "tool_choice": choice, "parallel_tool_calls": False}).json()
    assert [name for name, _ in calls_of(answer)] == ["wait"]
    assert answer["usage"]["prompt_tokens"] == free["usage"]["prompt_tokens"]


def test_allowed_tools_in_responses(hermes: httpx.Client) -> None:
    tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("look", "wait")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "wait"}]}
    answer = ask(hermes, RESPONSES, tools=tools, tool_choice=choice, max_output_tokens=300).json()
    assert {item["name"] for item in answer["output"] if item["type"] == "function_call"} == {"wait"}


def test_a_call_in_responses(hermes: httpx.Client) -> None:
    tools = [{"type": "function", "name": "look", "parameters": SCHEMA}]
    choice = {"type": "function", "name": "look"}
    answer = ask(hermes, RESPONSES, tools=tools, tool_choice=choice, max_output_tokens=300).json()
    jsonschema.validate(json.loads(answer["output"][0]["arguments"]), SCHEMA)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look"}])
def test_a_call_in_messages(hermes: httpx.Client, choice: dict[str, Any]) -> None:
    body = {
        "max_tokens": 300,
        "messages": [{"role": "user", "content": "say:none"}],
        "tools": [{"name": "look", "input_schema": SCHEMA, "strict": True}],
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
    }
    answer = hermes.post("/v1/messages", json=body).json()
    assert answer["stop_reason"] == "tool_use"
    (block,) = answer["content"]
    assert (block["type"], block["name"]) == ("tool_use", "look")
    jsonschema.validate(block["input"], SCHEMA)


def test_a_strict_tool_that_cannot_be_enforced(hermes: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}
    error = ask(hermes, CHAT, tools=[tool]).json()["error"]
    assert error["param"] == "tools"
    assert '"not"' in error["message"]


#: Schemas that can't be compiled, as tools of others have them.
UNCOMPILED: dict[str, Any] = {
    "look-around": {"pattern": "^(?=a)b"},
    "word boundary": {"type": "string", "pattern": r"\bfoo\b"},
    "backreference": {"pattern": r"(a)\1"},
    "control": {"pattern": r"\cA"},
    "word start": {"pattern": r"\<a"},
    "no regex": {"pattern": "["},
    "external": {"$ref": "http://127.0.0.1:9/x.json"},
    "broken": {"$ref": "#/$defs/nothing"},
    "huge": {"type": "integer", "minimum": 1, "maximum": 1e30},
    "any": {"type": "any"},
    "null type": {"type": ["string", None]},
    "no value": {"enum": []},
    "no schema": 5,
    "prime": {"multipleOf": 1000003},
    "pattern of names": {"type": "object", "patternProperties": {"(?=a)": {}}, "additionalProperties": False},
    "inside": {"anyOf": [{"type": "array", "items": {"pattern": "(?!a)"}}, {"type": "null"}]},
}
FREE = {
    "name": "free",
    "parameters": {
        "type": "object",
        "properties": {"n": {"enum": [7]}, **UNCOMPILED},
        "required": ["n", *UNCOMPILED],
    },
}
LOOK = TOOLS[0]["function"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_cannot_be_compiled_refuses_no_request(hermes: httpx.Client, stream: bool) -> None:
    """Neither its own call, nor those of a strict tool, nor an answer with a format."""
    tools = [{"type": "function", "function": one} for one in (FREE, LOOK)]
    flat = [{"type": "function", **one} for one in (FREE, LOOK)]
    patch = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark"}}
    patch["format"] |= {"definition": 'start: "a"'}
    wanted = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    claude = [{"name": one["name"], "input_schema": one["parameters"]} for one in (FREE, LOOK)]
    claude[1]["strict"] = True
    body = {"messages": [{"role": "user", "content": "say:none"}], "max_tokens": 30, "stream": stream}
    for path, fields in (
        (CHAT, {"tools": tools, "tool_choice": "required"}),
        (CHAT, {"tools": tools}),
        (CHAT, {"tools": tools, "response_format": {"type": "json_schema", "json_schema": NAMED}}),
        (RESPONSES, {"tools": flat, "tool_choice": "required"}),
        (RESPONSES, {"tools": [*flat, patch]}),
        (RESPONSES, {"tools": flat, "text": {"format": wanted}}),
        ("/v1/messages", {"tools": claude, "tool_choice": {"type": "tool", "name": "free"}}),
        ("/v1/messages", {"tools": claude}),
    ):
        asked = {"input": "say:none", "stream": stream} if path == RESPONSES else body
        answer = hermes.post(path, json={**asked, **fields})
        assert answer.status_code == 200, (path, fields, answer.text[:500])
        assert "can't be used" not in answer.text


def test_what_can_be_compiled_of_a_free_tool_is_kept(hermes: httpx.Client) -> None:
    choice = {"type": "function", "function": {"name": "free"}}
    few = {
        "broken": {"type": "integer", "$ref": "#/$defs/nothing"},
        "prime": {"type": "integer", "multipleOf": 1000003},
        "look-around": {"enum": [3], "pattern": "(?=a)"},
    }
    parameters = {"type": "object", "properties": {"n": {"enum": [7]}, **few}, "required": ["n", *few]}
    tool = {"type": "function", "function": {"name": "free", "parameters": parameters}}
    answer = ask(hermes, CHAT, tools=[tool], tool_choice=choice, max_tokens=2000).json()
    ((_, arguments),) = calls_of(answer)
    assert set(arguments) == {"n", *few}
    assert (arguments["n"], arguments["look-around"]) == (7, 3)


def test_a_strict_tool_that_cannot_be_compiled_is_named_with_its_field(hermes: httpx.Client) -> None:
    inner = {"type": "object", "properties": {"id": {"pattern": "(?=a)"}, "n": {"type": "integer"}}}
    wrong = {"name": "find_it", "strict": True, "parameters": {"type": "object", "properties": {"by": inner}}}
    tools = [{"type": "function", "function": one} for one in (FREE, LOOK, wrong)]
    for fields in ({"tool_choice": "required"}, {}, {"response_format": {"type": "json_object"}}):
        answer = ask(hermes, CHAT, tools=tools, **fields)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "tools"
        assert "'find_it'" in error["message"]
        assert "properties.by.properties.id.pattern: " in error["message"]
        assert "look-around" in error["message"]


def test_a_format_without_calls_refuses_them(http: httpx.Client) -> None:
    answer = ask(http, CHAT, tools=TOOLS, tool_choice="required")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tool_choice"


#: Says nothing of further properties; the model begins with one.
OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SAID = 'say:{"a":1,"zz":1}'


def asked_for(path: str, schema: Any, **more: Any) -> dict[str, Any]:
    """A body with a schema, as the route spells it."""
    messages = [{"role": "user", "content": SAID}]
    wanted = {"name": "n", "schema": schema, **more}
    if path == RESPONSES:
        return {"input": SAID, "text": {"format": {"type": "json_schema", **wanted}}}
    if path == TEXT:
        return {"prompt": SAID, "max_tokens": 200, "structured_outputs": {"json": schema, **more}}
    if path == CHAT:
        return {"messages": messages, "response_format": {"type": "json_schema", "json_schema": wanted}}
    wanted = {"type": "json_schema", "schema": schema}
    return {"max_tokens": 200, "messages": messages, "output_config": {"format": wanted}}


@pytest.fixture(scope="module")
def open_http() -> Iterator[httpx.Client]:
    options = {"chat_format": "hermes", "structured_additional_properties": "open"}
    with live_server(ScriptedEngine(), **options) as running, running.http() as client:
        yield client


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, "/v1/messages"])
def test_objects_are_closed_by_default(http: httpx.Client, open_http: httpx.Client, path: str) -> None:
    assert "zz" not in http.post(path, json=asked_for(path, OPEN)).raise_for_status().text
    assert "zz" in open_http.post(path, json=asked_for(path, OPEN)).raise_for_status().text
    for more in ({"additionalProperties": True}, {"patternProperties": {"^z": {"type": "integer"}}}):
        assert "zz" in http.post(path, json=asked_for(path, {**OPEN, **more})).raise_for_status().text


def test_who_says_so_has_them_closed_or_open(http: httpx.Client, open_http: httpx.Client) -> None:
    for path in (CHAT, RESPONSES):
        assert "zz" not in open_http.post(path, json=asked_for(path, OPEN, strict=True)).text
    for client in (http, open_http):
        for closed in (True, False):
            fields = asked_for(TEXT, OPEN, disable_additional_properties=closed)
            assert ("zz" in client.post(TEXT, json=fields).raise_for_status().text) != closed
    fields = asked_for(TEXT, OPEN, disable_additional_properties="yes")
    assert "disable_additional_properties" in http.post(TEXT, json=fields).json()["error"]["message"]


def test_arguments_of_tools_are_closed(hermes: httpx.Client, open_http: httpx.Client) -> None:
    def arguments(client: httpx.Client, parameters: Any, **more: Any) -> Any:
        tool = {"type": "function", "function": {"name": "wait", "parameters": parameters, **more}}
        said = '<tool_call>\n{"name": "wait", "arguments": {"a": 1, "zz": 1}}\n</tool_call>'
        messages = [{"role": "user", "content": f"say:{said}"}]
        body = {"messages": messages, "tools": [tool], "tool_choice": "required", "max_tokens": 300}
        answer = client.post(CHAT, json=body).raise_for_status().json()
        return calls_of(answer)[0][1]

    for client in (hermes, open_http):
        assert arguments(client, {"type": "object", "properties": {}}) == {}
        assert arguments(client, {"type": "object"}) == {}
        assert arguments(client, None) == {}
        assert arguments(client, {"type": "object", "additionalProperties": True}) == {"a": 1, "zz": 1}
        assert "zz" not in arguments(client, OPEN, strict=True)
    assert "zz" not in arguments(hermes, OPEN)
    assert "zz" in arguments(open_http, OPEN)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
@pytest.mark.parametrize("fields", [case[1] for case in GRAMMARS if case[0] != "text"], ids=str)
def test_a_grammar_beside_a_call_that_must_be_made(
    hermes: httpx.Client, fields: dict[str, Any], choice: Any
) -> None:
    answer = ask(hermes, CHAT, tools=TOOLS, tool_choice=choice, **fields)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "tool_choice" in message
    assert next(iter(fields)) in message
    assert ask(hermes, CHAT, tools=TOOLS[:1], tool_choice="auto", **fields).is_success


def test_a_grammar_beside_a_call_in_other_apis(hermes: httpx.Client) -> None:
    tool = {"type": "function", "name": "look", "parameters": SCHEMA}
    body = {**asked_for(RESPONSES, OPEN), "tools": [tool], "tool_choice": "required"}
    answer = hermes.post(RESPONSES, json=body)
    assert answer.status_code == 400
    assert "tool_choice" in answer.text
    assert "text.format" in answer.text
    tools = [{"name": "look", "input_schema": SCHEMA}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "look"}):
        body = {**asked_for("/v1/messages", OPEN), "tools": tools, "tool_choice": choice}
        answer = hermes.post("/v1/messages", json=body)
        assert answer.status_code == 400
        assert "tool_choice" in answer.text
        assert "output_config.format" in answer.text


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_schema", "name": "n"},
        {"type": "json_schema", "name": "n", "schema": None},
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_object", "name": "n"},
        {"type": "text", "schema": SCHEMA},
    ],
)
def test_a_format_whose_parts_contradict_each_other_is_refused(http: httpx.Client, wanted: Any) -> None:
    inner = {name: value for name, value in wanted.items() if name != "type"}
    for path, field, body in (
        (RESPONSES, "text", {"text": {"format": wanted}}),
        (CHAT, "response_format", {"response_format": {"type": wanted["type"], "json_schema": inner}}),
    ):
        refused = ask(http, path, **body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"].startswith(field)


def test_a_format_with_nulls_asks_for_nothing_more(http: httpx.Client) -> None:
    for kind in ("text", "json_object"):
        assert ask(http, RESPONSES, text={"format": {"type": kind, "schema": None}}).status_code == 200
        assert ask(http, CHAT, response_format={"type": kind, "json_schema": None}).status_code == 200


def test_arguments_as_text_are_held_to_strict_schemas_or_refused_by_name_in_all_apis() -> None:
    """In a format that writes them as text; the engine would say `none`, of which `n` fits `null`."""
    held = {"properties": {"a": {"type": ["string", "null"], "pattern": "^b{2}$"}}, "required": ["a"]}
    vague = {"properties": {"a": {"type": "string", "not": {"const": "b"}}}}
    said = FORMATS["glm"].write_calls([("look", '{"a": "none"}')])
    messages = [{"role": "user", "content": f"say:{said}"}]

    def asked(path: str, schema: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        fields: dict[str, Any] = {"name": "look", "strict": True, "parameters": schema}
        if path == CHAT:
            return path, {"messages": messages, "tools": [{"type": "function", "function": fields}]}
        if path == RESPONSES:
            return path, {"input": messages, "tools": [{"type": "function", **fields}]}
        fields["input_schema"] = {"type": "object", **fields.pop("parameters")}
        return path, {"messages": messages, "tools": [fields], "max_tokens": 300}

    with live_server(ScriptedEngine(), chat_format="glm") as running, running.http() as client:
        for path in (CHAT, RESPONSES, "/v1/messages"):
            url, body = asked(path, held)
            written = client.post(url, json=body).raise_for_status().text
            assert any(part in written for part in ('{\\"a\\": null}', '"input":{"a":null}')), written
            url, body = asked(path, vague)
            answer = client.post(url, json=body)
            assert answer.status_code == 400
            assert "the tool 'look', argument 'a': not can't be enforced" in answer.json()["error"]["message"]
