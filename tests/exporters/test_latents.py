"""Checkpoints with latent attention or gates as GGUF: what becomes of their tensors, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from tiny_checkpoints import CASES, FULL, HEADS, VARIED, WINDOW, Stored, write

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.huggingface import HuggingFaceSource, open_folder
from edgeinfer.exporters.virtual_file import model_file_of
from edgeinfer.models import Experts, LatentAttention, attention_of, read_nextn, read_spec


def made(folder: Path, case: str, **config: Any) -> tuple[HuggingFaceSource, Stored]:
    """The source of a checkpoint with other keys, and what was stored."""
    stored: Stored = {}

    def kept(tensors: Stored) -> Stored:
        stored.update(tensors)
        return tensors

    write(folder, case, change=kept)
    (folder / "config.json").write_text(json.dumps({**(CASES | VARIED)[case].full_config(), **config}))
    return open_folder(folder, vocabulary=False), stored


def test_keys_and_values_of_heads_are_cut_apart_and_keys_transposed(tmp_path: Path) -> None:
    source, stored = made(tmp_path, "deepseek2")
    both = stored["model.layers.1.self_attn.kv_b_proj.weight"][1].astype(np.float32).reshape(HEADS, 12 + 16, 16)
    tensors = {each.name: each for each in source.tensors}
    k_b, v_b = (tensors[f"blk.1.attn_{name}_b.weight"] for name in "kv")
    assert (k_b.shape, v_b.shape) == ((HEADS, 16, 12), (HEADS, 16, 16))
    assert_array_equal(k_b.rows(0, k_b.n_rows).reshape(k_b.shape), both[:, :12].transpose(0, 2, 1))
    assert_array_equal(v_b.rows(0, v_b.n_rows).reshape(v_b.shape), both[:, 12:])
    assert_array_equal(k_b.rows(17, 35), both[:, :12].transpose(0, 2, 1).reshape(-1, 12)[17:35])  # of three heads


def test_the_block_of_glm_that_drafts_is_kept(tmp_path: Path) -> None:
    source, stored = made(tmp_path, "deepseek2_glm")
    with model_file_of(source) as model:
        spec, (block,) = read_spec(model), read_nextn(model)
    assert (spec.n_layers, block.index) == (2, 2)
    assert isinstance(block.layer.mixer, LatentAttention) and block.layer.mixer.k_b == "blk.2.attn_k_b.weight"
    tensors = {each.name: each for each in source.tensors}
    projection = tensors["blk.2.nextn.eh_proj.weight"]
    expected = stored["model.layers.2.eh_proj.weight"][1].astype(np.float32)
    assert_array_equal(projection.rows(0, projection.n_rows), expected)


def test_those_of_deepseek_are_left_out_with_a_note(tmp_path: Path) -> None:
    source, _ = made(tmp_path, "deepseek2_glm", architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3")
    assert any("further ahead (MTP) are left out" in note for note in source.notes)
    with model_file_of(source) as model:
        assert read_nextn(model) == () and read_spec(model).n_layers == 2


@pytest.mark.parametrize("method, n_groups, by_best", [("greedy", 1, None), ("group_limited_greedy", 2, True)])
def test_groups_of_deepseek_v2_go_by_their_best_where_it_has_some(
    method: str, n_groups: int, by_best: bool | None, tmp_path: Path
) -> None:
    """Its other method chooses from all experts, whatever the number of groups is."""
    source, _ = made(tmp_path, "deepseek2_lite", topk_method=method, n_group=2, topk_group=1)
    keys = {key.partition(".")[2]: value for key, value in source.metadata.items()}
    assert (keys["expert_group_count"], keys.get("expert_groups_by_best")) == (n_groups, by_best)
    assert any("llama.cpp does by the two best" in note for note in source.notes) == bool(by_best)
    with model_file_of(source) as model:
        experts = read_spec(model).layers[1].ffn
    assert isinstance(experts, Experts) and (experts.n_groups, experts.groups_by_best) == (n_groups, bool(by_best))


def test_norms_of_queries_say_what_they_are_multiplied_by(tmp_path: Path) -> None:
    source, stored = made(tmp_path, "muse_glimmer")
    tensors = {each.name: each for each in source.tensors}
    of = {name: tensors[f"blk.2.attn_{name}_norm.weight"].rows(0, 1)[0] for name in "qk"}
    assert_array_equal(of["q"], np.full(8, 3.87, np.float32))
    assert_array_equal(of["k"], np.ones(8, np.float32))
    last = stored["model.language_model.norm.weight"][1].astype(np.float32)
    assert_array_equal(tensors["output_norm.weight"].rows(0, 1)[0], last)  # nothing is added to this one


def test_windows_of_laguna_in_other_layers_are_said(tmp_path: Path) -> None:
    source, _ = made(tmp_path, "laguna_per_element")
    with model_file_of(source) as model:
        mixers = [attention_of(layer) for layer in read_spec(model).layers]
    assert [mixer.window for mixer in mixers] == [6, None, 6, 6]
    assert {mixer.output_gate for mixer in mixers} == {"per_number"}


@pytest.mark.parametrize(
    "case, config, named",
    [
        ("deepseek2_yarn", {"rope_parameters": {"mscale": 0.5}}, "mscale and mscale_all_dim"),
        ("deepseek2_yarn", {"rope_parameters": {"mscale": None, "mscale_all_dim": None}}, "mscale and mscale_all_dim"),
        ("deepseek2_lite", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek2", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek2", {"rope_interleave": False}, "rope_interleave"),
        ("deepseek2_glm", {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types"),
        ("laguna", {"gating": False}, "gating"),
        ("laguna", {"moe_router_logit_softcapping": 3.0}, "moe_router_logit_softcapping"),
        ("laguna", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "mlp_layer_types"),
        ("laguna", {"layer_types": [FULL, WINDOW, "chunked", WINDOW]}, "layer_types"),
        ("muse_glimmer", {"text_config": {"layer_rope_theta": [1e4] * 4}}, "layer_rope_theta"),
        ("muse_glimmer", {"text_config": {"post_norm_eps": 1e-6}}, "post_norm_eps"),
    ],
)
def test_what_gguf_cannot_say_is_refused_by_its_key(
    case: str, config: dict[str, Any], named: str, tmp_path: Path
) -> None:
    whole = (CASES | VARIED)[case].full_config()
    changed = {key: {**whole[key], **value} if isinstance(value, dict) else value for key, value in config.items()}
    with pytest.raises(UnsupportedModel, match=named):
        made(tmp_path, case, **changed)
