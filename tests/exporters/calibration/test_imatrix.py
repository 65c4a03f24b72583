"""Importance matrices: the sums of the reference, in the files of llama.cpp, and used by name."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from llama_quantize import quantized
from numpy.testing import assert_allclose, assert_array_equal
from parts import is_there, missing
from recurrent_models import write_recurrent_model
from tiny_experts import write_tiny_experts
from tiny_gemma4 import GEMMA4_VARIANTS, write_tiny_gemma4
from tiny_latents import LATENT_KINDS, write_tiny_latents
from tiny_models import write_tiny_model

from edgeinfer import cli
from edgeinfer.backends.native import NativeBackend
from edgeinfer.backends.reference import ReferenceBackend, ReferenceModel
from edgeinfer.common import devices
from edgeinfer.common.errors import BudgetExceeded, ModelFileError
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.exporters.calibration import collect
from edgeinfer.exporters.calibration.collect import squares_bytes
from edgeinfer.exporters.calibration.imatrix import Imatrix, Squares, read_imatrix, write_imatrix
from edgeinfer.exporters.calibration.running import native_model, read_text
from edgeinfer.exporters.gguf.target import GgufTarget
from edgeinfer.exporters.request import Request
from edgeinfer.exporters.source import GgufSource
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

TEXTS = (list(range(3, 40)), [5, 8, 200])
HYBRIDS = (
    "qwen35",
    "qwen3next",
    "lfm2moe",
    "granitehybrid+experts",
    "nemotron_h",
    "nemotron_h_moe+latent",
    "falcon-h1",
)
LATENTS = [f"latents {kind}" for kind in LATENT_KINDS]
GEMMA4 = [f"gemma4 {kind}" for kind in GEMMA4_VARIANTS]
Found = dict[str, tuple[np.ndarray, np.ndarray]]


def models(folder: Path) -> dict[str, Path]:
    return {
        "qwen2": write_tiny_model(folder / "a.gguf", "qwen2", "F32"),
        "phi3": write_tiny_model(folder / "b.gguf", "phi3", "F32"),
        "qwen2moe": write_tiny_experts(folder / "c.gguf", "qwen2moe", "F32"),
        "fused": write_tiny_experts(folder / "d.gguf", "olmoe", "F32", fused=True),
        **{name: write_recurrent_model(folder / f"{name}.gguf", name, "F32") for name in HYBRIDS},
        **{f"latents {kind}": write_tiny_latents(folder / f"{kind}.gguf", kind, "F32") for kind in LATENT_KINDS},
        **{f"gemma4 {kind}": write_tiny_gemma4(folder / f"{kind}.gguf", kind, "F32") for kind in GEMMA4_VARIANTS},
    }


def native(path: Path, n_threads: int) -> Found:
    with ModelFile.open(path) as file, native_model(file, 64, n_threads) as model:
        model.record_inputs(True)
        for text in TEXTS:
            session = model.session(64)
            read_text(session, text)
            session.close()
        return model.input_squares()


def by_the_reference(path: Path, monkeypatch: pytest.MonkeyPatch) -> Found:
    """The same sums of what the products of the reference read."""
    sums: dict[str, np.ndarray] = {}
    counts: dict[str, np.ndarray] = {}
    linear, expert_linear = ReferenceModel.linear, ReferenceModel.expert_linear

    def add(model: ReferenceModel, ref: Any, expert: int, x: np.ndarray) -> None:
        name = ref if isinstance(ref, str) else ref.name
        is_of_head = name.endswith(("attn_k_b.weight", "attn_v_b.weight"))
        if is_of_head:
            expert = ref.first // (ref.last - ref.first)
        if getattr(ref, "first", 0) == 0 or is_of_head:  # the parts of other tensors read the same
            values = model._weights[name].values
            n_matrices = len(values) if values.ndim == 3 else 4 if is_of_head else 1
            sums.setdefault(name, np.zeros((n_matrices, x.shape[-1])))[expert] += (x.astype(np.float64) ** 2).sum(0)
            counts.setdefault(name, np.zeros(n_matrices, np.int64))[expert] += len(x)

    def recorded(self: ReferenceModel, matrix: Any, bias: Any, x: np.ndarray) -> np.ndarray:
        add(self, matrix, 0, x)
        return linear(self, matrix, bias, x)

    def expert_recorded(self: ReferenceModel, matrix: Any, expert: int, x: np.ndarray) -> np.ndarray:
        add(self, matrix, expert, x[None])
        return expert_linear(self, matrix, expert, x)

    monkeypatch.setattr(ReferenceModel, "linear", recorded)
    monkeypatch.setattr(ReferenceModel, "expert_linear", expert_recorded)
    backend = ReferenceBackend()
    with ModelFile.open(path) as file:
        spec = read_spec(file)
        model = backend.load(file, spec, backend.plan(file, spec, LoadSettings(64)), Device(1))
    for text in TEXTS:
        model.session(64).forward(text)
    return {name: (sums[name], counts[name]) for name in sums}


@pytest.mark.parametrize("name", ["qwen2", "phi3", "qwen2moe", "fused", *HYBRIDS, *GEMMA4, *LATENTS])
def test_the_sums_are_those_of_the_reference_with_any_number_of_threads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = models(tmp_path)[name]
    found, again = native(path, 1), native(path, 3)
    expected = by_the_reference(path, monkeypatch)
    expected = {name: squares for name, squares in expected.items() if name.startswith("blk.")}
    assert found.keys() == again.keys() >= expected.keys() - {"blk.0.ffn_gate_inp_shexp.weight"}
    assert any("ffn_down" in name for name in expected)
    for tensor, (sums, counts) in expected.items():
        assert_array_equal(found[tensor][0], again[tensor][0])
        assert_array_equal(found[tensor][1], counts)
        rtol = 1e-2 if name in GEMMA4 else 2e-3 if name in LATENTS else 2e-4  # scores that are not scaled; rounded rows
        assert_allclose(found[tensor][0], sums, rtol=rtol, atol=1e-5 * sums.max())
    fused = dict.fromkeys(("phi3", "qwen35", "qwen3next"), "attn_qkv")
    plain = {"lfm2moe": "shortconv.in_proj", "nemotron_h": "ffn_up", "nemotron_h_moe+latent": "ffn_latent_up"}
    read = {**fused, **plain, **dict.fromkeys(LATENTS, "attn_kv_a_mqa")}
    assert found[f"blk.1.{read.get(name, 'attn_q')}.weight"][1] == 40
    if name in LATENTS:
        sums, counts = found["blk.1.attn_v_b.weight"]
        assert counts.tolist() == [40] * 4 and len({tuple(row) for row in sums.tolist()}) == 4  # each head's own


def test_nothing_is_recorded_unless_it_is_asked_for(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "a.gguf", "llama", "Q4_0")
    with ModelFile.open(path) as file, native_model(file, 64, 1) as model:
        with pytest.raises(ValueError, match="nothing is recorded"):
            model.input_squares()
        model.record_inputs(True)
        logits = read_text(model.session(64), TEXTS[0])
        model.record_inputs(False)
        assert_array_equal(read_text(model.session(64), TEXTS[0]), logits)
        model.record_inputs(True)
        assert all(not counts.any() for _, counts in model.input_squares().values())


@pytest.mark.parametrize("name", ["qwen2", "phi3", "qwen2moe", "fused", "gpt-oss", *HYBRIDS, *LATENTS])
def test_the_sums_are_counted_before_a_model_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_experts(tmp_path / "e.gguf", name, "F32") if name == "gpt-oss" else models(tmp_path)[name]
    with ModelFile.open(path) as file, native_model(file, 64, 1) as model:
        model.record_inputs(True)
        found = [sums.nbytes for sums, _ in model.decoder().input_squares().values()]
        assert squares_bytes(model.spec) == sum(found) * 20 // 8
    with ModelFile.open(path) as file:
        spec, n_ctx = read_spec(file), collect.answer_context(file)
        needed = (
            NativeBackend(packed=False, tuned=False)
            .plan(file, spec, LoadSettings(n_ctx, n_batch=min(n_ctx, 128), n_threads=1))
            .use.total
        )
        monkeypatch.setattr(devices, "available_memory", lambda: needed + squares_bytes(spec) - 1)
        with native_model(file, n_ctx, 1):
            pass
        with pytest.raises(BudgetExceeded, match="running it needs"):
            collect.imatrix_of(GgufSource(file), None, 1)


def test_the_plan_of_an_export_counts_its_importance_matrix(tmp_path: Path) -> None:
    source, path = models(tmp_path)["qwen2moe"], tmp_path / "i.gguf"
    plain = GgufTarget().plan(Request(source, tmp_path / "o.gguf", "Q8_0")).peak_bytes
    sums = np.ones((8, 96), np.float32)
    write_imatrix(path, Imatrix({"blk.0.ffn_gate_exps.weight": Squares(sums, np.ones(8, np.float32))}))
    plan = GgufTarget().plan(Request(source, tmp_path / "o.gguf", "Q8_0", imatrix=path))
    assert plan.peak_bytes == plain + 2 * sums.nbytes + 8 * 4


def test_the_command_writes_a_file_that_others_read(tmp_path: Path) -> None:
    source = models(tmp_path)["qwen2moe"]
    (tmp_path / "text.txt").write_text("a text of some words, which is as good as any other\n" * 30)
    out = tmp_path / "i.gguf"
    arguments = ["imatrix", str(source), "--calibration", str(tmp_path / "text.txt"), "-o", str(out)]
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0, result.output
    reader = gguf.GGUFReader(out)
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.datasets"].contents() == ["text.txt"]
    assert reader.fields["imatrix.chunk_size"].contents() == 512
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    counts = tensors["blk.0.ffn_down_exps.weight.counts"]
    assert counts.shape == (8, 1) and tensors["blk.0.ffn_down_exps.weight.in_sum2"].shape == (8, 64)
    n_tokens = tensors["blk.0.attn_q.weight.counts"].item()
    assert counts.sum() == 3 * n_tokens and reader.fields["imatrix.chunk_count"].contents() == -(-n_tokens // 512)
    same = read_imatrix(out)
    assert_array_equal(same.of["blk.0.ffn_down_exps.weight"].sums, tensors["blk.0.ffn_down_exps.weight.in_sum2"])


def test_llama_cpp_writes_the_same_bytes_with_an_importance_matrix_of_ours(tmp_path: Path) -> None:
    if not is_there("llama"):
        missing("llama", "llama-cpp-python is not installed")
    source = write_tiny_experts(tmp_path / "a.gguf", "qwen3moe", "F16", n_embd=256, n_ff=256)
    out = tmp_path / "i.gguf"
    (tmp_path / "text.txt").write_text("a text of some words, which is as good as any other\n" * 30)
    arguments = ["imatrix", str(source), "--calibration", str(tmp_path / "text.txt"), "-o", str(out)]
    assert CliRunner().invoke(cli.main, arguments).exit_code == 0
    imatrix = read_imatrix(out)
    values = {name: imatrix.means(name, len(imatrix.of[name].counts)) for name in imatrix.of}
    theirs = quantized(source, tmp_path / "theirs.gguf", 15, values)
    arguments = ["export", str(source), "--to", "gguf", "--type", "Q4_K_M", "--no-check", "--imatrix", str(out)]
    for name, more in (("ours", arguments), ("without", arguments[:-2])):
        assert CliRunner().invoke(cli.main, [*more, "-o", str(tmp_path / f"{name}.gguf")]).exit_code == 0
    with ModelFile.open(theirs) as one, ModelFile.open(tmp_path / "ours.gguf") as other:
        for name, info in one.tensors.items():
            assert info.type == other.tensors[name].type
            assert_array_equal(one.data(name), other.data(name), name)
        keys = {key: value for key, value in other.metadata.items() if key.startswith("quantize.imatrix.")}
        assert keys == {
            "quantize.imatrix.file": "i.gguf",
            "quantize.imatrix.dataset": "text.txt",
            "quantize.imatrix.entries_count": len(imatrix.of),
            "quantize.imatrix.chunks_count": imatrix.n_chunks,
        }
        with ModelFile.open(tmp_path / "without.gguf") as plain:
            for name in ("blk.0.ffn_up_exps.weight", "blk.1.attn_output.weight"):
                assert (other.data(name) != plain.data(name)).any()


def test_the_old_form_is_read_with_its_experts(tmp_path: Path) -> None:
    means = np.arange(1, 13, dtype=np.float32)
    entry = struct.pack("<i", 5) + b"a.exp" + struct.pack("<ii", 4, 12) + (4 * means).astype("<f4").tobytes()
    path = tmp_path / "old.dat"
    path.write_bytes(struct.pack("<i", 1) + entry + struct.pack("<ii", 7, 4) + b"text")
    found = read_imatrix(path)
    assert_array_equal(found.means("a.exp", 3), means.reshape(3, 4))
    assert (found.n_chunks, list(found.datasets), found.means("b")) == (7, ["text"], None)
    for damaged in (entry[:-1], struct.pack("<i", 1) + entry[:-1], struct.pack("<i", 0), b""):
        path.write_bytes(damaged)
        with pytest.raises(ModelFileError, match="importance matrix"):
            read_imatrix(path)


def test_a_matrix_that_saw_no_token_has_no_preference_and_bad_numbers_are_refused(tmp_path: Path) -> None:
    sums = np.array([[4, 8], [0, 0]], dtype=np.float32)
    path = tmp_path / "i.gguf"
    write_imatrix(path, Imatrix({"a": Squares(sums, np.array([4, 0], np.float32))}, ["x"], 2, 512))
    assert_array_equal(read_imatrix(path).means("a", 2), [[1, 2], [1, 1]])
    write_imatrix(path, Imatrix({"a": Squares(-sums, np.array([4, 0], np.float32))}))
    with pytest.raises(ModelFileError, match="a has sums that are negative or not finite"):
        read_imatrix(path)
    with pytest.raises(ModelFileError, match="general.type must be imatrix: found None"):
        read_imatrix(write_tiny_model(tmp_path / "m.gguf"))


def test_matrices_of_heads_are_rounded_each_with_what_it_reads(tmp_path: Path) -> None:
    source, out = write_tiny_latents(tmp_path / "a.gguf", "lite", "Q8_0"), tmp_path / "i.gguf"
    (tmp_path / "text.txt").write_text("a text of some words, which is as good as any other\n" * 10)
    arguments = ["imatrix", str(source), "--calibration", str(tmp_path / "text.txt"), "-o", str(out)]
    assert CliRunner().invoke(cli.main, arguments).exit_code == 0
    assert read_imatrix(out).of["blk.1.attn_k_b.weight"].sums.shape == (4, 32)
    arguments = ["export", str(source), "--to", "gguf", "--type", "Q4_0", "--no-check", "--imatrix", str(out)]
    found = []
    for name, more in (("with", arguments), ("without", arguments[:-2])):
        result = CliRunner().invoke(cli.main, [*more, "-o", str(tmp_path / f"{name}.gguf")])
        assert result.exit_code == 0, result.output
        with ModelFile.open(tmp_path / f"{name}.gguf") as file:
            found.append(file.data("blk.1.attn_k_b.weight").copy())
    assert found[0].shape == found[1].shape and (found[0] != found[1]).any()
