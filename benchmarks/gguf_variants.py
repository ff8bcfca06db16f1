"""The same model in other types of GGUF: every matrix of a file dequantized and stored anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Type

from core.backend.schemes import SCHEMES, quantize_int8

__all__ = ["VARIANTS", "write_variant"]

Floats = npt.NDArray[np.float32]


def _stored_as(kind: Type) -> Callable[[str, Floats], tuple[npt.NDArray[np.uint8] | Floats, Type]]:
    return lambda name, weight: (gguf.quants.quantize(weight, kind), kind)


def _through_int8(name: str, weight: Floats) -> tuple[Floats, Type]:
    """What `--quantization int8` keeps of a matrix of bfloat16, in float32; the embedding stays as it is."""
    dense = torch.from_numpy(np.array(weight)).bfloat16()
    if not name.startswith("blk."):
        return dense.float().numpy(), Type.F32
    quantized, scale = quantize_int8(dense)
    return SCHEMES["int8"].dequantize({"weight": quantized, "scale": scale}).numpy(), Type.F32


VARIANTS = {name: _stored_as(Type[name]) for name in ("BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")}
"""What can be written, by name; `gguf` quantizes to no K type."""
VARIANTS["INT8"] = _through_int8


def write_variant(source: Path, target: Path, name: str) -> Path:
    """Writes `source` with its matrices as the variant has them; returns `target`. Vectors stay as they are."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        weight: Floats = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if weight.ndim < 2:
            writer.add_tensor(tensor.name, weight)
            continue
        data, kind = VARIANTS[name](tensor.name, weight)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
