"""Reading GGUF files: the same as the reference reader sees, and a damaged file is always a named error."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from core.backend.schemes import GGUF_BLOCKS
from core.errors import ModelLoadError
from core.loader import open_checkpoint
from core.loader.gguf_file import GgufFile
from core.loader.quantized import QuantizedTensor

WRITABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def ggml_type(scheme: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[scheme.upper()]


@pytest.fixture
def every_type(gguf_of):
    values = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    extra = {"strings": ["a", "ä", ""], "floats": [0.5, -1.0], "ints": [1, 2], "flag": True, "name": "n"}
    return gguf_of(metadata=extra, tensors={kind: (values, kind) for kind in WRITABLE})


def test_metadata_and_bytes_are_those_of_the_reference_reader(every_type):
    ours, reference = GgufFile(every_type), gguf.GGUFReader(every_type)
    fields = {key: field.contents() for key, field in reference.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    assert list(ours.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.rows(mine).numpy().tobytes() == tensor.data.tobytes()


@pytest.mark.parametrize("scheme", GGUF_BLOCKS)
def test_dequantization_is_bit_exact_for_any_bytes(scheme):
    elements, num_bytes, _ = GGUF_BLOCKS[scheme]
    data = np.random.default_rng(1).integers(0, 256, (40, 3 * num_bytes), dtype=np.uint8)
    weight = QuantizedTensor(data=torch.from_numpy(data), scheme=scheme, shape=(40, 3 * elements))
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = gguf.quants.dequantize(data, ggml_type(scheme))
    assert np.array_equal(weight.dequantize().numpy(), wanted, equal_nan=True)


@pytest.mark.parametrize("scheme", GGUF_BLOCKS)
def test_rows_and_cuts_of_a_quantized_weight_are_those_of_the_dense_one(scheme):
    elements, num_bytes, _ = GGUF_BLOCKS[scheme]
    data = np.random.default_rng(2).integers(0, 60, (8, 4 * num_bytes), dtype=np.uint8)
    weight = QuantizedTensor(data=torch.from_numpy(data), scheme=scheme, shape=(8, 4 * elements))
    dense, rows = weight.dequantize(), torch.tensor([5, 0, 5, 7])
    assert torch.equal(weight.take_rows(rows).dequantize(), dense[rows])
    assert torch.equal(weight.narrow(0, 3, 4).dequantize(), dense[3:7])
    assert torch.equal(weight.narrow(1, elements, 2 * elements).dequantize(), dense[:, elements : 3 * elements])
    with pytest.raises(ModelLoadError, match=rf"cannot cut \[1, {elements + 1}\).*{scheme}.*multiples of {elements}"):
        weight.narrow(1, 1, elements)
    with pytest.raises(ModelLoadError, match=r"cannot cut \[6, 9\) out of the 8"):
        weight.narrow(0, 6, 3)


def test_every_truncation_is_a_named_error(every_type):
    data = every_type.read_bytes()
    for length in (*range(0, 2000, 17), *range(2000, len(data), 997)):
        every_type.write_bytes(data[:length])
        with pytest.raises(ModelLoadError, match=r"model\.gguf"):
            open_checkpoint(every_type)


def test_damaged_headers_are_named_errors_or_harmless(every_type):
    """Any byte of the header may be wrong: the file opens, or is refused with a named error, and never crashes."""
    data = every_type.read_bytes()
    messages = [message for at in range(0, 1200, 3) if (message := refusal(every_type, data, at))]
    assert len(messages) > 100
    assert all("model.gguf" in message for message in messages)


def refusal(path: Path, data: bytes, at: int) -> str | None:
    """The error that a file with a flipped byte gives."""
    damaged = bytearray(data)
    damaged[at] ^= 0xFF
    path.write_bytes(damaged)
    try:
        GgufFile(path).close()
    except ModelLoadError as error:
        return str(error)
    return None


def test_wrong_magic(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGML" + bytes(60))
    with pytest.raises(ModelLoadError, match="begins with b'GGML'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("version", [b"\x01\x00\x00\x00", b"\x00\x00\x00\x03", b"\x09\x00\x00\x00"])
def test_unsupported_version(every_type, version):
    data = every_type.read_bytes()
    every_type.write_bytes(data[:4] + version + data[8:])
    with pytest.raises(ModelLoadError, match=f"version {int.from_bytes(version, 'little')}"):
        open_checkpoint(every_type)


def test_unsupported_tensor_type_is_named_with_those_that_are_read(gguf_of):
    values = np.zeros((2, 256), np.float32)
    path = gguf_of(tensors={"blk.0.ffn_up.weight": (values, "TQ2_0")})
    with pytest.raises(ModelLoadError, match=r"'blk\.0\.ffn_up\.weight' is of type tq2_0; supported are f32.*q6_k"):
        open_checkpoint(path)


def test_views_are_of_the_file_and_cannot_change_it(every_type):
    before, file = every_type.read_bytes(), GgufFile(every_type)
    view = file.rows(file.tensors["F32"])
    view.zero_()
    file.close()
    assert every_type.read_bytes() == before
    with pytest.raises(ModelLoadError, match="closed"):
        file.rows(file.tensors["F32"])
