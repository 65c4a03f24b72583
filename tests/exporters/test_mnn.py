"""Packages for MNN as far as they are made here; tests/benchmarks/check_packages.py runs them in MNN itself."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_vocabulary import byte_file
from numpy.typing import NDArray
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

from edgeinfer.backends.onnx.graph import Graph
from edgeinfer.common.errors import EdgeInferError, InvalidArgument, UnsupportedModel
from edgeinfer.exporters.from_gguf import FromGguf
from edgeinfer.exporters.mnn import MnnTarget
from edgeinfer.exporters.mnn.converter import identified
from edgeinfer.exporters.mnn.graph import Linear
from edgeinfer.exporters.mnn.rebuild import rebuilt
from edgeinfer.exporters.mnn.tokenizer_file import tokenizer_file
from edgeinfer.exporters.mnn.weights import Placed, place
from edgeinfer.exporters.request import Request
from edgeinfer.exporters.tokenizer_json import tokenizer_config, tokenizer_json
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import ModelFile


def unpacked(placed: Placed, data: bytes) -> NDArray[np.float32]:
    """A matrix as MNN would read it: header, codes, scales."""
    n_out, n_in = placed.shape
    start, n_codes, n_scales, n_bias, _ = placed.external
    if placed.bits == 16:
        return np.frombuffer(data, np.float16, n_out * n_in, start).reshape(n_out, n_in).astype(np.float32)
    header = data[start : start + placed.header]
    n_meanings = header[5] or 256
    assert header[0] == 2 and struct.unpack("<hh", header[1:5]) == (n_out, n_in) and len(header) == 6 + n_meanings
    meanings = np.frombuffer(header, np.int8, offset=6).astype(np.float32)
    raw = np.frombuffer(data, np.uint8, n_codes - len(header), start + len(header))
    codes = raw if placed.bits == 8 else np.stack((raw >> 4, raw & 15), axis=-1).reshape(-1)
    scales = np.frombuffer(data, np.float32, n_scales // 4, start + n_codes)
    scales = scales.reshape(n_out, n_in // placed.block, -1)
    runs = meanings[codes].reshape(n_out, -1, placed.block) * scales[..., -1:]
    bases = scales[..., :1] if placed.has_bases else np.float32(0)
    assert n_bias == 4 * n_out
    return np.asarray((runs + bases).reshape(n_out, n_in), np.float32)


def floats_of(file: ModelFile, name: str) -> NDArray[np.float32]:
    info = file.tensors[name]
    return dequantize(info.type, file.data(name), info.shape)


@pytest.mark.parametrize("format", ["Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "F16", "TQ2_0"])
def test_matrices_keep_the_weights_of_the_file(format: str, tmp_path: Path) -> None:
    out = io.BytesIO(b"before")
    out.seek(0, io.SEEK_END)
    with ModelFile.open(write_tiny_model(tmp_path / "a.gguf", "qwen2", format)) as file:
        placed = place(file, "blk.0.attn_q.weight", "blk.0.attn_q.bias", out)
        wanted, bias = floats_of(file, "blk.0.attn_q.weight"), floats_of(file, "blk.0.attn_q.bias")
    data = out.getvalue()
    assert np.abs(unpacked(placed, data) - wanted).max() < 2e-6 * np.abs(wanted).max()
    assert data.startswith(b"before") and data.endswith(bias.tobytes()) and len(data) == sum(placed.external)


def converted() -> dict[str, Any]:
    """A graph as the converter gives it, of a norm, a product, attention and a number."""
    attribute = {"key": "label", "s": "linear.0"}
    return {
        "tensorName": ["x", "h", "q", "y", "half"],
        "oplists": [
            {"type": "LayerNorm", "name": "norm", "main": {"external": [4, 8, 8]}, "inputIndexes": [0]},
            {
                "type": "Extra",
                "name": "a",
                "main": {"type": "FakeLinear", "attr": [attribute]},
                "inputIndexes": [1],
                "outputIndexes": [2],
            },
            {
                "type": "Extra",
                "name": "b",
                "main": {"type": "FusedAttention", "attr": [attribute | {"s": "attention.0"}]},
                "inputIndexes": [2, 2, 2],
                "outputIndexes": [3],
            },
            {"type": "Const", "name": "half", "main": {"dataType": "DT_FLOAT", "float32s": [0.333333]}},
            {"type": "Const", "name": "table", "main": {"dataType": "DT_FLOAT", "external": [4, 8]}},
        ],
    }


def test_the_identity_of_a_graph_follows_from_it_and_its_weights() -> None:
    graph = {"bizCode": "", "mnn_uuid": "5a43309a-bf80-4977-9eb8-020f05850487", "oplists": [1]}
    found = identified(graph, ["a", "b"])
    assert found == identified(graph | {"mnn_uuid": "fdaa8e9c-2f7d-46e1-ae93-2c51b727dd0c"}, ["a", "b"])
    assert found == graph | {"mnn_uuid": found["mnn_uuid"]} and len(found["mnn_uuid"]) == 36
    others = [identified(graph | {"oplists": [2]}, ["a", "b"]), identified(graph, ["a", "c"])]
    assert len({each["mnn_uuid"] for each in (graph, found, *others)}) == 4


def test_operators_of_mnn_take_the_place_of_those_that_the_converter_left(tmp_path: Path) -> None:
    stored = np.array([9, 1 / 3, 2, 0, 0, 9], np.float32).tobytes()
    (tmp_path / "stored").write_bytes(stored)
    graph, content, out = Graph("g"), converted(), io.BytesIO()
    graph.constant("half", np.array(1 / 3, np.float32))
    at = Placed(16, 22, 64, 8, 32, 4, 16, (8, 16), False)
    placed = rebuilt(content, graph, {"linear.0": Linear("w", None)}, tmp_path / "stored", out, lambda linear: at)
    assert placed == {"linear.0": at} and out.getvalue() == stored[4:20]
    kinds = [op["type"] for op in content["oplists"]]
    middle = ["Reshape", "ConvertTensor", "Convolution", "ConvertTensor", "Reshape"]
    assert kinds == ["LayerNorm", *middle, "Attention", "Const", "Const"]
    norm, *product, attention, half, table = content["oplists"]
    assert norm["main"]["external"] == [0, 8, 8] and attention["main"] == {"kv_cache": True}
    assert half["main"]["float32s"] == [float(np.float32(1 / 3))]
    assert table["main"]["float32s"] == [float(np.float32(1 / 3)), 2.0]
    chain = [op["inputIndexes"] + op["outputIndexes"] for op in product]
    assert chain == [[1, 5], [5, 6], [6, 7], [7, 8], [8, 2]] and len(content["tensorName"]) == 9
    assert product[2]["main"]["external"] == [16, 86, 8, 32, 0]
    assert product[2]["main"]["quanParameter"]["aMaxOrBits"] == 4
    content["oplists"] = [{"type": "Extra", "name": "c", "main": {"type": "Erf"}}]
    with pytest.raises(UnsupportedModel, match="no operator for 'Erf'"):
        rebuilt(content, graph, {}, tmp_path / "none", out, lambda linear: at)


def test_the_tokenizer_file_has_tokens_and_merges_sorted_for_a_search() -> None:
    file = byte_file(["<s>", "</s>"], ["<t>"], tokenizer__ggml__merges=["a b"], tokenizer__ggml__pre="qwen2")
    tokens: Any = file.metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("Z")] = "ab"  # a byte that no probe has
    data = tokenizer_file(tokenizer_json(file), tokenizer_config(file), [257])
    assert data.startswith(b"430 4\n2 1 0\n256 257 257\n\x00\x06")  # no normaliser, several pre-tokenisers
    head = struct.pack("<BIBBI", 0, 259, 0, 0, 1)  # byte pairs, sizes
    place_of_model = data.index(head) + len(head)
    texts, at = [], place_of_model
    for _ in range(259):
        (length,) = struct.unpack_from("<H", data, at)
        texts.append(data[at + 2 : at + 2 + length].decode())
        (id,) = struct.unpack_from("<I", data, at + 2 + length)
        assert tokens[id] == texts[-1]
        at += 6 + length
    assert texts == sorted(texts)
    assert struct.unpack_from("<III", data, at) == (tokens.index("a"), tokens.index("b"), 0)
    assert data.endswith(b"\x04\x00</s>\x00\x03\x00<s>\x01\x00\x00")  # end, flags, begin, nothing around a text


def test_what_mnn_cannot_run_is_refused_by_name(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "F16")
    head = write_tiny_head(tmp_path / "h.gguf", source)
    capped = write_tiny_model(tmp_path / "b.gguf", "gemma2", "F16")
    cases: list[tuple[Path, Path | str | None, type[EdgeInferError], str]] = [
        (head, None, UnsupportedModel, "is a draft head: MNN runs whole models only"),
        (source, "ngram", InvalidArgument, "packages for MNN have no drafts here"),
        (capped, None, UnsupportedModel, "has soft_cap, which the mnn backend does not know"),
    ]
    for model, draft, error, words in cases:
        with pytest.raises(error, match=words):
            MnnTarget().plan(Request(model, tmp_path / "out", draft=draft))
    plan = FromGguf(MnnTarget()).plan(Request(source, tmp_path / "out", type="Q8_0"))
    assert {tensor.written.name for tensor in plan.tensors} == {"Q8_0"}
    assert list(plan.files.values()) == [sum(tensor.n_bytes for tensor in plan.tensors)]
