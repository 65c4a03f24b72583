"""Checkpoints of Gemma 4 as GGUF: tensors that have no place in the file, spellings, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import gemma4_vocabulary
from click.testing import CliRunner
from tiny_checkpoints import CASES, FULL, N_EMBD, N_FF, WINDOW, Stored, to_gguf, write

from edgeinfer import cli, load
from edgeinfer.backends.native import NativeBackend
from edgeinfer.backends.native.packing.repacking import RepackableModel
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.exporters.auto.candidates import subjects_of, table_types
from edgeinfer.exporters.auto.trial import rounded_file
from edgeinfer.exporters.conversion import rows
from edgeinfer.exporters.huggingface import HuggingFaceSource, open_folder
from edgeinfer.exporters.source import open_source
from edgeinfer.exporters.virtual_file import model_file_of
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import GGMLType, ModelFile

Change = Callable[[Stored], Stored]


def converted(folder: Path, case: str, change: Change = dict, **config: Any) -> HuggingFaceSource:
    """With the tensors of the case, whatever config says."""
    write(folder, case, change=change)
    (folder / "config.json").write_text(json.dumps({**CASES[case].full_config(), **config}))
    return open_folder(folder, vocabulary=False)


def keys_of(source: HuggingFaceSource) -> dict[str, Any]:
    return {key.removeprefix("gemma4."): value for key, value in source.metadata.items() if key.startswith("gemma4.")}


def test_keys_say_the_kinds_of_layers(tmp_path: Path) -> None:
    keys = keys_of(converted(tmp_path, "gemma4_small"))
    assert keys["attention.sliding_window_pattern"] == [True, True, False] * 2
    assert (keys["attention.key_length"], keys["attention.key_length_swa"]) == (16, 8)
    assert keys["feed_forward_length"] == [N_FF] * 3 + [2 * N_FF] * 3 and keys["attention.shared_kv_layers"] == 3
    assert keys_of(converted(tmp_path, "gemma4"))["attention.head_count_kv"] == [2, 2, 1] * 2


def test_factors_stop_the_pairs_that_do_not_turn(tmp_path: Path) -> None:
    tensors = {each.name: each for each in converted(tmp_path, "gemma4").tensors}
    assert tensors["rope_freqs.weight"].rows(0, 1).reshape(-1).tolist() == [1.0] * 4 + [float(np.float32(1e30))] * 4


def test_keys_of_layers_that_read_those_of_others_are_left_out(tmp_path: Path) -> None:
    front = "model.layers.4.self_attn."
    extra = {f"{front}{name}_proj.weight": ("F32", np.ones((16, N_EMBD))) for name in "kv"}
    extra[f"{front}k_norm.weight"] = ("F32", np.ones(8))
    plain, found = (
        converted(tmp_path / name, "gemma4_small", lambda tensors, more=more: tensors | more)  # type: ignore[misc]
        for name, more in (("a", {}), ("b", extra))
    )
    assert [each.name for each in found.tensors] == [each.name for each in plain.tensors]


def test_gate_and_up_of_experts_stay_one_tensor(tmp_path: Path) -> None:
    source = converted(tmp_path, "gemma4_experts")
    tensors = {each.name: each for each in source.tensors}
    assert tensors["blk.0.ffn_gate_up_exps.weight"].shape == (4, 32, N_EMBD)
    assert tensors["blk.0.ffn_gate_inp.scale"].type == GGMLType.F32


def test_the_language_model_of_one_that_sees_is_the_same(tmp_path: Path) -> None:
    def renamed(tensors: Stored) -> Stored:
        inner = {key.replace("model.", "model.language_model.", 1): value for key, value in tensors.items()}
        return inner | {"model.vision_tower.patch.weight": ("F32", np.zeros((2, 2)))}

    plain = converted(tmp_path / "a", "gemma4_small")
    text = CASES["gemma4_small"].full_config()
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text}
    found = converted(tmp_path / "b", "gemma4_small", renamed, **outer)
    assert keys_of(found) == keys_of(plain)
    assert [(each.name, each.shape) for each in found.tensors] == [(each.name, each.shape) for each in plain.tensors]
    assert found.notes == ["the language model alone is converted: 1 tensors of other parts are left out"]


@pytest.mark.parametrize(
    "case, config, message",
    [
        ("gemma4", {"layer_types": [FULL] * 5 + [WINDOW]}, "layer_types must be full_attention in the last layer"),
        ("gemma4", {"enable_moe_block": True}, "enable_moe_block must be true where there are experts"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention must be absent or"),
        ("gemma4", {"num_kv_shared_layers": 6}, "num_kv_shared_layers must leave layers with keys of their own"),
        ("gemma4", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be absent in gemma4"),
        (
            "gemma4",
            {"global_head_dim": None, "per_layer_config": {"2": {"head_dim": 16}, "5": {"head_dim": 32}}},
            "per_layer_config must say the same of all layers of full_attention",
        ),
        (
            "gemma4",
            {"rope_parameters": {WINDOW: {"rope_type": "default"}, FULL: {"rope_type": "linear", "factor": 8.0}}},
            "rope_parameters must be proportional for full_attention: found linear",
        ),
    ],
)
def test_what_a_file_cannot_say_is_refused(case: str, config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        converted(tmp_path, case, **config)


def test_the_table_of_the_layers_gets_8_bits_unmeasured(tmp_path: Path) -> None:
    for case, expected in (("gemma4_small", {"per_layer_token_embd.weight": GGMLType.Q8_0}), ("gemma4", {})):
        source = converted(tmp_path / case, case)
        with model_file_of(source) as file:
            spec = read_spec(file)
        assert table_types(source, spec) == expected
        assert "per_layer_token_embd.weight" not in {each.tensor.name for each in subjects_of(source, spec)}


def test_the_table_of_the_layers_is_in_no_memory_while_formats_are_measured(tmp_path: Path) -> None:
    """Its rows are read where they lie, in the checkpoint, or in the file that another one is made of."""
    source, name = converted(tmp_path / "folder", "gemma4_small"), "per_layer_token_embd.weight"
    to_gguf(source, tmp_path / "m.gguf")
    tokens, wanted = [2, 30, 31, 29], [0, 3]
    with open_source(tmp_path / "m.gguf") as other, ModelFile.open(tmp_path / "m.gguf") as file:
        spec, plain = read_spec(file), RepackableModel(file, read_spec(file), 8, Device(1))
        expected, n_bytes = plain.read(tokens, wanted), RepackableModel.bytes_of(file, spec, 8, 1)
        plan = NativeBackend(tuned=False).plan(file, spec, LoadSettings(8)).use.weights
        for each in (source, other):
            with rounded_file(each, {}, {}, {}) as virtual, model_file_of(each) as whole:
                assert virtual.makes(name) and RepackableModel.bytes_of(virtual, spec, 8, 1) == n_bytes
                model = RepackableModel(virtual, spec, 8, Device(1))
                model.repack(name)
                assert np.array_equal(model.read(tokens, wanted), expected)
                assert (
                    NativeBackend(tuned=False).plan(whole, spec, LoadSettings(8)).use.weights <= plan + 64 * N_EMBD * 4
                )
        held = {name: GGMLType.Q8_0}
        with rounded_file(source, held, {}, {}) as virtual:  # what lies nowhere is held
            assert virtual.place(name) is None
            table = virtual.tensors[name]
            assert RepackableModel.bytes_of(virtual, spec, 8, 1) == n_bytes + table.n_bytes


@pytest.mark.parametrize("n", [64, 60])
def test_the_first_rows_of_a_tensor_stay_where_they_lie(n: int, tmp_path: Path) -> None:
    source = converted(tmp_path, "gemma4_small")
    table = next(each for each in source.tensors if each.name == "per_layer_token_embd.weight")
    first, later = rows.part(table, 0, n), rows.part(table, 2, n)
    assert first.place == table.place is not None and first.shape == (n, table.n_in) and later.place is None
    assert np.array_equal(later.rows(0, 4), first.rows(2, 6))
    place = first.place
    with open(place.path, "rb") as file:
        file.seek(place.offset + 3 * 4 * table.n_in)
        stored = np.frombuffer(file.read(4 * table.n_in), np.float32)
    assert np.array_equal(stored, table.rows(3, 4)[0])
    for changed in (rows.shifted(table, 1.0), rows.scaled(table, np.ones(64)), rows.transposed(table)):
        assert changed.place is None


def test_a_table_of_fewer_rows_than_tokens_is_refused(tmp_path: Path) -> None:
    name = "model.embed_tokens_per_layer.weight"
    with pytest.raises(UnsupportedModel, match=rf"{name} must have a row for each of 64 tokens: found \(60, 96\)"):
        converted(tmp_path, "gemma4_small", lambda tensors: tensors | {name: ("F32", np.zeros((60, 96)))})


@pytest.mark.parametrize("case", ["gemma4", "gemma4_small", "gemma4_experts"])
def test_a_checkpoint_becomes_a_quantised_file_that_runs(case: str, tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "model.gguf"
    folder.mkdir()
    n_vocab = gemma4_vocabulary(folder).get_vocab_size()
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
    write(folder, case, {"vocab_size": n_vocab, "vocab_size_per_layer_input": n_vocab, "bos_token_id": 2})
    result = CliRunner().invoke(cli.main, ["export", str(folder), "--to", "gguf", "--type", "q8_0", "-o", str(out)])
    assert result.exit_code == 0, result.output
    with ModelFile.open(out) as file:
        assert file.metadata["tokenizer.ggml.model"] == "gemma4"
        assert file.tensors["blk.0.attn_q.weight"].type == GGMLType.Q8_0
    to_gguf(open_folder(folder, vocabulary=False), tmp_path / "f32.gguf")
    logits = []
    for path in (out, tmp_path / "f32.gguf"):
        with ModelFile.open(path) as file:
            spec, backend = read_spec(file), NativeBackend(tuned=False)
            session = backend.load(file, spec, backend.plan(file, spec, LoadSettings(16)), Device(1)).session()
            logits.append(session.forward([2, 300, 301, 290]).logits[0])
    assert np.corrcoef(logits)[0, 1] > 0.8  # rounding to 8 bits shows in so small a model
    with load(out, n_ctx=64) as engine:
        assert engine.generate("the lazy", max_tokens=4).usage.prompt_tokens > 2
