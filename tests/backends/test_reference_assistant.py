"""Assistants of Gemma 4 on the oracle: against transformers, and against a token that the target has read too."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gemma4_checkpoints import assistant_outputs
from reference_head import ReferenceAssistant, open_reference_assistant
from tiny_assistants import write_tiny_assistant
from tiny_gemma4 import GEMMA4_VARIANTS, Gemma4Variant, write_tiny_gemma4

from edgeinfer.backends import reference_attention
from edgeinfer.backends.head_weights import read_head_beside
from edgeinfer.backends.reference import ReferenceBackend, ReferenceSession
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import attention_of, read_spec
from edgeinfer.models.gguf import ModelFile

WINDOW = 9
TEXT = np.random.default_rng(4).integers(0, 259, 40).astype(np.int32)


@pytest.fixture(autouse=True)
def exact_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values in float32, as those that this is compared with have them."""
    monkeypatch.setitem(reference_attention._CACHE_DTYPES, "f16", np.float32)


def opened(folder: Path, variant: Gemma4Variant, **options: Any) -> tuple[ReferenceSession, ReferenceAssistant, Path]:
    """A session of a target, an assistant that reads it, and the assistant's file."""
    path = write_tiny_gemma4(folder / "target.gguf", variant, window=WINDOW)
    of = write_tiny_assistant(folder / "assistant.gguf", path, tensor_type="F32", **options)
    with ModelFile.open(path) as model, ModelFile.open(of) as file:
        spec, backend = read_spec(model), ReferenceBackend()
        session = backend.load(model, spec, backend.plan(model, spec, LoadSettings(64)), Device(1)).session()
        return session, open_reference_assistant(file, read_head_beside(file, model, spec), model, session), of


@pytest.mark.parametrize("n", [1, 5, WINDOW, 40])
@pytest.mark.parametrize("clusters", [{}, {"n_clusters": 97, "n_used": 20}], ids=["whole", "clusters"])
@pytest.mark.parametrize("variant", GEMMA4_VARIANTS)
def test_drafts_equal_those_of_transformers(
    tmp_path: Path, variant: Gemma4Variant, clusters: dict[str, int], n: int
) -> None:
    session, assistant, path = opened(tmp_path, variant, **clusters)
    hidden = session.forward(TEXT[:n], hidden=True).hidden
    session.commit(range(n))
    assert hidden is not None
    keys_values = {}
    for layer in assistant.spec.decoder.layers:
        mixer = attention_of(layer)
        assert mixer.kv_of is not None
        first = 0 if mixer.window is None else max(0, n - (WINDOW - 1))  # the token's own position counts
        keys_values[mixer.window is not None] = tuple(each[first:n] for each in session._states[mixer.kv_of])
    table = session.model.weights_of("token_embd.weight").values * np.float32(session.spec.embedding_scale)
    token, feature = 7, hidden[0, -1]
    with ModelFile.open(path) as file:
        for _ in range(3):  # drafts, all of them at one position
            out = assistant.forward([token], feature[None])
            assert out.hidden is not None
            logits, nexts = assistant_outputs(file, np.concatenate([table[token], feature]), n, keys_values)  # type: ignore
            ids = np.arange(len(logits)) if out.tokens is None else out.tokens[0]
            scale = np.abs(logits).max()
            assert np.abs(out.logits[0] - logits[ids]).max() < 1e-4 * scale
            assert np.abs(out.hidden[0, 0] - nexts).max() < 1e-4 * np.abs(nexts).max()
            others = np.delete(logits, ids)
            assert len(others) == (0 if out.tokens is None else 291 - 60) and (others < logits[ids].min()).all()
            token, feature = int(ids[out.logits[0].argmax()]), out.hidden[0, 0]


def test_rows_see_what_is_committed_and_not_each_other(tmp_path: Path) -> None:
    session, assistant, _ = opened(tmp_path, "small")
    features = np.random.default_rng(1).standard_normal((4, 96)).astype(np.float32)
    session.forward(TEXT[:20])
    session.commit(range(20))
    together = assistant.forward(TEXT[:4], features, logits="all")
    alone = [assistant.forward(TEXT[i : i + 1], features[i : i + 1]) for i in range(4)]
    assert np.array_equal(together.logits, np.concatenate([each.logits for each in alone]))
    session.forward(TEXT[20:30])  # pending, and so not seen
    assert np.array_equal(assistant.forward(TEXT[:4], features, logits="all").logits, together.logits)
    session.commit(range(10))
    assert not np.array_equal(assistant.forward(TEXT[:4], features, logits="all").logits, together.logits)
