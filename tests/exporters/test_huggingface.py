"""Folders of Hugging Face as GGUF: each trap of the formats, and what is refused as it would be written wrongly."""

import json
import random
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import byte_level
from numpy.testing import assert_allclose, assert_array_equal
from tiny_checkpoints import CASES, GATED, HEAD_DIM, N_EMBD, N_FF, Change, Stored, write

from edgeinfer.common.errors import ModelFileError, UnsupportedModel
from edgeinfer.exporters.checkpoint import Checkpoint
from edgeinfer.exporters.huggingface import HuggingFaceSource, open_folder
from edgeinfer.exporters.source import SourceTensor
from edgeinfer.models.gguf import GGMLType

WINDOW, FULL = "sliding_attention", "full_attention"


class Made:
    """The source of a changed checkpoint, with its tensors by name and what was in the checkpoint."""

    def __init__(self, folder: Path, case: str, config: dict[str, Any] | None, change: Change) -> None:
        self.stored: Stored = {}

        def kept(tensors: Stored) -> Stored:
            self.stored = change(tensors)
            return self.stored

        write(folder, case, config, kept)
        self.source: HuggingFaceSource = open_folder(folder, vocabulary=False)
        self.tensors: dict[str, SourceTensor] = {each.name: each for each in self.source.tensors}
        of_model = ((key.partition("."), value) for key, value in self.source.metadata.items())
        self.keys = {key: value for (front, _, key), value in of_model if front != "general"}

    def ours(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        return tensor.rows(0, tensor.n_rows).reshape(tensor.shape)

    def theirs(self, name: str, layer: int = 0) -> np.ndarray:
        return self.stored[f"model.layers.{layer}.{name}"][1].astype(np.float32)


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def made(case: str, change: Change = dict, **config: Any) -> Made:
        return Made(Path(tempfile.mkdtemp(dir=tmp_path)), case, config, change)

    return made


# ---- Rows ------------------------------------------------------------------------------------------------------------


def test_rows_of_queries_and_keys_are_permuted_in_llama_with_their_biases(make: Any) -> None:
    made, order = make("llama_with_biases"), [0, 4, 1, 5, 2, 6, 3, 7]
    for name, n_heads in (("q", 4), ("k", 2)):
        rows = np.concatenate([HEAD_DIM * head + np.array(order) for head in range(n_heads)])
        assert_array_equal(made.ours(f"blk.0.attn_{name}.weight"), made.theirs(f"self_attn.{name}_proj.weight")[rows])
        assert_array_equal(made.ours(f"blk.0.attn_{name}.bias"), made.theirs(f"self_attn.{name}_proj.bias")[rows])
    assert_array_equal(made.ours("blk.0.attn_v.weight"), made.theirs("self_attn.v_proj.weight"))


@pytest.mark.parametrize("case", ["qwen2", "qwen3moe", "gemma3", "olmo2", "gpt_oss", "olmoe", "glm4", "ernie4_5_moe"])
def test_rows_of_queries_are_as_they_are_elsewhere(case: str, make: Any) -> None:
    made = make(case)
    assert_array_equal(made.ours("blk.0.attn_q.weight"), made.theirs("self_attn.q_proj.weight"))


@pytest.mark.parametrize("first, last", [(0, 32), (5, 6), (7, 19), (30, 32), (4, 4)])
def test_some_rows_are_those_of_the_whole_with_their_bytes(first: int, last: int, make: Any) -> None:
    tensor = make("llama").tensors["blk.1.attn_q.weight"]
    assert_array_equal(tensor.rows(first, last), tensor.rows(0, 32)[first:last])
    assert_array_equal(tensor.stored(first, last), tensor.rows(first, last).view(np.uint8).reshape(-1))


def test_floats_of_16_bits_are_kept_and_small_tensors_become_f32(make: Any) -> None:
    def as_bf16(tensors: Stored) -> Stored:
        bits = {name: values.astype(np.float32).view(np.uint32) >> 16 for name, (_, values) in tensors.items()}
        return {name: ("BF16", value.astype(np.uint16)) for name, value in bits.items()}

    made = make("mixtral", as_bf16)
    kinds = {name.removeprefix("blk.0."): tensor.type for name, tensor in made.tensors.items()}
    assert {kinds[name] for name in ("attn_norm.weight", "ffn_gate_inp.weight", "output_norm.weight")} == {GGMLType.F32}
    assert {kinds[name] for name in ("attn_q.weight", "ffn_down_exps.weight", "token_embd.weight")} == {GGMLType.BF16}
    tensor, bits = made.tensors["blk.0.attn_q.weight"], made.stored["model.layers.0.self_attn.q_proj.weight"][1]
    assert_array_equal(tensor.stored(1, 2).view(np.uint16), bits[4])
    assert_array_equal(tensor.rows(1, 2)[0], (bits[4].astype(np.uint32) << 16).view(np.float32))


def test_quantised_weights_are_permuted_as_floats_and_their_scales_given_back(make: Any) -> None:
    name = "self_attn.q_proj.weight"
    bytes_of = np.random.default_rng(0).integers(0, 120, (32, N_EMBD)).astype(np.uint8)

    def as_fp8(tensors: Stored) -> Stored:
        found = dict(tensors)
        for layer in range(2):
            found[f"model.layers.{layer}.{name}"] = ("F8_E4M3", bytes_of)
            found[f"model.layers.{layer}.{name}_scale_inv"] = ("F32", np.full((1, 1), 0.5))
        return found

    made = make("llama", as_fp8, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    tensor = made.tensors["blk.0.attn_q.weight"]
    assert tensor.stored is None and "quantised by fp8" in made.source.notes[0]
    plain = Checkpoint.open(made.source.path).floats(f"model.layers.0.{name}")
    assert_array_equal(made.ours(tensor.name)[:8], plain[[0, 4, 1, 5, 2, 6, 3, 7]])
    made.source.release(tensor.name)
    assert_array_equal(made.ours(tensor.name)[:8], plain[[0, 4, 1, 5, 2, 6, 3, 7]])


@pytest.mark.parametrize("dtype", ["F64", "F8_E4M3", "F8_E5M2"])
def test_wide_and_narrow_floats_are_read(dtype: str, make: Any) -> None:
    """float8 without scales, as it is stored by who casts a model; NaN is left out."""

    def cast(tensors: Stored) -> Stored:
        if dtype == "F64":
            return {name: (dtype, values) for name, (_, values) in tensors.items()}
        rng = np.random.default_rng(1)
        return {name: (dtype, rng.integers(0, 0x7C, values.shape)) for name, (_, values) in tensors.items()}

    made = make("qwen3", cast)
    stored = Checkpoint.open(made.source.path).floats("model.layers.0.self_attn.q_proj.weight")
    assert_array_equal(made.ours("blk.0.attn_q.weight"), stored)
    if dtype == "F64":
        assert_array_equal(stored, make("qwen3").ours("blk.0.attn_q.weight"))
    else:
        torch_says = {"F8_E4M3": {0x38: 1.0, 0x01: 2**-9}, "F8_E5M2": {0x3C: 1.0, 0x01: 2**-16}}[dtype]
        codes = made.stored["model.layers.0.self_attn.q_proj.weight"][1]
        for code, value in torch_says.items():
            assert (stored[codes == code] == value).all() and (codes == code).any()


def test_other_types_are_refused_with_those_that_are_read(make: Any) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    words = f"{name} must be F32, F16, BF16, F64 or float8 .F8_E4M3, F8_E5M2.: found I32"
    with pytest.raises(ModelFileError, match=words):
        make("qwen3", lambda tensors: {**tensors, name: ("I32", tensors[name][1])})


# ---- Norms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case, shift", [("gemma2", 1), ("gemma3", 1), ("qwen3", 0), ("olmo2", 0)])
def test_gemma_adds_1_to_all_its_norms(case: str, shift: int, make: Any) -> None:
    made = make(case)
    norms = {"post_attention_layernorm.weight": "post_attention_norm.weight" if case != "qwen3" else "ffn_norm.weight"}
    if case != "gemma2":
        norms["self_attn.q_norm.weight"] = "attn_q_norm.weight"
    for theirs, ours in norms.items():
        assert_array_equal(made.ours(f"blk.1.{ours}"), made.theirs(theirs, 1) + np.float32(shift))
    assert_array_equal(made.ours("output_norm.weight"), made.stored["model.norm.weight"][1].astype(np.float32) + shift)


# ---- The output matrix -----------------------------------------------------------------------------------------------


def with_output(tensors: Stored, shift: float = 0.0) -> Stored:
    dtype, values = tensors["model.embed_tokens.weight"]
    return {**tensors, "lm_head.weight": (dtype, values + shift)}


def test_an_adapter_beside_the_model_is_said_to_be_left_out(tmp_path: Path) -> None:
    write(tmp_path, "qwen3")
    (tmp_path / "adapter_config.json").write_text("{}")
    notes = open_folder(tmp_path, vocabulary=False).notes
    assert notes == ["adapter_config.json is of an adapter (PEFT) beside the model, which is left out: merge it first "
                     "to have it"]  # fmt: skip


def test_a_saved_copy_of_tied_embeddings_is_dropped(make: Any) -> None:
    for case in ("smollm3", "gemma2"):
        made = make(case, with_output)
        assert "output.weight" not in made.tensors and made.source.notes == []


def test_an_output_matrix_that_differs_from_tied_embeddings_is_kept_and_said(make: Any) -> None:
    made = make("smollm3", lambda tensors: with_output(tensors, 0.5))
    assert "output.weight" in made.tensors and "lm_head.weight differs" in made.source.notes[0]
    with pytest.raises(ModelFileError, match=r"lm_head.weight must equal model.embed_tokens.weight in gemma2"):
        make("gemma2", lambda tensors: with_output(tensors, 0.5))


def test_tied_embeddings_are_doubled_where_gguf_needs_an_output_matrix(make: Any) -> None:
    made = make("olmo2", tie_word_embeddings=True)
    assert_array_equal(made.ours("output.weight"), made.ours("token_embd.weight"))
    assert "copy of the embeddings" in made.source.notes[0]


def as_output_alone(tensors: Stored, front: str = "") -> Stored:
    """As tied checkpoints that have the one matrix under the name of the output. front: of all names."""
    tensors = {**without(tensors, "model.embed_tokens.weight"), "lm_head.weight": tensors["model.embed_tokens.weight"]}
    return {front + name.removeprefix("model." if front else ""): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("front", ["", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("case", ["qwen2", "gemma2", "olmo2", "smollm3"])
def test_embeddings_that_are_stored_as_the_output_matrix_alone_are_used(case: str, front: str, make: Any) -> None:
    plain = make(case, tie_word_embeddings=True)
    made = make(case, lambda tensors: as_output_alone(tensors, front), tie_word_embeddings=True)
    assert made.tensors.keys() == plain.tensors.keys() and made.source.notes == []
    for name in plain.tensors:
        assert_array_equal(made.ours(name), plain.ours(name))


def test_an_output_matrix_alone_is_no_embeddings_unless_they_are_tied(make: Any) -> None:
    with pytest.raises(ModelFileError, match=r"embed_tokens.weight is missing, and lm_head.weight stands for it only"):
        make("llama", lambda tensors: without(tensors, "model.embed_tokens.weight"))
    with pytest.raises(ModelFileError, match=r"embed_tokens.weight is missing$"):
        make("gemma2", lambda tensors: without(tensors, "model.embed_tokens.weight"))


def test_a_missing_output_matrix_is_refused_unless_embeddings_are_tied(make: Any) -> None:
    with pytest.raises(ModelFileError, match="lm_head.weight is missing, and config.json says tie_word_embeddings"):
        make("llama", lambda tensors: without(tensors, "lm_head.weight"))


def without(tensors: Stored, *names: str) -> Stored:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


# ---- Rotation --------------------------------------------------------------------------------------------------------


def test_both_spellings_of_the_rotation_mean_the_same(make: Any) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 16}
    new = make("qwen2", rope_parameters={"rope_type": "yarn", "rope_theta": 1000.0, **scaling}).keys
    old = make("qwen2", rope_parameters=None, rope_theta=1000.0, rope_scaling={"type": "yarn", **scaling}).keys
    assert new == old
    assert (old["rope.scaling.type"], old["rope.scaling.factor"], old["rope.freq_base"]) == ("yarn", 4.0, 1000.0)
    assert old["rope.scaling.original_context_length"] == 16


def test_all_of_yarn_is_written(make: Any) -> None:
    more = {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.1386294, "extrapolation_factor": 1.0}
    keys = make("olmo3", rope_parameters={
        FULL: {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, **more}, WINDOW: {"rope_theta": 1000.0},
    }, original_max_position_embeddings=16).keys  # fmt: skip
    names = {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_attn_factor": 1.1386294, "yarn_ext_factor": 1.0}
    assert {key: keys[f"rope.scaling.{key}"] for key in names} == names
    assert keys["rope.scaling.original_context_length"] == 16 and keys["rope.freq_base_swa"] == 1000.0


def test_factors_of_llama_3_by_hand(make: Any) -> None:
    rope = {"rope_theta": 10000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 100}
    # Waves of 6.28, 62.8, 628 and 6283 tokens: below 100 / 4, between, and two above 100 / 1.
    share = (100 / (2 * np.pi * 10) - 1) / 3
    made = make("llama", rope_parameters=rope)
    assert_allclose(made.ours("rope_freqs.weight"), [1, 1 / ((1 - share) / 8 + share), 8, 8], rtol=1e-6)


def test_longrope_has_both_sets_of_factors_and_its_magnitude(make: Any) -> None:
    made = make("phi3")
    assert_allclose(made.ours("rope_factors_long.weight"), [1, 2, 3, 4])
    assert_allclose(made.ours("rope_factors_short.weight"), np.float32([1, 1.1, 1.2, 1.3]))
    assert made.keys["rope.scaling.attn_factor"] == pytest.approx((1 + np.log(2) / np.log(32)) ** 0.5)
    assert made.keys["attention.sliding_window"] == 0
    old = CASES["phi3"].config["rope_parameters"] | {"type": "su", "rope_type": None, "rope_theta": None}
    assert make("phi3", rope_parameters=None, rope_theta=1000.0, rope_scaling=old).keys == made.keys
    with pytest.raises(ModelFileError, match="short_factor must be a list of 4 numbers"):
        make("phi3", rope_parameters=CASES["phi3"].config["rope_parameters"] | {"short_factor": [1.0]})


def test_layers_with_windows_have_their_own_base_in_gemma_3(make: Any) -> None:
    new = make("gemma3").keys
    assert (new["rope.freq_base"], new["rope.freq_base_swa"], new["rope.scaling.factor"]) == (1e5, 1e3, 8.0)
    old = make("gemma3", rope_parameters=None, rope_theta=1e5, rope_local_base_freq=1e3,
               rope_scaling={"rope_type": "linear", "factor": 8.0}).keys  # fmt: skip
    assert old == new
    usual = make("gemma3", rope_parameters=None).keys
    assert (usual["rope.freq_base"], usual["rope.freq_base_swa"]) == (1e6, 1e4)


@pytest.mark.parametrize(
    "case, rope, message",
    [
        ("llama", {"rope_type": "proportional"}, "rope_type must be one of default, dynamic, linear, llama3, yarn"),
        ("gemma2", {"rope_type": "llama3", "factor": 2.0}, "rope_type must be one of .* in gemma2: found llama3"),
        ("llama", {"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}, "mrope_section is not known with"),
        ("llama", {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0}, "beta_fast must be 32"),
        ("qwen2", {"rope_type": "yarn", "factor": 2.0, "mscale_all_dim": 0.7}, "mscale_all_dim cannot be written"),
        ("llama", {"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ("llama", {"rope_type": "yarn", "factor": 2.0, "attention_factor": 3.0}, "yarn_attn_factor must be 1 or YaRN"),
    ],
)
def test_a_rotation_that_gguf_cannot_say_is_refused(case: str, rope: dict[str, Any], message: str, make: Any) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        make(case, rope_parameters={"rope_theta": 1000.0, **rope})


# ---- Windows ---------------------------------------------------------------------------------------------------------


def test_a_rotation_that_changes_after_the_context_is_left_out_and_said(make: Any) -> None:
    made = make("llama", rope_parameters={"rope_theta": 1000.0, "rope_type": "dynamic", "factor": 2.0})
    assert made.source.notes == ["rope_type dynamic changes the rotation after 64 tokens only, and is left out"]
    assert not any("scaling" in key for key in made.keys)


@pytest.mark.parametrize("case", ["gpt_oss", "qwen2"])
def test_a_ramp_of_yarn_between_pairs_has_a_key_of_its_own(case: str, make: Any) -> None:
    yarn = CASES[case].config["rope_parameters"]
    made = make(case, rope_parameters=yarn | {"truncate": False})
    assert made.keys["rope.scaling.yarn_truncate"] is False
    assert "llama.cpp has no key for it" in made.source.notes[0]
    whole = make(case, rope_parameters=yarn | {"truncate": True})
    assert "rope.scaling.yarn_truncate" not in whole.keys and whole.source.notes == []


def test_a_gpt_oss_that_says_nothing_of_its_rotation_has_that_of_transformers(make: Any) -> None:
    for rope in ({"rope_parameters": None}, {"rope_parameters": None, "rope_scaling": None}):
        keys = make("gpt_oss", **rope).keys
        assert (keys["rope.scaling.factor"], keys["rope.scaling.original_context_length"]) == (32.0, 4096)
        assert keys["rope.freq_base"] == 150000.0 and keys["rope.scaling.yarn_truncate"] is False
    old = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
    keys = make("gpt_oss", rope_parameters=None, rope_scaling=old).keys
    assert keys["rope.scaling.factor"] == 2.0 and "rope.scaling.yarn_truncate" not in keys


def test_a_window_that_gguf_cannot_say_shortens_the_context(make: Any) -> None:
    made = make("mistral", sliding_window=24)
    assert made.keys["context_length"] == 24 and "its context is 24 tokens, not 64" in made.source.notes[0]
    assert make("mistral", sliding_window=64).keys["context_length"] == 64
    assert make("mistral", sliding_window=None).keys["context_length"] == 64


def test_windows_of_qwen_are_refused_where_they_cut_something_off(make: Any) -> None:
    with pytest.raises(UnsupportedModel, match="sliding_window must be off, qwen2 files have none in GGUF: found 8"):
        make("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(UnsupportedModel, match="sliding_window must be off"):
        make("qwen3", layer_types=[FULL, WINDOW], sliding_window=8)
    make("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2)
    make("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=0)


@pytest.mark.parametrize(
    "case, config, message",
    [
        ("gemma2", {"layer_types": [FULL, WINDOW]}, "layer_types must be sliding_attention in layer 0 for gemma2"),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 4}, "sliding_window_pattern must be 6 for gemma3"),
        ("gpt_oss", {"layer_types": [FULL, FULL]}, "layer_types must be sliding_attention in layer 0 for gpt-oss"),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, "no_rope_layers must be 0 in every fourth layer"),
        ("exaone4", {"layer_types": [WINDOW, FULL], "sliding_window": 8}, "must be set with 64 layers only"),
        ("olmo3", {"layer_types": ["chunked_attention"] * 4}, "layer_types must be sliding_attention or full"),
    ],
)
def test_other_layers_than_gguf_has_are_refused(case: str, config: dict[str, Any], message: str, make: Any) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        make(case, **config)


def test_olmo_3_has_windows_in_three_of_four_layers_by_default(make: Any) -> None:
    assert make("olmo3", layer_types=None).keys["attention.sliding_window_pattern"] == [True, True, True, False]


# ---- Experts ---------------------------------------------------------------------------------------------------------


def test_experts_are_stacked_by_number_and_joined_matrices_mean_the_same(make: Any) -> None:
    n, n_ff = 12, 16
    rng = np.random.default_rng(0)
    shapes = {"gate_proj": (n_ff, N_EMBD), "up_proj": (n_ff, N_EMBD), "down_proj": (N_EMBD, n_ff)}
    each = {name: rng.standard_normal((n, *shape)).astype(np.float32) for name, shape in shapes.items()}

    def many(tensors: Stored, joined: bool = False) -> Stored:
        found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
        for layer in range(2):
            module = f"model.layers.{layer}.mlp"
            found[f"{module}.gate.weight"] = ("F32", rng.standard_normal((n, N_EMBD)))
            if joined:
                both = np.concatenate([each["gate_proj"], each["up_proj"]], axis=1)
                found |= {f"{module}.experts.gate_up_proj": ("F32", both)}
                found |= {f"{module}.experts.down_proj": ("F32", each["down_proj"])}
            else:
                found |= {f"{module}.experts.{i}.{name}.weight": ("F32", each[name][i])
                          for i in sorted(range(n), key=str) for name in GATED}  # fmt: skip
        return found

    for joined in (False, True):
        made = make("qwen3moe", lambda tensors, joined=joined: many(tensors, joined), num_experts=n)
        for role, name in zip(("gate", "up", "down"), GATED, strict=True):
            tensor = made.tensors[f"blk.1.ffn_{role}_exps.weight"]
            assert tensor.shape == (n, *shapes[name])
            assert_array_equal(made.ours(tensor.name), each[name])
            assert_array_equal(tensor.rows(9, 50), each[name].reshape(-1, each[name].shape[2])[9:50])


def test_gate_is_above_up_in_granite_and_between_its_rows_in_gpt_oss(make: Any) -> None:
    made = make("granitemoe")
    both = made.theirs("block_sparse_moe.input_linear.weight")
    assert_array_equal(made.ours("blk.0.ffn_gate_exps.weight"), both[:, :N_FF])
    assert_array_equal(made.ours("blk.0.ffn_up_exps.weight"), both[:, N_FF:])
    made = make("gpt_oss")
    both, biases = made.theirs("mlp.experts.gate_up_proj"), made.theirs("mlp.experts.gate_up_proj_bias")
    assert_array_equal(made.ours("blk.0.ffn_gate_exps.weight"), both[:, :, ::2].swapaxes(1, 2))
    assert_array_equal(made.ours("blk.0.ffn_up_exps.weight"), both[:, :, 1::2].swapaxes(1, 2))
    assert_array_equal(made.tensors["blk.0.ffn_up_exps.weight"].rows(40, 61), made.ours("blk.0.ffn_up_exps.weight")
                       .reshape(-1, N_EMBD)[40:61])  # fmt: skip
    assert_array_equal(made.ours("blk.0.ffn_up_exps.bias"), biases[:, 1::2])


def test_a_block_of_mxfp4_by_hand(make: Any) -> None:
    made = make("gpt_oss_mxfp4")
    blocks, scales = (made.theirs(f"mlp.experts.gate_up_proj_{kind}").astype(np.uint8) for kind in ("blocks", "scales"))
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    row = blocks[2, 2 * 5 + 1, 0]  # expert 2, row 5 of up
    numbers = np.stack([codes[row & 15], codes[row >> 4]], axis=1).reshape(-1)
    tensor = made.tensors["blk.0.ffn_up_exps.weight"]
    assert tensor.type == GGMLType.MXFP4
    assert_array_equal(made.ours(tensor.name)[2, 5], numbers * 2.0 ** (float(scales[2, 11, 0]) - 127))
    at = 2 * 64 + 5
    nibbles = np.stack([row & 15, row >> 4], axis=1).reshape(-1)
    assert tensor.stored(at, at + 1).tolist() == [scales[2, 11, 0], *(nibbles[:16] | nibbles[16:] << 4)]


def test_weights_of_experts_that_a_qwen3moe_file_cannot_say_are_refused(make: Any) -> None:
    with pytest.raises(UnsupportedModel, match="norm_topk_prob must be true: found false. A qwen3moe file cannot say"):
        make("qwen3moe", norm_topk_prob=False)
    with pytest.raises(UnsupportedModel, match="norm_topk_prob must be true: found none, which means false"):
        make("qwen3moe", norm_topk_prob=None)
    for case in ("qwen2moe", "olmoe"):
        with pytest.raises(UnsupportedModel, match="norm_topk_prob must be absent or false"):
            make(case, norm_topk_prob=True)


def test_layers_that_draft_are_left_out_and_said(make: Any) -> None:
    more = {"model.layers.2.eh_proj.weight": (32, 64), "model.layers.2.mlp.gate.weight": (4, 32)}
    added = {name: ("F32", np.zeros(shape)) for name, shape in more.items()}
    made = make("glm4moe", lambda tensors: tensors | added, num_nextn_predict_layers=1)
    assert "(MTP) are left out: 2 tensors" in made.source.notes[0] and made.keys["block_count"] == 2
    with pytest.raises(UnsupportedModel, match="2 tensors have no place in a glm4moe model, first model.layers.2.eh_"):
        make("glm4moe", lambda tensors: tensors | added, num_nextn_predict_layers=0)
    added = {"model.mtp_block.0.mlp.up_proj.weight": ("F32", np.zeros((2, 2)))}
    assert "(MTP)" in make("ernie4_5_moe", lambda tensors: tensors | added).source.notes[0]


# ---- Names and keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("front", ["", "language_model.model.", "model.language_model."])
def test_names_with_other_fronts_are_found(front: str, make: Any) -> None:
    plain = make("gemma3")

    def renamed(tensors: Stored) -> Stored:
        vision = {"vision_tower.patch.weight": ("F32", np.zeros((2, 2)))} if front else {}
        return vision | {front + name.removeprefix("model."): tensor for name, tensor in tensors.items()}

    found = make("gemma3", renamed)
    assert found.tensors.keys() == plain.tensors.keys()
    assert_array_equal(found.ours("blk.3.attn_q.weight"), plain.ours("blk.3.attn_q.weight"))
    assert found.source.notes == (
        ["the language model alone is converted: 1 tensors of other parts are left out"] if front else []
    )


def test_the_model_in_a_model_that_sees_is_converted_by_its_own_type(make: Any) -> None:
    config = CASES["ministral3"].full_config()
    inner = {key: value for key, value in config.items() if key != "architectures"}
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "vision_config": {}}
    assert make("ministral3", **outer, text_config=inner).keys == make("ministral3").keys
    plain = {key: value for key, value in CASES["mistral"].full_config().items() if key != "architectures"}
    assert make("mistral", **outer, text_config=plain).source.metadata["general.architecture"] == "mistral3"


def test_a_tensor_without_a_place_is_refused_and_a_missing_one_named(make: Any) -> None:
    bias = {"model.layers.1.mlp.up_proj.bias": ("F32", np.zeros(N_FF))}
    with pytest.raises(
        UnsupportedModel, match=r"1 tensors have no place in a llama model, first model.layers.1.mlp.up"
    ):
        make("llama", lambda tensors: tensors | bias)
    with pytest.raises(ModelFileError, match="tensor model.layers.1.mlp.up_proj.weight is missing"):
        make("llama", lambda tensors: without(tensors, "model.layers.1.mlp.up_proj.weight"))
    inverse = {"model.layers.1.self_attn.rotary_emb.inv_freq": ("F32", np.zeros(4))}
    assert make("llama", lambda tensors: tensors | inverse).source.notes == []


def test_a_tensor_of_another_shape_is_refused_before_anything_is_written(make: Any) -> None:
    wide = {"model.layers.1.mlp.up_proj.weight": ("F32", np.zeros((N_FF + 1, N_EMBD)))}
    with pytest.raises(UnsupportedModel, match=r"blk.1.ffn_up.weight must have shape \(48, 32\): found \(49, 32\)"):
        make("llama", lambda tensors: tensors | wide)
    short = {"model.layers.1.self_attn.q_proj.weight": ("F32", np.zeros((24, N_EMBD)))}
    with pytest.raises(UnsupportedModel, match=r"blk.1.attn_q.weight must have 4 heads of 8 rows: found \(24, 32\)"):
        make("llama", lambda tensors: tensors | short)


def test_an_expert_of_another_shape_is_refused(make: Any) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    with pytest.raises(ModelFileError, match=rf"tensor {name} must be \(16, 32\): found \(17, 32\)"):
        make("qwen3moe", lambda tensors: tensors | {name: ("F32", np.zeros((17, N_EMBD)))})


@pytest.mark.parametrize(
    "case, config, message",
    [
        ("llama", {"hidden_act": "gelu"}, 'hidden_act must be absent or "silu" in llama'),
        ("llama", {"is_causal": False}, "is_causal must be absent or true in llama: found false"),
        ("llama", {"logit_scale": 0.5}, "logit_scale is 0.5, which is not known in llama and may change"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv must be absent in olmoe: found 8.0"),
        ("qwen2moe", {"mlp_only_layers": [0]}, r"mlp_only_layers must be absent or \[\] in qwen2moe"),
        ("qwen3moe", {"decoder_sparse_step": 2}, "decoder_sparse_step must be absent or 1 in qwen3moe"),
        ("gemma2", {"query_pre_attn_scalar": 9}, "query_pre_attn_scalar must be 8, GGUF has no key for it"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be absent in gemma3"),
        ("gemma3", {"use_bidirectional_attention": True}, "this is an encoder such as EmbeddingGemma"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit must be absent or 7.0"),
        ("ernie4_5_moe", {"moe_layer_end_index": 0}, "moe_layer_end_index must be the last layer, 1: found 0"),
        ("granitehybrid", {"layer_types": ["mamba", "attention"]}, "as the tensors are: found mamba in layer 0"),
        (
            "llama",
            {"model_type": "bert", "architectures": ["BertModel"]},
            "'BertModel', model_type 'bert' are not supp",
        ),
        (
            "llama",
            {"model_type": "bitnet", "architectures": []},
            "matrices are ternary: use edgeinfer export --to tern",
        ),
    ],
)
def test_a_key_that_asks_for_another_model_is_refused(
    case: str, config: dict[str, Any], message: str, make: Any
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        make(case, **config)


PUBLISHED: dict[str, dict[str, Any]] = {  # keys of config.json of published models, beyond those of the cases
    "llama": {"pretraining_tp": 1, "mlp_bias": False, "unsloth_fixed": True, "is_llama_config": True,
              "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
    "qwen2": {"use_mrope": False, "max_window_layers": 28, "sliding_window": 131072},
    "qwen2moe": {"max_window_layers": 21, "output_router_logits": False, "router_aux_loss_coef": 0.001},
    "olmoe": {"clip_qkv": None, "output_router_logits": False, "router_aux_loss_coef": 0.01},
    "granitehybrid": {"init_method": "mup", "normalization_function": "rmsnorm", "mamba_chunk_size": 256,
                      "mamba_conv_bias": True, "embedding_dropout": 0.1, "router_aux_loss_coef": 0.01},
    "gemma2": {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh", "sliding_window_size": 4096},
    "gemma3": {"sliding_window_pattern": 6, "mm_tokens_per_image": 256, "image_token_index": 262144},
    "phi3": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "embd_pdrop": 0.0, "auto_map": {}},
    "smollm3": {"no_rope_layer_interval": 4, "use_sliding_window": False, "max_window_layers": 28},
    "glm4moe": {"use_qk_norm": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "gpt_oss": {"experts_per_token": 4, "initial_context_length": 4096, "swiglu_limit": 7.0},
    "ernie4_5_moe": {"moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_use_aux_free": True},
}  # fmt: skip


@pytest.mark.parametrize("case", PUBLISHED)
def test_keys_of_published_models_are_known(case: str, make: Any) -> None:
    assert make(case, **PUBLISHED[case]).source.notes == []


def test_keys_that_are_not_known_and_sound_harmless_are_said(make: Any) -> None:
    made = make("llama", tokenizer_note="x", is_finetuned=False, attention_dropout=0.1)
    assert made.source.notes == ["not looked at in config.json: tokenizer_note"]


@pytest.mark.parametrize("case, is_cut", [("gemma3", True), ("qwen2", False)])
def test_rows_after_the_vocabulary_are_cut_in_gemma_3_and_filled_up_elsewhere(
    case: str, is_cut: bool, tmp_path: Path
) -> None:
    write(tmp_path, case, {"vocab_size": 640})
    n_tokens = byte_level(tmp_path).get_vocab_size()
    source = open_folder(tmp_path)
    tensors = {tensor.name: tensor for tensor in source.tensors}
    n_rows = n_tokens if is_cut else 640
    assert n_tokens < 640 and tensors["token_embd.weight"].shape == (n_rows, N_EMBD)
    assert source.metadata[f"{case}.vocab_size"] == n_rows
    tokens, kinds = (list(source.metadata[f"tokenizer.ggml.{key}"]) for key in ("tokens", "token_type"))
    assert len(tokens) == len(kinds) == n_rows and (tokens[-1] == "[PAD639]") != is_cut
    assert_array_equal(
        tensors["token_embd.weight"].rows(n_tokens - 2, n_tokens), open_folder(tmp_path, vocabulary=False)
        .tensors[0].rows(n_tokens - 2, n_tokens)
    )  # fmt: skip


def test_what_generation_config_advises_is_kept(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    advice = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "repetition_penalty": 1.05}
    (tmp_path / "generation_config.json").write_text(json.dumps(advice))
    keys = open_folder(tmp_path, vocabulary=False).metadata
    found = {key.rpartition(".")[2]: value for key, value in keys.items() if key.startswith("general.sampling.")}
    assert found == {"temp": 0.6, "top_k": 20, "top_p": 0.95, "penalty_repeat": 1.05}


@pytest.mark.parametrize(
    "key, text",
    [
        ("temperature", '"hot"'),
        ("temperature", "-0.5"),
        ("temperature", "NaN"),
        ("temperature", "true"),
        ("top_k", "-5"),
        ("top_k", "2.5"),
        ("top_k", "1e400"),
        ("top_k", "9" * 40),
        ("top_p", "1.5"),
        ("min_p", json.dumps([0.1] * 10000)),
        ("repetition_penalty", "0"),
        ("repetition_penalty", "{}"),
        ("eos_token_id", '"</s>"'),
        ("eos_token_id", "[2, -1]"),
        ("eos_token_id", json.dumps(["x"] * 10000)),
    ],
)
def test_nonsense_in_generation_config_is_left_out_and_named(key: str, text: str, tmp_path: Path) -> None:
    write(tmp_path, "llama")
    good = {"top_k": 20, "temperature": 0.6}
    good.pop(key, None)
    values = {**{name: str(value) for name, value in good.items()}, key: text}
    content = ", ".join(f'"{name}": {value}' for name, value in values.items())
    (tmp_path / "generation_config.json").write_text(f"{{{content}}}")
    source = open_folder(tmp_path, vocabulary=False)
    names = {"temperature": "temp"}
    found = {key: value for key, value in source.metadata.items() if key.startswith("general.sampling.")}
    assert found == {f"general.sampling.{names.get(name, name)}": value for name, value in good.items()}
    assert 0 < len(source.notes) < 12
    assert all(note.startswith(f"generation_config.json: {key} must be ") and len(note) < 250 for note in source.notes)


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"a": "\xff"}', b""])
def test_a_broken_generation_config_is_said_to_be_left_out(text: bytes, tmp_path: Path) -> None:
    write(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_bytes(text)
    (note,) = open_folder(tmp_path, vocabulary=False).notes
    assert note.startswith("generation_config.json: ") and note.endswith("nothing of it is used")


def test_the_keys_of_granite_without_mamba_layers_are_those_of_granite(make: Any) -> None:
    hybrid, granite = make("granitehybrid").keys, make("granite").keys
    assert hybrid == granite | {"rope.scaling.finetuned": True}
    assert make("granitehybrid", position_embedding_type="nope").keys["rope.scaling.finetuned"] is False
    assert [granite[key] for key in ("embedding_scale", "attention.scale", "residual_scale", "logit_scale")] == [
        3,
        0.25,
        0.5,
        2,
    ]


ODD = [
    None,
    True,
    False,
    -1,
    0,
    1,
    3,
    1e9,
    10**18,
    0.5,
    -2.5,
    "",
    "x",
    "yarn",
    [],
    [1],
    [None],
    [FULL] * 2,
    {},
    {"a": 1},
]


@pytest.mark.parametrize("case", CASES)
def test_odd_values_in_config_json_give_a_model_or_a_typed_error(case: str, tmp_path: Path) -> None:
    write(tmp_path, case)
    config, rng = CASES[case].full_config(), random.Random(case)
    for _ in range(6):
        changed = json.loads(json.dumps(config))
        at = rng.choice([changed, *(value for value in changed.values() if isinstance(value, dict))])
        at[rng.choice(list(at))] = rng.choice(ODD)
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with suppress(ModelFileError, UnsupportedModel):
            source = open_folder(tmp_path, vocabulary=False)
            assert all(len(tensor.rows(0, 1)) == 1 for tensor in source.tensors)
