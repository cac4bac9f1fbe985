# SPDX-License-Identifier: Apache-2.0
"""Recipes of `radixkv quantize`: the format of each tensor, and who rounds it.

    Q8_0   all products and embeddings Q8_0
    Q4_0   products Q4_0, embeddings and output Q8_0
    Q4_K   products Q4_K; values and down products of half of the layers, embeddings and output Q6_K

The gguf package rounds to Q4_0 and Q8_0. K formats are rounded by llama.cpp's own function, out of the
library of an installed xllamacpp or llama-cpp-python. Rows that are not whole blocks of a format get Q8_0,
or float16. Norms and biases, routers of experts and the small tensors of state layers stay float32.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from radixkv.errors import ConfigError
from radixkv.model.loading.gguf_states import leaf_of

RECIPES = ("Q8_0", "Q4_0", "Q4_K")
#: Package -> where in it the library with `ggml_quantize_chunk` lies.
_LIBRARIES = {"xllamacpp": "xllamacpp*.so", "llama_cpp": "lib/libggml-base.*"}
_STATE_PRODUCTS = ("ssm_in", "ssm_out", "ssm_x")

_Array = np.ndarray[Any, Any]


class Rounding:
    """Chooses formats and rounds weights for one recipe.

    Args:
        recipe: one of `RECIPES`.
        layers: of the model.

    Raises:
        ConfigError: an unknown recipe, or nothing installed rounds to its formats.
    """

    def __init__(self, recipe: str, layers: int) -> None:
        if recipe not in RECIPES:
            raise ConfigError(f"--to {recipe} is unknown; it is one of {', '.join(RECIPES)}")
        self.recipe, self._layers = recipe, layers
        self._llama_cpp = _llama_cpp() if recipe == "Q4_K" else None

    def kind(self, name: str, shape: tuple[int, ...]) -> Any:
        """The `GGMLQuantizationType` of a tensor.

        Args:
            name: in the file, such as `blk.3.ffn_down.weight`.
            shape: [out, in], of experts with their number before; of norms and biases, one size.
        """
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        if len(shape) not in (2, 3) or name.endswith(".bias") or _stays_plain(name):
            return GGMLQuantizationType.F32
        for wanted in (self._wanted(name), "Q8_0"):
            kind = GGMLQuantizationType[wanted]
            if shape[-1] % GGML_QUANT_SIZES[kind][0] == 0:
                return kind
        return GGMLQuantizationType.F16

    def _wanted(self, name: str) -> str:
        if self.recipe == "Q8_0":
            return "Q8_0"
        if name in ("token_embd.weight", "output.weight"):
            return "Q8_0" if self.recipe == "Q4_0" else "Q6_K"
        if self.recipe == "Q4_K" and ("attn_v." in name or "ffn_down." in name):
            # The first and last eighth of the layers matter most; of the others, every third.
            layer, edge = int(name.split(".")[1]), self._layers // 8
            inner = edge <= layer < self._layers - edge
            if not inner or (layer - edge) % 3 == 2:
                return "Q6_K"
        return self.recipe

    def round(self, weight: _Array, kind: Any) -> _Array:
        """A float32 weight in a format; uint8 [..., bytes of a row], or float16 or float32."""
        import gguf

        if self._llama_cpp is None or kind.name not in ("Q4_K", "Q6_K"):
            return gguf.quants.quantize(np.ascontiguousarray(weight), kind)
        *outer, width = weight.shape
        rows = weight.size // width
        block, size = gguf.GGML_QUANT_SIZES[kind]
        out = np.empty((*outer, width // block * size), np.uint8)
        weight = np.ascontiguousarray(weight, np.float32)
        self._llama_cpp.ggml_quantize_chunk(
            int(kind), weight.ctypes.data, out.ctypes.data, 0, rows, width, None
        )
        return out


def _stays_plain(name: str) -> bool:
    """True for tensors of routers, and of state layers outside their products."""
    leaf = leaf_of(name).removesuffix(".weight")
    of_state = leaf.startswith(("ssm_", "shortconv.conv")) and leaf not in _STATE_PRODUCTS
    return of_state or "_gate_inp" in leaf


def _llama_cpp() -> Any:
    """The library of an installed llama.cpp with its function to round.

    Raises:
        ConfigError: none is installed.
    """
    for package, pattern in _LIBRARIES.items():
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(Path(folder).glob(pattern)):
                library = ctypes.CDLL(str(path))
                function = getattr(library, "ggml_quantize_chunk", None)
                if function is not None:
                    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
                    function.argtypes += [ctypes.c_int64] * 3 + [ctypes.c_void_p]
                    function.restype = ctypes.c_size_t
                    return library
    raise ConfigError(
        "--to Q4_K needs llama.cpp's rounding: install it with `pip install xllamacpp` (or llama-cpp-python)"
        ", or choose Q8_0 or Q4_0, which need nothing more"
    )
