"""Checkpoints with recurrent layers as GGUF: each trap of them, the block that drafts, and what is refused."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LLAMA3, byte_level
from click.testing import CliRunner
from numpy.testing import assert_allclose, assert_array_equal
from tiny_checkpoints import CASES, FULL, N_EMBD, N_FF, N_FF_EXPERT, VARIED, Stored, write

from edgeinfer import cli
from edgeinfer.common.errors import ModelFileError, UnsupportedModel
from edgeinfer.exporters.auto import speed
from edgeinfer.exporters.auto.candidates import drafting_types, subjects_of
from edgeinfer.exporters.gguf.file_types import is_quantised
from edgeinfer.exporters.huggingface import HuggingFaceSource, open_folder
from edgeinfer.exporters.published_pre_tokenizers import pre_tokenizer_of
from edgeinfer.exporters.source import Source
from edgeinfer.exporters.virtual_file import model_file_of
from edgeinfer.models import read_spec
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import GGMLType, ModelFile

QWEN, LFM2 = ("qwen35", "qwen35moe", "qwen3next"), ("lfm2", "lfm2moe")
HYBRIDS = QWEN + LFM2
Change = Callable[[Stored], Stored]


class Made:
    """The source of a changed checkpoint, its tensors and keys by name, and what was stored."""

    def __init__(self, folder: Path, case: str, change: Change, config: dict[str, Any]) -> None:
        self.stored: Stored = {}

        def kept(tensors: Stored) -> Stored:
            self.stored = change(tensors)
            return self.stored

        write(folder, case, change=kept)  # with the tensors of the case, whatever config says
        (folder / "config.json").write_text(json.dumps({**CASES[case].full_config(), **config}))
        self.source: HuggingFaceSource = open_folder(folder, vocabulary=False)
        self.tensors = {each.name: each for each in self.source.tensors}
        of_model = ((key.partition("."), value) for key, value in self.source.metadata.items())
        self.keys = {key: value for (front, _, key), value in of_model if front != "general"}

    def ours(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        return tensor.rows(0, tensor.n_rows).reshape(tensor.shape)

    def theirs(self, name: str) -> np.ndarray:
        return self.stored[name][1].astype(np.float32)


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def made(case: str, change: Change = dict, **config: Any) -> Made:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return Made(folder, case, change, config)

    return made


def as_bf16(tensors: Stored) -> Stored:
    bits = {name: values.astype(np.float32).view(np.uint32) >> 16 for name, (_, values) in tensors.items()}
    return {name: ("BF16", value.astype(np.uint16)) for name, value in bits.items()}


def without(name: str) -> Change:
    return lambda tensors: {key: value for key, value in tensors.items() if name not in key}


# ---- Tensors ---------------------------------------------------------------------------------------------------------


def test_value_heads_take_turns_by_hand(make: Any) -> None:
    """2 key heads with 3 value heads of 32 numbers each: the file has heads 0, 3, 1, 4, 2, 5."""
    made, order, front = make("qwen35"), [0, 3, 1, 4, 2, 5], "model.layers.0.linear_attn."
    for ours, theirs in (("ssm_beta.weight", "in_proj_b.weight"), ("ssm_dt.bias", "dt_bias")):
        assert_array_equal(made.ours(f"blk.0.{ours}"), made.theirs(front + theirs)[order])
    decays = -np.exp(made.theirs(f"{front}A_log")[order])
    assert_allclose(made.ours("blk.0.ssm_a"), decays, rtol=1e-6)
    qkv, heads = made.theirs(f"{front}in_proj_qkv.weight"), np.concatenate([32 * n + np.arange(32) for n in order])
    assert_array_equal(made.ours("blk.0.attn_qkv.weight"), np.concatenate([qkv[:128], qkv[128:][heads]]))
    assert_array_equal(made.ours("blk.0.ssm_out.weight"), made.theirs(f"{front}out_proj.weight")[:, heads])
    assert made.ours("blk.0.ssm_conv1d.weight").shape == (320, 4)


def test_value_heads_stay_side_by_side_in_qwen3next(make: Any) -> None:
    made, front = make("qwen3next"), "model.layers.0.linear_attn."
    assert_array_equal(made.ours("blk.0.ssm_ba.weight"), made.theirs(f"{front}in_proj_ba.weight"))
    runs = made.theirs(f"{front}in_proj_qkvz.weight").reshape(2, 256, N_EMBD)  # 32 q, 32 k, 96 v, 96 z of a head
    parts = [runs[:, first:last].reshape(-1, N_EMBD) for first, last in ((0, 32), (32, 64), (64, 160), (160, 256))]
    assert_array_equal(made.ours("blk.0.attn_qkv.weight"), np.concatenate(parts[:3]))
    assert_array_equal(made.ours("blk.0.attn_gate.weight"), parts[3])


@pytest.mark.parametrize("case", QWEN)
def test_norms_get_1_but_for_that_of_the_recurrence(case: str, make: Any) -> None:
    made = make(case)
    same = {"blk.0.ssm_norm.weight": "model.layers.0.linear_attn.norm.weight"}
    shifted = {
        "output_norm.weight": "model.norm.weight",
        "blk.0.post_attention_norm.weight": "model.layers.0.post_attention_layernorm.weight",
        "blk.3.attn_q_norm.weight": "model.layers.3.self_attn.q_norm.weight",
        "blk.4.nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "blk.4.attn_k_norm.weight": "mtp.layers.0.self_attn.k_norm.weight",
    }
    for names, by in ((same, 0), (shifted, 1)):
        for ours, theirs in names.items():
            assert_array_equal(made.ours(ours), made.theirs(theirs) + np.float32(by))
            assert made.tensors[ours].type == GGMLType.F32


@pytest.mark.parametrize("case", HYBRIDS)
def test_matrices_keep_their_bytes_and_convolutions_are_f32(case: str, make: Any) -> None:
    """Rows and columns move as they are stored, whole or some at a time."""
    made = make(case, as_bf16)
    for name, tensor in made.tensors.items():
        if not is_quantised(tensor):
            assert tensor.type == GGMLType.F32, name
            continue
        assert tensor.type == GGMLType.BF16 and tensor.stored is not None, name
        whole = tensor.rows(0, tensor.n_rows)
        for first, last in ((0, tensor.n_rows), (1, tensor.n_rows - 1), (2, 2)):
            values = dequantize(GGMLType.BF16, tensor.stored(first, last), (last - first, tensor.n_in))
            assert_array_equal(values, whole[first:last])
            assert_array_equal(tensor.rows(first, last), whole[first:last])
    kept = {name.split(".", 2)[-1] for name, tensor in made.tensors.items() if len(tensor.shape) > 1} - {
        name.split(".", 2)[-1] for name, tensor in made.tensors.items() if is_quantised(tensor)
    }
    assert kept == {
        "shortconv.conv.weight" if case in LFM2 else "ssm_conv1d.weight",
        *({"ffn_gate_inp.weight"} if case not in ("qwen35", "lfm2") else ()),
        *({"ffn_gate_inp_shexp.weight"} if case in ("qwen35moe", "qwen3next") else ()),
    }


def test_a_matrix_of_other_heads_is_refused_by_name(make: Any) -> None:
    name = "model.layers.0.linear_attn.in_proj_z.weight"
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_gate\.weight must have 0 and 6 heads of 32 numbers: fo"):
        make("qwen35", lambda tensors: tensors | {name: ("F32", np.zeros((191, N_EMBD)))})
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    with pytest.raises(ModelFileError, match=rf"{name} must be \(512, 32\): found \(511, 32\)"):
        make("qwen3next", lambda tensors: tensors | {name: ("F32", np.zeros((511, N_EMBD)))})


def test_joined_experts_mean_the_same(make: Any) -> None:
    for case, module, (gate, up, down) in (
        ("qwen35moe", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
        ("lfm2moe", "feed_forward.experts", ("w1", "w3", "w2")),
    ):

        def joined(tensors: Stored, module: str = module, names: tuple[str, ...] = (gate, up, down)) -> Stored:
            found = {key: value for key, value in tensors.items() if f"{module}." not in key}
            for front in {key.partition(module)[0] for key in tensors if f"{module}." in key}:
                three = [
                    np.stack([tensors[f"{front}{module}.{n}.{name}.weight"][1] for n in range(4)]) for name in names
                ]
                found[f"{front}{module}.gate_up_proj"] = ("F32", np.concatenate(three[:2], axis=1))
                found[f"{front}{module}.down_proj"] = ("F32", three[2])
            return found

        plain, found = make(case), make(case, joined)
        assert found.tensors.keys() == plain.tensors.keys()
        for name in (name for name in plain.tensors if "_exps" in name):
            assert_array_equal(found.ours(name), plain.ours(name))
        assert plain.ours("blk.3.ffn_up_exps.weight").shape == (4, N_FF_EXPERT, N_EMBD)


# ---- The block that drafts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", QWEN)
@pytest.mark.parametrize("front", ["mtp.", "model.mtp."])
def test_the_block_that_drafts_is_kept_behind_the_layers(case: str, front: str, make: Any) -> None:
    def renamed(tensors: Stored) -> Stored:
        return {front + key[4:] if key.startswith("mtp.") else key: value for key, value in tensors.items()}

    made = make(case, renamed)
    assert (made.keys["block_count"], made.keys["nextn_predict_layers"]) == (5, 1) and made.source.notes == []
    assert made.keys["attention.recurrent_layers"] == [True, True, True, False, False]
    assert_array_equal(made.ours("blk.4.nextn.eh_proj.weight"), made.theirs(f"{front}fc.weight"))
    assert_array_equal(made.ours("blk.4.attn_q.weight"), made.theirs(f"{front}layers.0.self_attn.q_proj.weight"))
    assert ("blk.4.ffn_gate_exps.weight" in made.tensors) == (case != "qwen35")


def test_a_block_that_drafts_may_be_missing_but_not_in_part(make: Any) -> None:
    made = make("qwen35", without("mtp."))
    assert made.keys["block_count"] == 4 and "nextn_predict_layers" not in made.keys
    assert made.source.notes == ["config.json names a block that drafts (MTP), which the checkpoint does not have"]
    assert make("qwen35", without("mtp."), mtp_num_hidden_layers=None).source.notes == []
    with pytest.raises(ModelFileError, match=r"tensor mtp\.fc\.weight is missing"):
        make("qwen35", without("mtp.fc"))
    with pytest.raises(ModelFileError, match=r"tensor mtp\.layers\.0\.mlp\.up_proj\.weight is missing"):
        make("qwen35", without("mtp.layers.0.mlp.up_proj"))


def test_a_block_that_drafts_with_two_layers_is_left_out_and_said(make: Any) -> None:
    def doubled(tensors: Stored) -> Stored:
        return tensors | {key.replace("layers.0", "layers.1"): tensors[key] for key in tensors if "mtp.la" in key}

    made = make("qwen35", doubled)
    assert "blk.4.attn_q.weight" not in made.tensors and made.keys["block_count"] == 4
    assert made.source.notes == ["the block that drafts (MTP) has 2 layers, and GGUF has it with one: it is left out"]


def test_embeddings_of_the_block_that_drafts_are_kept(make: Any) -> None:
    own = {"mtp.embed_tokens.weight": ("F32", np.ones((64, N_EMBD)))}
    made = make("qwen35", lambda tensors: tensors | own, mtp_use_dedicated_embeddings=True)
    assert made.ours("blk.4.nextn.embed_tokens.weight").sum() == 64 * N_EMBD


def test_the_two_layers_that_draft_of_nemotron_become_one_block(make: Any) -> None:
    made = make("nemotron_h_moe_latent")
    assert (made.keys["block_count"], made.keys["nextn_predict_layers"]) == (6, 1) and made.source.notes == []
    assert (made.keys["attention.head_count_kv"][-1], made.keys["feed_forward_length"][-1]) == (2, N_FF_EXPERT)
    for ours, theirs in {
        "attn_norm": "0.norm",
        "post_attention_norm": "1.norm",
        "nextn.shared_head_norm": "1.final_layernorm",
        "ffn_latent_up": "1.mixer.fc2_latent_proj",
    }.items():
        assert_array_equal(made.ours(f"blk.5.{ours}.weight"), made.theirs(f"mtp.layers.{theirs}.weight"))
    experts = made.ours("blk.5.ffn_down_exps.weight")
    assert_array_equal(experts[1], made.theirs("mtp.layers.1.mixer.experts.1.down_proj.weight"))


def test_what_drafts_of_nemotron_may_be_missing_but_not_in_part(make: Any) -> None:
    case, left_out = "nemotron_h_moe_latent", "is not one layer of attention and one of experts: it is left out"

    def longer(tensors: Stored) -> Stored:
        return tensors | {key.replace("layers.1", "layers.2"): tensors[key] for key in tensors if "mtp.layers.1" in key}

    for change, note in (
        (longer, left_out),
        (without("mtp.layers.1"), left_out),
        (without("mtp."), "config.json names a block that drafts (MTP), which the checkpoint does not have"),
    ):
        made = make(case, change)
        assert made.keys["block_count"] == 5 and "nextn_predict_layers" not in made.keys
        assert len(made.source.notes) == 1 and made.source.notes[0].endswith(note)
    assert make(case, without("mtp."), num_nextn_predict_layers=0).source.notes == []
    with pytest.raises(ModelFileError, match=r"tensor mtp\.layers\.0\.enorm\.weight is missing"):
        make(case, without("mtp.layers.0.enorm"))
    with pytest.raises(UnsupportedModel, match=r"tensor blk\.5\.attn_v\.weight .* is missing"):
        make(case, without("mtp.layers.0.mixer.v_proj"))


@pytest.mark.parametrize("size, type", [(1, "Q4_0"), (70_000, "Q4_1"), (130_000, "Q8_0"), (10**6, "F16")])
def test_a_block_that_drafts_gets_the_format_that_all_could_have(size: int, type: str, make: Any) -> None:
    source: Source = make("qwen35").source
    with model_file_of(source) as file:
        spec = read_spec(file)
    types = drafting_types(source, spec, subjects_of(source, spec), size)
    block = {each.name for each in source.tensors if each.name.startswith("blk.4.") and is_quantised(each)}
    assert types.keys() == block and "blk.4.nextn.eh_proj.weight" in block
    named = {name: found.name for name, found in types.items() if "ffn_down" not in name}  # whose rows fit few formats
    assert set(named.values()) == {type}


# ---- config.json -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["qwen35", "qwen35moe"])
def test_what_sees_images_is_left_out_and_said(case: str, tmp_path: Path) -> None:
    write(tmp_path / "a", case, {"tie_word_embeddings": True}, without("lm_head"))
    write(tmp_path / "b", f"{case}_with_images")
    plain, found = (open_folder(tmp_path / name, vocabulary=False) for name in "ab")
    assert found.notes == ["the language model alone is converted: 1 tensors of other parts are left out"]
    keys = [{k: v for k, v in each.metadata.items() if not k.startswith("general.n")} for each in (plain, found)]
    assert keys[0] == keys[1]
    assert [(each.name, each.shape) for each in plain.tensors] == [(each.name, each.shape) for each in found.tensors]


def test_an_lfm2_that_sees_is_converted_by_its_own_type(make: Any) -> None:
    def renamed(tensors: Stored) -> Stored:
        language = {key.replace("model.", "model.language_model.", 1): value for key, value in tensors.items()}
        return language | {"model.vision_tower.patch.weight": ("F32", np.zeros((2, 2)))}

    text = {**CASES["lfm2"].full_config(), "architectures": None}
    outer = {"architectures": ["Lfm2VlForConditionalGeneration"], "model_type": "lfm2_vl", "downsample_factor": 2}
    plain, found = make("lfm2"), make("lfm2", renamed, **outer, text_config=text, projector_bias=True)
    assert found.keys == plain.keys and found.tensors.keys() == plain.tensors.keys()
    assert found.source.notes == ["the language model alone is converted: 1 tensors of other parts are left out"]


def test_the_whole_says_that_embeddings_are_tied(tmp_path: Path) -> None:
    """transformers 5 writes the default of text_config beside it, which it does not look at."""
    config = VARIED["qwen35_with_images"].config
    text = {**config["text_config"], "tie_word_embeddings": False}
    write(tmp_path, "qwen35_with_images", {"text_config": text}, without("lm_head"))
    assert "output.weight" not in {each.name for each in open_folder(tmp_path, vocabulary=False).tensors}


@pytest.mark.parametrize("case", HYBRIDS)
def test_kinds_of_layers_that_config_json_lost_are_those_of_the_tensors(case: str, make: Any) -> None:
    plain, found = make(case), make(case, layer_types=None)
    assert found.keys == plain.keys and found.source.notes == plain.source.notes


@pytest.mark.parametrize(
    "case, config, message",
    [
        ("qwen35", {"layer_types": [FULL] * 4}, "layer_types says that layer 0 is full_attention, and its tensors are"),
        ("qwen35", {"layer_types": ["mamba"] * 4}, "must be linear_attention or full_attention: found mamba in layer"),
        ("qwen35", {"layer_types": None, "full_attention_interval": 2}, "full_attention_interval says that layer 1 is"),
        ("qwen35", {"linear_value_head_dim": 16}, "linear_value_head_dim must equal linear_key_head_dim 32: found 16"),
        ("qwen35", {"linear_num_value_heads": 5}, "linear_num_value_heads must be a multiple of linear_num_key_heads"),
        ("qwen35", {"attn_output_gate": False}, "attn_output_gate must be absent or true in qwen35: found false"),
        ("qwen35", {"output_gate_type": "sigmoid"}, 'output_gate_type must be absent or "swish" in qwen35'),
        ("qwen35moe", {"norm_topk_prob": False}, "norm_topk_prob must be absent or true in qwen35moe: found false"),
        ("qwen3next", {"norm_topk_prob": False}, "norm_topk_prob must be absent or true in qwen3next: found false"),
        ("qwen3next", {"mlp_only_layers": [0]}, "mlp_only_layers must be absent or"),
        ("lfm2", {"layer_types": ["conv"] * 4}, "layer_types says that layer 1 is conv, and its tensors are those of"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [0, 1]}, "full_attn_idxs says that layer 0 is full_attention"),
        ("lfm2", {"conv_bias": True}, "conv_bias must be absent or false in lfm2"),
        ("lfm2", {"sliding_window": 8}, "sliding_window is 8, which is not known in lfm2 and may change"),
        ("lfm2moe", {"routed_scaling_factor": 2.0}, "routed_scaling_factor must be absent or 1.0 in lfm2moe"),
        ("lfm2moe", {"use_expert_bias": False}, "use_expert_bias must be absent or true in lfm2moe"),
    ],
)
def test_what_a_file_cannot_say_is_refused(case: str, config: dict[str, Any], message: str, make: Any) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        make(case, **config)


PUBLISHED: dict[str, dict[str, Any]] = {  # keys of published models, beyond those of the cases
    "qwen35": {"attn_output_gate": True, "full_attention_interval": 4, "mamba_ssm_dtype": "float32",
               "mlp_only_layers": [], "mtp_use_dedicated_embeddings": False, "video_token_id": 7,
               "vision_start_token_id": 8, "vision_end_token_id": 9},
    "qwen35moe": {"router_aux_loss_coef": 0.001, "output_router_logits": False, "intermediate_size": None},
    "qwen3next": {"router_aux_loss_coef": 0.001, "full_attention_interval": 4, "use_sliding_window": False,
                  "attention_dropout": 0.0},
    "lfm2": {"block_dim": 32, "block_mlp_init_scale": 1.0, "block_norm_eps": 1e-5, "block_out_init_scale": 1.0,
             "block_use_swiglu": True, "block_use_xavier_init": True, "conv_bias": False, "conv_dim": 32,
             "conv_dim_out": 32, "conv_use_xavier_init": True, "num_heads": 4, "theta": 1e6, "use_pos_enc": True,
             "downsample_factor": 2, "projector_bias": True, "projector_hidden_act": "gelu", "tie_embedding": True},
    "lfm2moe": {"conv_bias": False, "tie_embedding": True},
}  # fmt: skip


@pytest.mark.parametrize("case", PUBLISHED)
def test_keys_of_published_models_are_known(case: str, make: Any) -> None:
    made = make(case, **PUBLISHED[case])
    assert made.source.notes == []
    if "intermediate_size" in PUBLISHED[case]:
        assert "feed_forward_length" not in made.keys


def test_spellings_of_lfm2_mean_the_same(make: Any) -> None:
    plain = make("lfm2")
    assert plain.keys["feed_forward_length"] == N_FF and plain.keys["attention.head_count_kv"] == [0, 2, 0, 0]
    epsilons = [make("lfm2", norm_eps=1e-4, rms_norm_eps=eps).keys for eps in (1e-2, None)]
    assert [keys["attention.layer_norm_rms_epsilon"] for keys in epsilons] == [1e-4, 1e-4]
    with pytest.raises(ModelFileError, match=r"tensor lm_head\.weight is missing, and config\.json says"):
        make("lfm2", tie_embedding=False)


# ---- Vocabulary, types, targets --------------------------------------------------------------------------------------


def with_vocabulary(folder: Path, case: str, pre: str) -> Path:
    """A checkpoint with a tokenizer that cuts as a pre-tokeniser does."""
    write(folder, case, {"vocab_size": 640, "eos_token_id": 1, "bos_token_id": 0})
    byte_level(folder, LLAMA3, ignore_merges=pre == "lfm2")
    path = folder / "tokenizer.json"
    source = json.loads(path.read_text())
    source["pre_tokenizer"] = pre_tokenizer_of(pre)
    path.write_text(json.dumps(source))
    return folder


@pytest.mark.parametrize(
    "case, pre", [("qwen35", "qwen35"), ("qwen3next", "qwen2"), ("lfm2", "lfm2"), ("lfm2moe", "lfm2")]
)
def test_the_vocabulary_has_the_name_of_the_family(case: str, pre: str, tmp_path: Path) -> None:
    assert open_folder(with_vocabulary(tmp_path, case, pre)).metadata["tokenizer.ggml.pre"] == pre


def test_another_vocabulary_is_named_as_what_it_is(tmp_path: Path) -> None:
    """A preferred name counts only where it cuts as the file does."""
    folder = with_vocabulary(tmp_path, "lfm2", "qwen2")
    assert open_folder(folder).metadata["tokenizer.ggml.pre"] == "qwen2"


@pytest.fixture
def quick_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of measured times: what the bytes of a matrix take."""

    def by_bytes(shape: tuple[int, int], formats: Sequence[GGMLType], *_: object) -> speed.Times:
        return speed.Times({type: 1e-9 * type.n_bytes(shape[0] * shape[1]) for type in formats}, 0.0)

    monkeypatch.setattr(speed, "measure", by_bytes)
    monkeypatch.setattr(speed, "record_folder", lambda kind: None)


