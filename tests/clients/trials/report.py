# SPDX-License-Identifier: Apache-2.0
"""What a trial's program says of itself: a line of JSON for each thing that worked.

The program is given, in the environment: `URL` of a server with the long-context model, `SCRIPTED_URL` of
one that answers what it is told to, `KEY`, `MODEL` and its `MODEL_FOLDER`, `SYSTEM` (a long system prompt),
`HOME` and a working directory of its own; and the API to use as its argument.
"""

import json
import os
import sys
import time

URL, SCRIPTED_URL = os.environ["URL"], os.environ["SCRIPTED_URL"]
KEY, MODEL, SYSTEM = os.environ["KEY"], os.environ["MODEL"], os.environ["SYSTEM"]
#: Where a client of Node.js is installed.
ENVIRONMENT = os.environ["ENVIRONMENT"]
API = sys.argv[1]
FIRST, SECOND = "Tell me about rivers.", "And about lakes?"
ASK_FOR_TOOL = "What is the weather in Paris?"
#: What the tool says. To the scripted server it is also what to answer then.
RESULT = "say{{It is sunny.}}say"


def _say(**fields) -> None:
    print(json.dumps({**fields, "at": time.time()}), flush=True)


def version(text: str) -> None:
    """Which version of the client this is."""
    _say(version=text)


def turn(text: str) -> None:
    """A turn of the conversation has been answered."""
    if not isinstance(text, str) or not text.strip():
        raise SystemExit(f"a turn has no text: {text!r}")
    _say(turn=text)


def called(arguments: dict) -> None:
    """The tool was called by the model, and what the client made of the call."""
    _say(called=arguments)


def note(text: str) -> None:
    """Something that the table shall say."""
    _say(note=text)
