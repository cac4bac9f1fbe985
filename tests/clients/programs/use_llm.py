# SPDX-License-Identifier: Apache-2.0
"""simonw's llm, with the server in its extra-openai-models.yaml; prints what it got as JSON."""

import json
import os
import pathlib
import tempfile

# Read when llm looks for models, so that it must be there before.
home = tempfile.TemporaryDirectory()
os.environ["LLM_USER_PATH"] = home.name
URL, KEY, CALL = os.environ["URL"], os.environ["KEY"], os.environ["CALL"]
entry = """
- model_id: local{suffix}
  model_name: {name}
  api_base: {url}/v1
  api_key_name: radixkv
  supports_tools: true
  supports_schema: true
  {more}
"""
models = (("", "scripted", ""), ("-responses", "scripted", "responses: true"), ("-absent", "absent", ""))
pathlib.Path(home.name, "extra-openai-models.yaml").write_text(
    "".join(entry.format(suffix=suffix, name=name, url=URL, more=more) for suffix, name, more in models)
)

import llm  # noqa: E402
import openai  # noqa: E402
from pydantic import BaseModel  # noqa: E402

called = []


class Weather(BaseModel):
    city: str
    degrees: int


def look(city: str) -> str:
    """The weather of a city."""
    called.append(city)
    return "say:It is sunny."


def error_of(name: str, key: str) -> int:
    try:
        llm.get_model(name).prompt("Hi.", key=key).text()
    except openai.APIStatusError as error:
        return error.status_code
    return 200


def use(name: str) -> dict:
    model = llm.get_model(name)
    plain = model.prompt("say:Hello there.", system="Be brief.", stream=False, key=KEY)
    text = plain.text()
    used = plain.usage()
    details = used.details.get("prompt_tokens_details") or used.details["input_tokens_details"]
    pieces = list(model.prompt("say:Hello there.", key=KEY))
    conversation = model.conversation()
    turns = [conversation.prompt(f"say:{text}", key=KEY).text() for text in ("One.", "Two.")]
    schema = model.prompt('say:{"city":"Paris","degrees":21}', schema=Weather, key=KEY).text()
    return {
        "plain": text,
        "usage": {"prompt": used.input, "cached": details["cached_tokens"]},
        "stream": "".join(pieces),
        "pieces": len(pieces),
        "turns": turns,
        "tools": [model.chain("say:" + CALL, tools=[look], key=KEY).text()],
        "structured": [json.loads(schema)],
    }


got = {"chat": use("local"), "responses": use("local-responses"), "called": called}
got["chat"]["errors"] = {"model": error_of("local-absent", KEY), "key": error_of("local", "wrong")}
print(json.dumps(got))
