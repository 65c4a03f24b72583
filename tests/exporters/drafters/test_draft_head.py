"""The file of a draft head: keys, tensors, and the target that it names."""

import hashlib
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.testing import assert_array_equal
from tiny_models import write_tiny_model

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.drafters.draft_head import HeadTypes, write_draft_head
from edgeinfer.models import read_spec
from edgeinfer.models.arrays import Strings
from edgeinfer.models.draft_head import fingerprint
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import GGMLType, ModelFile


def test_a_head_has_the_keys_and_tensors_that_it_was_given(tmp_path: Path, rng: np.random.Generator) -> None:
    sizes = {"embedding_length": 64, "block_count": 0, "rope.freq_base": 1e4}
    weights = {"gate.feature.weight": rng.standard_normal((64, 64), dtype=np.float32)}
    weights["blk.0.ffn_up.weight"] = rng.standard_normal((96, 64), dtype=np.float32)
    weights["gate.token_norm.weight"] = rng.standard_normal(64, dtype=np.float32)
    vocabulary = np.array([3, 17, 290], dtype=np.int32)
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", n_embd=64, tensor_type="Q8_0")) as target:
        given = sizes, weights, vocabulary, HeadTypes(GGMLType.Q4_0, GGMLType.Q8_0), (0, 1), (0.5, 0.25)
        write_draft_head(tmp_path / "h.gguf", target, read_spec(target), *given)
        digest = fingerprint(target)
        tokens = target.metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, Strings)
        norm = target.data("output_norm.weight").tobytes()
    assert digest == hashlib.sha256("\0".join(tokens).encode() + norm).hexdigest()
    with ModelFile.open(tmp_path / "h.gguf") as head:
        assert dict(head.metadata) == {
            "general.architecture": "draft-head",
            "general.type": "adapter",
            "draft-head.kind": "dgf",
            "draft-head.target.architecture": "llama",
            "draft-head.target.name": "tiny llama Q8_0",
            "draft-head.target.vocab_size": 291,
            "draft-head.target.fingerprint": digest,
            "draft-head.output_type": "Q4_0",
            "draft-head.embedding_length": 64,
            "draft-head.block_count": 0,
            "draft-head.rope.freq_base": 1e4,
            "draft-head.target_layers": [0, 1],
            "draft-head.matches": [0.5, 0.25],
        }
        types = {name: info.type.name for name, info in head.tensors.items()}
        assert types == {
            "gate.feature.weight": "Q8_0",
            "blk.0.ffn_up.weight": "Q4_0",
            "gate.token_norm.weight": "F32",
            "draft_vocab": "I32",
        }
        assert_array_equal(head.data("draft_vocab").view("<i4"), vocabulary)
        stored = dequantize(GGMLType.Q8_0, head.data("gate.feature.weight"), (64, 64))
        assert np.abs(stored - weights["gate.feature.weight"]).max() < 0.02
    names = {tensor.name: tuple(tensor.shape) for tensor in gguf.GGUFReader(tmp_path / "h.gguf").tensors}
    assert names == {
        "gate.feature.weight": (64, 64),
        "blk.0.ffn_up.weight": (64, 96),
        "gate.token_norm.weight": (64,),
        "draft_vocab": (3,),
    }


def test_models_that_differ_in_the_last_norm_or_the_vocabulary_have_other_fingerprints(tmp_path: Path) -> None:
    found = set()
    for number, options in enumerate(({}, {"seed": 1}, {"n_vocab": 300}, {"n_layers": 3})):
        with ModelFile.open(write_tiny_model(tmp_path / f"{number}.gguf", **options)) as file:
            found.add(fingerprint(file))
    assert len(found) == 3  # other layers alone are not seen


def test_a_target_without_tokens_is_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", metadata={"tokenizer.ggml.tokens": None})
    data = path.read_bytes().replace(b"output_norm.weight", b"output_morn.weight")
    path.write_bytes(data)
    with ModelFile.open(path) as file, pytest.raises(UnsupportedModel, match="no vocabulary or no output_norm"):
        fingerprint(file)
