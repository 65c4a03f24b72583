"""EAGLE-3 heads of Hugging Face: as llama.cpp's converter writes them, and as their paper computes them.

eagle3_hashes.json has what the converter made of the same checkpoints; tests/support/eagle3_hashes.py writes it.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from converter_hashes import APART, described
from drafting import FixedCosts
from numpy.testing import assert_allclose, assert_array_equal
from reference_head import open_reference_head
from tiny_checkpoints import stored_pieces
from tiny_eagle3 import (
    CASES,
    N_DRAFTED,
    N_EMBD,
    N_HEADS,
    N_KV_HEADS,
    N_VOCAB,
    drafted_ids,
    weights,
    write_head,
    write_head_of_gguf,
)
from tiny_heads import write_tiny_eagle3, write_tiny_head
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer import cli
from edgeinfer.backends.head_weights import read_head_beside
from edgeinfer.backends.native import NativeBackend, load_head, plan_head
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.exporters.source import open_source
from edgeinfer.models import read_spec
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import ModelFile

pytestmark = pytest.mark.usefixtures("native")
THEIRS = json.loads((Path(__file__).parent / "eagle3_hashes.json").read_text())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return write_tiny_model(folder / "t.gguf", "llama", "F16", n_embd=N_EMBD, n_layers=6, n_vocab=N_VOCAB)


def run(source: Path, *arguments: str | Path, to: str = "gguf") -> Result:
    return CliRunner().invoke(cli.main, ["export", str(source), "--to", to, *map(str, arguments)])


@pytest.mark.parametrize("case", CASES)
def test_keys_and_tensors_are_those_of_the_converter(case: str, target: Path, tmp_path: Path) -> None:
    front = "model." if case == "official" else ""
    with open_source(write_head(tmp_path / "head", case, front=front), target) as ours:
        keys = {key: value for key, value in ours.metadata.items() if not key.startswith(APART)}
        found = {key: float(np.float32(value)) if isinstance(value, float) else value for key, value in keys.items()}
        sizes = {f"eagle3.attention.{kind}_length": N_EMBD // N_HEADS for kind in ("key", "value")}
        assert found == {**sizes, **THEIRS[case]["keys"]}  # those of speculators lack what follows from others
        tensors = {}
        for each in ours.tensors:
            data = b"".join(piece.tobytes() for piece in stored_pieces(each))
            tensors[each.name] = described(each.type.name, each.shape, data)
            if each.name == "rope_freqs.weight":  # theirs are computed in float32, ours are rounded once
                assert_allclose(each.rows(0, 1)[0], THEIRS[case]["factors"][each.name], rtol=1e-6)
                tensors[each.name] = THEIRS[case]["tensors"][each.name]
        assert tensors == THEIRS[case]["tensors"]
        with open_source(target) as beside:
            assert ours.metadata["tokenizer.ggml.tokens"] == beside.metadata["tokenizer.ggml.tokens"]


def test_an_exported_head_computes_what_the_paper_says(target: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    folder = write_head(tmp_path / "head", "official")
    assert run(folder, "--target", target, "-o", tmp_path / "h.gguf", "--no-check").exit_code == 0
    tokens = rng.integers(0, N_VOCAB, 12)
    rows = rng.standard_normal((11, 3 * N_EMBD)).astype(np.float32)
    with ModelFile.open(target) as model, ModelFile.open(tmp_path / "h.gguf") as file:
        of_target = read_spec(model)
        head = read_head_beside(file, model, of_target)
        assert_array_equal(head.draft_vocab, drafted_ids())
        assert head.taps == (1, 2, 2)
        embeddings = dequantize(
            model.tensors["token_embd.weight"].type, model.data("token_embd.weight"), (N_VOCAB, N_EMBD)
        )
        session = open_reference_head(file, head, model, of_target, 64, "float32")
        logits = session.forward(tokens[1:], session.combine(rows), logits="all").logits
    assert_allclose(logits, paper(weights(CASES["official"]), embeddings[tokens[1:]], rows), rtol=2e-3, atol=2e-3)


def paper(w: dict[str, np.ndarray], e: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Logits of a head of transformers' llama layer, whose halves of a head are rotated together."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * w[f"{name}.weight"]

    def heads(x: np.ndarray, name: str, n: int) -> np.ndarray:
        return (x @ w[f"midlayer.self_attn.{name}_proj.weight"].T).reshape(len(x), n, -1).swapaxes(0, 1)

    def rotated(x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        angles = np.arange(len(e))[:, None] * 10000.0 ** (-np.arange(half) / half)
        cos, sin = np.cos(angles), np.sin(angles)
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    f = rows.astype(np.float64) @ w["fc.weight"].T
    inputs = np.concatenate([norm(e, "midlayer.input_layernorm"), norm(f, "midlayer.hidden_norm")], axis=1)
    q, k = rotated(heads(inputs, "q", N_HEADS)), rotated(heads(inputs, "k", N_KV_HEADS))
    k, v = (np.repeat(each, N_HEADS // N_KV_HEADS, axis=0) for each in (k, heads(inputs, "v", N_KV_HEADS)))
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]) + np.triu(np.full((len(e), len(e)), -np.inf), 1)
    chances = np.exp(scores - scores.max(axis=-1, keepdims=True))
    chances /= chances.sum(axis=-1, keepdims=True)
    x = f + (chances @ v).swapaxes(0, 1).reshape(len(e), -1) @ w["midlayer.self_attn.o_proj.weight"].T
    h = norm(x, "midlayer.post_attention_layernorm")
    gate = h @ w["midlayer.mlp.gate_proj.weight"].T
    x = (
        x
        + (gate / (1 + np.exp(-gate)) * (h @ w["midlayer.mlp.up_proj.weight"].T)) @ w["midlayer.mlp.down_proj.weight"].T
    )
    return np.asarray(norm(x, "norm") @ w["lm_head.weight"].T)


def test_an_exported_head_drafts_and_the_text_is_that_of_plain_decoding(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "m.gguf", n_ctx_train=256)
    with edgeinfer.load(model, draft="none") as engine:
        engine.tokenizer.stop_ids = frozenset()
        plain = engine.generate("some text", max_tokens=60, temperature=0.0).tokens
        text = [*engine.tokenize("some text"), *plain]
    theirs = write_tiny_eagle3(tmp_path / "theirs.gguf", model, [text], tensor_type="F32")
    folder, out = write_head_of_gguf(tmp_path / "head", theirs), tmp_path / "h.gguf"
    result = run(folder, "--target", model, "--type", "Q8_0", "-o", out)
    assert result.exit_code == 0, result.output
    assert "% of its tokens are the target's, of the source's" in result.stderr
    with edgeinfer.load(model, draft=[str(out)]) as engine:
        engine.tokenizer.stop_ids = frozenset()
        engine.speculator.costs = FixedCosts()
        completion = engine.generate("some text", max_tokens=60, temperature=0.0)
    assert completion.tokens == plain
    assert completion.timings.speculation.dropped == {}
    assert completion.timings.speculation.by_drafter["head"].accepted > 25
    assert run(folder, "--target", model, "-o", tmp_path / "same.gguf").exit_code == 0
    with ModelFile.open(theirs) as before, ModelFile.open(tmp_path / "same.gguf") as after:  # there and back again
        assert before.tensors.keys() == after.tensors.keys()
        for name in before.tensors:
            assert before.data(name).tobytes() == after.data(name).tobytes(), name


def test_rows_whose_tokens_do_not_ascend_are_put_in_order(target: Path, tmp_path: Path) -> None:
    order = np.random.default_rng(1).permutation(N_DRAFTED)
    matrix = weights(CASES["official"])["lm_head.weight"]
    other = {
        "d2t": ("I64", drafted_ids()[order] - np.arange(N_DRAFTED)),
        "lm_head.weight": ("F32", matrix[order]),
    }
    with open_source(write_head(tmp_path / "head", "official", tensors=other), target) as source:
        assert list(source.notes) == ["the rows of the output matrix are put in the order of their tokens"]
        tensors = {each.name: each for each in source.tensors}
        assert_array_equal(tensors["output.weight"].rows(0, N_DRAFTED), matrix)
        assert_array_equal(tensors["d2t"].rows(0, 1)[0], drafted_ids())


def _d2t(values: np.ndarray) -> dict[str, Any]:
    return {"tensors": {"d2t": ("I64", values - np.arange(N_DRAFTED))}}


REFUSED = {
    "vocab_size is 300": {"config": {"vocab_size": 300}},
    "target_hidden_size is 32": {"config": {"target_hidden_size": 32}},
    "must have a number for each of the 80 rows": {"tensors": {"d2t": ("I64", np.zeros(79, np.int64))}},
    "must give ids in 0..290": _d2t(drafted_ids() + 200),
    "must give each token once": _d2t(np.zeros(N_DRAFTED, np.int64)),
    "t2d is of 290 tokens": {"tensors": {"t2d": ("BOOL", np.zeros(290, np.bool_))}},
    "must name the tokens of d2t": {"tensors": {"t2d": ("BOOL", np.zeros(N_VOCAB, np.bool_))}},
    "tensor d2t is missing, but there is t2d": {"tensors": {"d2t": None}},
    "lm_head.weight is missing": {"tensors": {"lm_head.weight": None}},
    "hidden_norm.weight is missing": {"tensors": {"midlayer.hidden_norm.weight": None}},
    "use_mtp_layernorm must be false": {"config": {"eagle_config": {"use_mtp_layernorm": True}}},
    "must be 3 layers in 1..6": {"config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 9]}},
    "is a head for a Qwen3ForCausalLM": {
        "config": {"speculators_config": {"verifier": {"architectures": ["Qwen3ForCausalLM"]}}}
    },
    "1 tensors have no place": {"tensors": {"midlayer.self_attn.q_proj.bias": ("F32", np.zeros(N_EMBD, np.float32))}},
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_head_that_is_not_for_the_target_is_refused(words: str, target: Path, tmp_path: Path) -> None:
    result = run(write_head(tmp_path / "head", "official", **REFUSED[words]), "--target", target, "-o", tmp_path / "h")
    assert result.exit_code != 0 and words in result.output, result.output
    assert not (tmp_path / "h").exists()


def test_a_head_needs_its_target_and_a_model_has_none(target: Path, tmp_path: Path) -> None:
    result = run(write_head(tmp_path / "head", "official"), "-o", tmp_path / "h.gguf")
    assert "is an EAGLE-3 draft head: name the model that it belongs to (--target)" in result.output
    result = run(target, "--target", target, "-o", tmp_path / "h.gguf")
    assert "is no draft head: --target goes with draft heads, and with draft models" in result.output
    head = write_tiny_eagle3(tmp_path / "h.gguf", target)
    result = run(head, "--target", target, "-o", tmp_path / "h.onnx", to="onnx")
    assert "an EAGLE-3 head is fed by what several layers of its target give" in result.output


@pytest.mark.parametrize("kind, tensor_type", [("head", "I2_S"), ("eagle3", "TQ2_0")])
def test_a_head_with_ternary_matrices_is_copied_and_computes_what_they_say(
    kind: str, tensor_type: str, tmp_path: Path
) -> None:
    model, path, out = tmp_path / "m.gguf", tmp_path / "h.gguf", tmp_path / "again.gguf"
    write_tiny_model(model, "llama", "F16", n_embd=256)
    write = write_tiny_head if kind == "head" else write_tiny_eagle3
    write(path, model, tensor_type=tensor_type, n_ff=256)
    result = run(path, "--target", model, "-o", out)
    assert result.exit_code == 0, result.output
    assert "check: KL 0.0000 nats a token against the source, 100.0% the same" in result.stderr
    with ModelFile.open(out) as file, ModelFile.open(model) as target:
        assert file.tensors["blk.0.ffn_up.weight"].type.name == tensor_type
        spec = read_head_beside(file, target, read_spec(target))
        rows = np.random.default_rng(0).standard_normal((8, spec.n_rows)).astype(np.float32)
        reference = open_reference_head(file, spec, target, read_spec(target), 64, "int8")
        backend, plan = NativeBackend(tuned=False), plan_head(file, spec, LoadSettings(64, n_batch=8, n_threads=1))
        opened = backend.load(
            target, read_spec(target), backend.plan(target, read_spec(target), LoadSettings(64)), Device(1)
        )
        head = load_head(file, spec, opened, plan, Device(1))
        found, expected = (
            session.forward(range(8), session.combine(rows), logits="all").logits
            for session in (head.session(), reference)
        )
    assert_allclose(found, expected, rtol=0.02, atol=0.02 * float(np.abs(expected).max()))


def test_a_head_of_our_own_is_written_again_in_another_type(target: Path, tmp_path: Path) -> None:
    own = write_tiny_head(tmp_path / "own.gguf", target, tensor_type="F16")
    result = run(own, "--target", target, "--type", "Q8_0", "-o", tmp_path / "again.gguf")
    assert result.exit_code == 0, result.output
    assert "check: KL 0.0" in result.stderr
    with ModelFile.open(own) as before, ModelFile.open(tmp_path / "again.gguf") as after:
        assert {i.type.name for n, i in after.tensors.items() if len(i.shape) == 2} == {"Q8_0"}
        kept = {key: value for key, value in after.metadata.items() if key.startswith("draft-head.")}
        assert kept == {key: value for key, value in before.metadata.items() if key.startswith("draft-head.")}
        assert before.data("draft_vocab").tobytes() == after.data("draft_vocab").tobytes()
    refused = run(own, "--target", target, "--type", "Q8_0", "--imatrix", "auto", "-o", tmp_path / "third.gguf")
    assert "--imatrix auto measures whole models, not draft heads" in refused.output
    assert "check: not run: --target names" in run(own, "--type", "Q8_0", "-o", tmp_path / "third.gguf").stderr