@pytest.mark.usefixtures("quick_times")
@pytest.mark.parametrize("type", ["Q4_K_M", "Q8_0", "Q4_0", "BF16", "auto"])
@pytest.mark.parametrize("case", ["qwen35", "lfm2moe"])
def test_the_command_writes_any_type_and_compares_it(case: str, type: str, tmp_path: Path) -> None:
    folder = with_vocabulary(tmp_path / "m", case, "lfm2" if case in LFM2 else "qwen35")
    out = tmp_path / "a.gguf"
    arguments = ["export", str(folder), "--to", "gguf", "--type", type, "-o", str(out)]
    found = CliRunner().invoke(cli.main, [*arguments, *(["--size", "150kB"] if type == "auto" else [])])
    assert found.exit_code == 0, found.output
    assert "check: KL" in found.stderr
    with ModelFile.open(out) as file:
        read_spec(file)
        types = {name: info.type.name for name, info in file.tensors.items()}
    assert {kind for name, kind in types.items() if "conv1d" in name or "shortconv.conv" in name} == {"F32"}
    if case == "qwen35" and type != "BF16":
        assert types["blk.4.nextn.eh_proj.weight"] not in ("F32", "F16", "BF16")
    if type == "auto":
        assert out.stat().st_size < 150e3 + 40e3  # with its vocabulary


@pytest.mark.parametrize("case", ["qwen35", "lfm2"])
@pytest.mark.parametrize("to", ["genai", "litertlm", "mnn", "pte", "onnx", "ternary"])
def test_what_other_targets_cannot_run_is_refused_by_name(to: str, case: str, tmp_path: Path) -> None:
    folder = with_vocabulary(tmp_path / "m", case, "lfm2" if case in LFM2 else "qwen35")
    out = tmp_path / "out"
    more = [] if to == "ternary" else ["--type", "Q8_0", "-c", "64"]
    found = CliRunner().invoke(cli.main, ["export", str(folder), "--to", to, *more, "-o", str(out)])
    assert found.exit_code != 0 and not out.exists()
    block = "GatedDeltaNet" if case == "qwen35" else "ShortConv"
    named = {"litertlm": case, "pte": case, "ternary": "with silu is not supported"}.get(to, block)
    assert named in found.output, found.output


def test_every_hybrid_is_a_case() -> None:
    assert set(HYBRIDS) <= CASES.keys()
