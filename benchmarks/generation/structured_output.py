# SPDX-License-Identifier: Apache-2.0
"""Do the embedded model's answers match their schemas, and what does a grammar cost a step?

    python -m benchmarks.structured_output --json FILE

1. 20 schemas, 50 requests with n = 4 at temperature 1: each answer validates, or ends by `length` and says
   so.
2. 8 rows that decode, free and with a grammar, in turns: wall and CPU time of a step, and the CPU time of
   the grammar's own work (masks, their application, the acceptance of tokens) beside it.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from pathlib import Path
from typing import Any

import jsonschema
import torch

from benchmarks.figures import write_figures
from radixkv import LLM, SamplingParams
from radixkv.sampling.logits_processors import apply_processors, by_kind

NUM_REQUESTS, NUM_SAMPLES, MAX_TOKENS = 50, 4, 256
NUM_ROWS, NUM_ROUNDS, STEPS = 8, 6, 40

STRING, INTEGER, BOOLEAN = {"type": "string", "maxLength": 40}, {"type": "integer"}, {"type": "boolean"}


def an_object(*optional: str, **properties: Any) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def an_array(items: Any, most: int = 4, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


PERSON = an_object(name=STRING, age={"type": "integer", "minimum": 0, "maximum": 120})
#: Of this draft: `FormatChecker()` would hold `time` to that of draft 3, and this one knows none.
CHECKER = jsonschema.FormatChecker(formats=jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers)
TIME = re.compile(
    r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(z|[+-]([01]\d|2[0-3]):[0-5]\d)", re.ASCII | re.IGNORECASE
)


@CHECKER.checks("time")
def is_time(given: object) -> bool:
    """As RFC 3339 has it."""
    return not isinstance(given, str) or TIME.fullmatch(given) is not None


SCHEMAS: dict[str, dict[str, Any]] = {
    "person": PERSON,
    "people": an_array(PERSON, 3, 1),
    "weather": an_object(
        "note", city=STRING, celsius={"type": "number", "minimum": -90, "maximum": 60}, note=STRING
    ),
    "yes or no": an_object(answer=BOOLEAN, reason=STRING),
    "color": {"enum": ["red", "green", "blue"]},
    "order": an_object(
        id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        items=an_array(an_object(sku=STRING, count={"type": "integer", "minimum": 1, "maximum": 99}), 3, 1),
    ),
    "event": an_object(
        title=STRING, date={"type": "string", "format": "date"}, time={"type": "string", "format": "time"}
    ),
    "mail": an_object(to={"type": "string", "format": "email"}, subject=STRING, urgent=BOOLEAN),
    "sentiment": an_object(
        label={"enum": ["positive", "neutral", "negative"]}, stars={"enum": [1, 2, 3, 4, 5]}
    ),
    "either": {"anyOf": [an_object(number=INTEGER), an_object(text=STRING)]},
    "shape": {
        "oneOf": [
            an_object(kind={"const": "circle"}, radius={"type": "number", "minimum": 0}),
            an_object(kind={"const": "square"}, side={"type": "number", "minimum": 0}),
        ]
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {"node": an_object(name=STRING, children=an_array({"$ref": "#/$defs/node"}, 2))},
    },
    "point": {"type": "array", "prefixItems": [INTEGER, INTEGER], "items": False, "minItems": 2},
    "nullable": an_object(
        name={"type": ["string", "null"], "maxLength": 20}, size={"type": ["integer", "null"]}
    ),
    "map": {
        "type": "object",
        "additionalProperties": {"type": "integer"},
        "maxProperties": 3,
        "minProperties": 1,
    },
    "price": an_object(
        amount={"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1000}, currency=STRING
    ),
    "table": an_array(an_array(INTEGER, 3, 3), 3, 2),
    "address": an_object(
        street=STRING, zip={"type": "string", "pattern": "^[0-9]{5}$"}, country={"enum": ["DE", "FR", "US"]}
    ),
    "function": an_object(
        name={"const": "search"}, arguments=an_object("limit", query=STRING, limit=INTEGER)
    ),
    "text": {"type": "string", "minLength": 5, "maxLength": 60},
}


def params(schema: dict[str, Any], **options: Any) -> SamplingParams:
    return SamplingParams(structured={"json": schema}, **options)


def check_answers(llm: LLM) -> dict[str, Any]:
    """Part 1."""
    names = [list(SCHEMAS)[i % len(SCHEMAS)] for i in range(NUM_REQUESTS)]
    chats = [
        [{"role": "user", "content": f"Number {i}: write an example of: {name}. Answer with JSON only."}]
        for i, name in enumerate(names)
    ]
    each = [
        params(SCHEMAS[name], max_tokens=MAX_TOKENS, n=NUM_SAMPLES, temperature=1.0, seed=4 * i)
        for i, name in enumerate(names)
    ]
    started = time.perf_counter()
    outputs = llm.chat(chats, each)
    counts = {"answers": 0, "valid": 0, "length": 0, "wrong": 0}
    for name, output in zip(names, outputs, strict=True):
        for sample in output.outputs:
            verdict = judge(sample.text, sample.finish_reason, SCHEMAS[name])
            counts["answers"] += 1
            counts[verdict] += 1
            if verdict == "wrong":
                print(f"{name}, finish reason {sample.finish_reason}: {sample.text!r}")
    return {
        **counts,
        "schemas": len(SCHEMAS),
        "tokens": sum(output.num_generated_tokens for output in outputs),
        "seconds": round(time.perf_counter() - started, 1),
    }


def judge(text: str, finish_reason: str | None, schema: dict[str, Any]) -> str:
    if finish_reason == "length":
        return "length"
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=CHECKER)
    except (ValueError, jsonschema.ValidationError):
        return "wrong"
    return "valid" if finish_reason == "stop" else "wrong"


def measure_cost(llm: LLM) -> dict[str, Any]:
    """Part 2."""
    endless = an_array(an_object(name=STRING, size=INTEGER, tag={"enum": ["new", "old"]}), 100, 50)
    steps: dict[str, list[float]] = {"free": [], "grammar": []}
    cpu: dict[str, list[float]] = {"free": [], "grammar": []}
    for turn in range(2 * NUM_ROUNDS):
        kind = ("free", "grammar")[turn % 2]
        options: dict[str, Any] = {"max_tokens": STEPS, "temperature": 1.0, "ignore_eos": True}
        own = params(endless, **options) if kind == "grammar" else SamplingParams(**options)
        for i in range(NUM_ROWS):
            llm.engine.add_request(f"Row {i} of turn {turn}: a list of things as JSON:", own)
        llm.engine.step()  # the prompts
        while llm.engine.has_work:
            started, cpu_started = time.perf_counter(), time.process_time()
            llm.engine.step()
            steps[kind].append(time.perf_counter() - started)
            cpu[kind].append(time.process_time() - cpu_started)
    medians = {kind: statistics.median(times) * 1e3 for kind, times in steps.items()}
    cpu_medians = {kind: statistics.median(times) * 1e3 for kind, times in cpu.items()}
    own_ms = grammar_work_ms(llm, endless)
    return {
        "rows": NUM_ROWS,
        "step_free_ms": round(medians["free"], 2),
        "step_grammar_ms": round(medians["grammar"], 2),
        "difference_percent": round((medians["grammar"] / medians["free"] - 1) * 100, 2),
        "step_free_cpu_ms": round(cpu_medians["free"], 2),
        "step_grammar_cpu_ms": round(cpu_medians["grammar"], 2),
        "difference_cpu_percent": round((cpu_medians["grammar"] / cpu_medians["free"] - 1) * 100, 2),
        "grammar_work_cpu_ms": round(own_ms, 3),
        "grammar_work_percent": round(own_ms / cpu_medians["free"] * 100, 2),
    }


def grammar_work_ms(llm: LLM, schema: dict[str, Any]) -> float:
    """CPU time of a step's grammar work for all rows: masks, application, acceptance."""
    grammar = llm.engine.input_processor.compile(params(schema))
    assert grammar is not None
    assert llm.engine.limits.vocab_size is not None
    rows = [grammar.start() for _ in range(NUM_ROWS)]
    logits = torch.randn(NUM_ROWS, llm.engine.limits.vocab_size, generator=torch.Generator().manual_seed(0))
    times = []
    for _ in range(100):
        chosen = logits.clone()
        started = time.thread_time()
        apply_processors(chosen, by_kind([[row] for row in rows]))
        spent = time.thread_time() - started
        tokens = torch.softmax(chosen, dim=1).multinomial(1)[:, 0].tolist()
        started = time.thread_time()
        for row, token in zip(rows, tokens, strict=True):
            row.accept(token)
        times.append(spent + time.thread_time() - started)
        rows = [grammar.start() if row.is_complete else row for row in rows]
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=("answers", "cost"))
    parser.add_argument("--threads", type=int, help="CPU threads of the model")
    wanted = parser.parse_args()
    result: dict[str, Any] = {}
    if wanted.only != "cost":
        result["answers"] = check_answers(LLM(max_num_seqs=32, threads=wanted.threads))
    if wanted.only != "answers":
        # Guesses and forced tokens would make steps of more rows.
        result["cost"] = measure_cost(LLM(max_num_seqs=32, threads=wanted.threads, speculation="off"))
    result["torch_threads"] = torch.get_num_threads()
    print(json.dumps(result, indent=2))
    write_figures(wanted.json, "structured_output", result)


if __name__ == "__main__":
    main()
