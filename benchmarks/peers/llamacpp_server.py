# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's own HTTP server, out of the wheel; runs in the peer's environment.

It takes options of `llama-server`, which the wheel does not ship, with the same meaning.
"""

import argparse
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    for name in ("--port", "--parallel", "--ctx-size", "--threads"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--no-repack", action="store_true")
    args = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.port = args.port
    params.n_parallel, params.n_ctx = args.parallel, args.ctx_size
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.no_extra_bufts = args.no_repack
    params.cache_prompt = True
    params.cont_batching = True
    server = xllamacpp.Server(params)
    print("listening on", server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
