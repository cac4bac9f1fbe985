# SPDX-License-Identifier: Apache-2.0
"""lm-eval over completions (likelihoods of given answers) and chat completions (generated answers)."""

import json
import os
from importlib.metadata import version
from pathlib import Path

import lm_eval
import report

QUESTIONS = [
    {"text": f"{report.SYSTEM} {question}", "answer": "water"} for question in ("What flows?", "What falls?")
]


def task() -> dict:
    """Two questions after the same long text."""
    file = Path("questions.jsonl")
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    known = {
        "task": "questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file.resolve())}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "metadata": {"version": 1},
    }
    if report.API == "chat":
        generated = {
            "output_type": "generate_until",
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 20},
        }
        return known | generated | {"doc_to_target": "{{answer}}", "metric_list": [{"metric": "exact_match"}]}
    chosen = {"output_type": "multiple_choice", "doc_to_choice": ["water", "stone"], "doc_to_target": 0}
    return known | chosen | {"metric_list": [{"metric": "acc"}]}


def evaluate() -> str:
    # Its tokenizer takes a key as an argument, its questions only from here.
    os.environ["OPENAI_API_KEY"] = report.KEY
    path = "/v1/chat/completions" if report.API == "chat" else "/v1/completions"
    backend = "none" if report.API == "chat" else "remote"
    arguments = {
        "model": report.MODEL,
        "base_url": report.URL + path,
        "tokenizer_backend": backend,
        "num_concurrent": 1,
        "max_retries": 1,
        "auth_token": report.KEY,
    }
    arguments |= {"tokenized_requests": False} if report.API == "chat" else {}
    got = lm_eval.simple_evaluate(
        model="local-chat-completions" if report.API == "chat" else "local-completions",
        model_args=arguments,
        tasks=[task()],
        apply_chat_template=report.API == "chat",
        log_samples=True,
        bootstrap_iters=0,
    )
    return str(got["samples"]["questions"][0]["resps"])


report.version(version("lm-eval"))
report.turn(evaluate())
report.turn(evaluate())
