# SPDX-License-Identifier: Apache-2.0
"""GuideLLM, a load generator: a few requests over chat completions, and what it measured."""

import json
import os
from importlib.metadata import version
from pathlib import Path

import agent
import report

GUIDELLM = str(Path(report.ENVIRONMENT) / "bin" / "guidellm")
TEXTS = [f"{report.SYSTEM} {report.FIRST} {i}" for i in range(4)]


def measure(name: str) -> str:
    texts = Path("texts.jsonl")
    texts.write_text("".join(json.dumps({"prompt": text, "output_tokens_count": 8}) + "\n" for text in TEXTS))
    backend = {
        "kind": "openai_http",
        "target": report.URL,
        "model": report.MODEL,
        "api_key": report.KEY,
        "request_format": "/v1/chat/completions",
    }
    options = {
        "--backend": ",".join(f"{key}={value}" for key, value in backend.items()),
        "--profile": "kind=synchronous",
        "--constraint": "kind=max_requests,count=4",
        "--data": f"kind=json_file,path={texts}",
        "--tokenizer": f"kind=huggingface_auto,model={os.environ['MODEL_FOLDER']}",
        "--output": f"kind=json,path={name}.json",
    }
    agent.run(GUIDELLM, "run", *(part for option in options.items() for part in option), "--disable-console")
    (benchmark,) = json.loads(Path(f"{name}.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    if totals["successful"] != len(TEXTS) or totals["errored"]:
        raise SystemExit(f"of {len(TEXTS)} requests it counted {totals}")
    return str(totals)


report.version(version("guidellm"))
report.turn(measure("first"))
report.turn(measure("second"))
