# SPDX-License-Identifier: Apache-2.0
"""Flipped bits and cut files of an adapter's folder: an error, or another adapter by its identity.

    python tests/model/fuzz_adapter_folders.py --cases 20000

The same in small is a test (`test_adapter_folders.py`).
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from radixkv.errors import AdapterLoadError
from radixkv.model.adapters.base_modules import BaseModules
from radixkv.model.adapters.lora_weights import LoraWeights, read_adapter


def equals(found: LoraWeights, whole: LoraWeights) -> bool:
    """Return True if two adapters compute the same."""
    return (
        found.invocation == whole.invocation
        and found.modules.keys() == whole.modules.keys()
        and all(
            (found.modules[name].down == change.down).all() and (found.modules[name].up == change.up).all()
            for name, change in whole.modules.items()
        )
    )


def damage(good: Path, folder: Path, base: BaseModules, cases: int, seed: int) -> Counter[str]:
    """Read a folder with one of its files damaged, again and again; returns how often what came of it.

    Raises:
        AssertionError: a damaged adapter was taken for the whole one.
    """
    shutil.copytree(good, folder)
    whole = read_adapter(good, base, 16)
    chance, counts = random.Random(seed), Counter[str]()
    names = ("adapter_config.json", "adapter_model.safetensors")
    contents = {name: (good / name).read_bytes() for name in names}
    for case in range(cases):
        name = names[case % 3 > 0]
        data = bytearray(contents[name])
        if case % 5 == 0:
            del data[chance.randrange(len(data)) :]
        for _ in range(chance.choice((1, 1, 1, 2, 8)) if case % 5 and data else 0):
            # In the header, where damage is worst, or anywhere.
            at = chance.randrange(2000 if case % 2 else len(data)) % len(data)
            data[at] ^= 1 << chance.randrange(8)
        (folder / name).write_bytes(data)
        try:
            found = read_adapter(folder, base, 16)
        except AdapterLoadError:
            counts["refused"] += 1
        else:
            assert (found.identity == whole.identity) == equals(found, whole), (case, seed)
            counts["same" if found.identity == whole.identity else "another"] += 1
        (folder / name).write_bytes(contents[name])
    return counts


def main() -> None:
    """Damage an adapter of PEFT's on a tiny model, and print what came of it."""
    from tiny_adapters import peft_model, plain_model, save_adapter
    from tiny_models import save_tiny_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_tiny_model(folder / "tiny-llama", "llama", num_hidden_layers=2)
        base = BaseModules.of(plain_model(model), ("tiny-llama",), model)
        for kind, more in (("plain", {}), ("activated", {"alora_invocation_tokens": [5, 6, 7]})):
            good = save_adapter(peft_model(model, 1, **more), folder / kind)
            print(kind, dict(damage(good, folder / f"{kind}-damaged", base, options.cases, options.seed)))


if __name__ == "__main__":
    main()
