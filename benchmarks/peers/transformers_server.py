# SPDX-License-Identifier: Apache-2.0
"""A minimal completions server over transformers' `generate`; runs in the peer's environment.

Requests that wait are taken together, at most 8, as one left-padded static batch; the next batch starts when
all of them are done. Prompts are computed in full each time: `generate` keeps no cache between calls.
Usage: MODEL_FOLDER PORT THREADS.
"""

import json
import queue
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

BATCH = 8
# A batch waits this long, in seconds, for company after its first request: clients that work together send
# their next requests within a few milliseconds.
COMPANY = 0.05


class Job:
    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.events: queue.Queue[int | None] = queue.Queue()
        self.prompt_tokens = 0


class RowStreamer(BaseStreamer):
    """Hands each row of every step to its own job; the first call of `generate` repeats the prompts."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.prompts_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self.prompts_seen:
            self.prompts_seen = True
            return
        for job, token in zip(self.jobs, value.tolist(), strict=True):
            job.events.put(token)

    def end(self) -> None:
        for job in self.jobs:
            job.events.put(None)


def work(model: Any, tokenizer: Any, waiting: queue.Queue[Job]) -> None:
    while True:
        jobs = [waiting.get()]
        deadline = time.monotonic() + COMPANY
        while len(jobs) < BATCH:
            try:
                jobs.append(waiting.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                break
        inputs = tokenizer([job.body["prompt"] for job in jobs], return_tensors="pt", padding=True)
        for job, mask in zip(jobs, inputs["attention_mask"], strict=True):
            job.prompt_tokens = int(mask.sum())
        count = max(job.body["max_tokens"] for job in jobs)
        with torch.inference_mode():
            model.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=count,
                streamer=RowStreamer(jobs),
            )


def main() -> None:
    folder, port, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None  # answers have a fixed length
    waiting: queue.Queue[Job] = queue.Queue()
    threading.Thread(target=work, args=(model, tokenizer, waiting), daemon=True).start()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.answer("application/json")
            self.wfile.write(json.dumps({"data": [{"id": "transformers"}]}).encode())

        def do_POST(self) -> None:
            job = Job(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            waiting.put(job)
            self.answer("text/event-stream")
            tokens, sent = [], 0
            while (token := job.events.get()) is not None:
                tokens.append(token)
                text = tokenizer.decode(tokens)
                self.event({"choices": [{"index": 0, "text": text[sent:], "finish_reason": None}]})
                sent = len(text)
            usage = {"prompt_tokens": job.prompt_tokens, "completion_tokens": len(tokens)}
            self.event({"choices": [], "usage": {**usage, "total_tokens": sum(usage.values())}})
            self.wfile.write(b"data: [DONE]\n\n")

        def answer(self, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()

        def event(self, event: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
