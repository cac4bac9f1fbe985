# SPDX-License-Identifier: Apache-2.0
"""llama.cpp in this process, one thread: MODEL.gguf SLOTS plain|repacked; runs in the peer's environment.

Each line of standard input is a turn, `{"prompts": [[token ids], ...], "tokens": N}`: all prompts at once,
greedy, N tokens each whatever they are. Each answer is a line with the CPU seconds of the whole process.
"""

import json
import sys
import threading
import time

import xllamacpp


def main() -> None:
    model, slots, way = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel, params.n_ctx = slots, 1024 * slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_batch = params.n_ubatch = 1024
    params.cache_prompt = False
    params.no_extra_bufts = way == "plain"
    params.verbosity = 0
    server = xllamacpp.Server(params)
    print(json.dumps({"system": xllamacpp.get_system_info(), "start_s": time.process_time()}), flush=True)
    for line in sys.stdin:
        turn = json.loads(line)
        began = time.process_time()
        calls = [
            threading.Thread(target=complete, args=(server, prompt, turn["tokens"]))
            for prompt in turn["prompts"]
        ]
        for call in calls:
            call.start()
        for call in calls:
            call.join()
        print(json.dumps({"cpu_s": time.process_time() - began}), flush=True)


def complete(server: xllamacpp.Server, prompt: list[int], tokens: int) -> None:
    body = {
        "prompt": prompt,
        "n_predict": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    answer = server.handle_completions(body)
    assert answer["usage"]["completion_tokens"] == tokens, answer


if __name__ == "__main__":
    main()
