# SPDX-License-Identifier: Apache-2.0
"""The command `radixkv quantize`: a GGUF file of 4 or 8 bits out of a model's safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from radixkv.errors import ConfigError
from radixkv.model.loading.model_source import resolve_model


def quantize(
    model: Annotated[str, typer.Argument(help="Embedded model, folder of safetensors, or hub id.")],
    to: Annotated[str, typer.Option("--to", help="Q8_0, Q4_0, or Q4_K (with xllamacpp installed).")],
    out: Annotated[Path, typer.Option("--out", help="The GGUF file to write; must not exist.")],
) -> None:
    """Write a model as a GGUF file of 4 or 8 bits, which `radixkv serve FILE` keeps in memory as it is.

    Reads one tensor at a time: the weights need not fit in memory, unless the folder keeps its experts
    one by one. Sizes, tokenizer and chat template go into the file.
    """
    from radixkv.model.quantize.gguf_writing import write_quantized

    source = resolve_model(model)
    if source.gguf_file is not None:
        raise ConfigError(f"{model} is a GGUF file already; give the folder of the original weights")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    try:
        write_quantized(source.folder, to, out)
    except OSError as error:
        raise ConfigError(f"--out {out} can't be written: {error.strerror or error}") from error
    typer.echo(f"{out} ({out.stat().st_size / 1e6:,.0f} MB)")


def add_commands(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(quantize)
