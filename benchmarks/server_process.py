"""A server of their own, words for prompts, the machine: what `radixkv bench` and these scripts share."""

from radixkv.bench.server_process import (
    WORD_LIST,
    WORDS,
    ServerProcess,
    machine,
    processor_name,
    started_process,
    started_server,
)

__all__ = [
    "WORDS",
    "WORD_LIST",
    "ServerProcess",
    "machine",
    "processor_name",
    "started_process",
    "started_server",
]
