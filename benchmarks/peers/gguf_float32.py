# SPDX-License-Identifier: Apache-2.0
"""Write a copy of a quantised GGUF file with all weights in float32; runs in the peer's environment.

The weights are what every other engine gets: the dequantised values, to the bit. Usage: SOURCE TARGET.
"""

import sys

import gguf


def main() -> None:
    source, target = sys.argv[1:3]
    reader = gguf.GGUFReader(source)
    field = reader.get_field(gguf.Keys.General.ARCHITECTURE)
    assert field is not None, f"{source} does not say its architecture"
    architecture = field.contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name == gguf.Keys.General.ARCHITECTURE or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        value = field.contents()
        if field.name == gguf.Keys.General.FILE_TYPE:
            value = int(gguf.LlamaFileType.ALL_F32)
        writer.add_key_value(field.name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("float32")
        writer.add_tensor(tensor.name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
