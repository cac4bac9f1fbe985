# SPDX-License-Identifier: Apache-2.0
"""Table of readers by a checkpoint's `quant_method`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from radixkv.model.loading.stored_forms.bitsandbytes import read_bitsandbytes
from radixkv.model.loading.stored_forms.compressed_tensors import read_compressed_tensors
from radixkv.model.loading.stored_forms.found_weights import FoundWeights
from radixkv.model.loading.stored_forms.fp8 import read_block_fp8, read_scaled_fp8
from radixkv.model.loading.stored_forms.grouped import read_auto_round, read_awq, read_gptq
from radixkv.model.loading.stored_forms.mapped_tensors import MappedTensors
from radixkv.model.loading.stored_forms.mlx import read_mlx
from radixkv.model.loading.stored_forms.modelopt import read_modelopt
from radixkv.model.loading.stored_forms.mxfp4 import read_mxfp4
from radixkv.model.loading.stored_forms.torchao import read_torchao

#: From a folder's tensors and its `quantization_config` to its stored weights.
Reader = Callable[[MappedTensors, Mapping[str, Any]], FoundWeights]


#: By the keys of `checkpoint_formats.FORMATS`.
READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "fp8": read_block_fp8,
        "modelopt": read_modelopt,
        "fbgemm_fp8": read_scaled_fp8,
        "quark": read_scaled_fp8,
        "compressed-tensors": read_compressed_tensors,
        "bitsandbytes_4bit": read_bitsandbytes,
        "bitsandbytes_8bit": read_bitsandbytes,
        "torchao": read_torchao,
        "mlx": read_mlx,
        "awq": read_awq,
        "gptq": read_gptq,
        "auto-round": read_auto_round,
        "mxfp4": read_mxfp4,
    }
)
