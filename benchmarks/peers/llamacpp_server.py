# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's own HTTP server; runs in the peer's environment: MODEL.gguf PORT SLOTS THREADS."""

import signal
import sys

import xllamacpp


def main() -> None:
    model, port, slots, threads = sys.argv[1], *map(int, sys.argv[2:5])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.port = port
    params.n_parallel = slots
    params.n_ctx = 4096 * slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt = True
    params.cont_batching = True
    server = xllamacpp.Server(params)
    print("listening on", server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
