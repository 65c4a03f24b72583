"""The metadata that all architectures have, and the keys of config.json that none of them may have unread."""

from __future__ import annotations

import json
import re

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.checkpoint import Folder
from edgeinfer.exporters.checkpoint.generation import read_generation
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import Keys
from edgeinfer.exporters.conversion.rope import check_rope, rope_keys

_SIZED = re.compile(r"(?P<base>.+?)-(?P<size>\d+(\.\d+)?[BbMm](-[Aa]\d+(\.\d+)?[BbMm])?)(-(?P<rest>.+))?")
_QUANTIZATION_VERSION = 2  # of ggml's formats, the same since 2023
_READ = frozenset(
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size "
    "max_position_embeddings original_max_position_embeddings rms_norm_eps tie_word_embeddings layer_types "
    "rope_theta rope_scaling rope_parameters partial_rotary_factor "
    "attention_bias mlp_bias qkv_bias use_bias use_qk_norm "  # the tensors tell
    "architectures model_type quantization_config".split()
)
# What concerns training, loading and generating, and parts for images.
_WITHOUT_EFFECT = frozenset(
    "_name_or_path auto_map boi_token_index chunk_size_feed_forward compression_config "
    "cross_attention_hidden_size diversity_penalty dtype embd_pdrop encoder_no_repeat_ngram_size eoi_token_index "
    "experts_per_token exponential_decay_length_penalty finetuning_task id2label image_token_index "
    "keys_to_ignore_at_inference label2id length_penalty mm_tokens_per_image multimodal_projector_bias "
    "no_repeat_ngram_size num_beam_groups output_router_logits pretraining_tp "
    "projector_hidden_act repetition_penalty resid_pdrop return_dict router_jitter_noise spatial_merge_size "
    "task_specific_params temperature text_config top_k top_p torch_dtype transformers.js_config "
    "transformers_version typical_p unsloth_fixed unsloth_version use_cache vision_config vision_feature_layer".split()
)
_HARMLESS = re.compile(r".*(dropout|loss|flash|implementation|_token_id|initial).*|is_.*|mamba_.*")
_FIXED = {"is_causal": (None, True)}  # in every architecture; others are encoders
# A key that is not known, with such a word in it, would probably change what the model computes.
_WORDS = re.compile(
    r"scal|multipl|factor|cap(?!acity)|window|norm|(^|_)act|activation|rope|rotary|temperature|clip|bias|eps|sink|"
    r"position|alibi|attention|attn|residual|softmax|top_?k|router|gate|causal|bidirectional|layer_idx|skip|parallel"
)


def metadata(model: Model, folder: Folder, n_vocab: int) -> Keys:
    """Everything but the vocabulary, of a model that passed check_config. Raises ModelFileError."""
    name = model.recipe.name
    keys = {f"{name}.{key}": value for key, value in (_common(model, n_vocab) | model.recipe.keys(model)).items()}
    return _general(folder, name) | _sampling(model, folder) | keys


def _general(folder: Folder, architecture: str) -> Keys:
    """What a file is called: by the name of the folder, of which "Name-1.7B-Instruct" has a size."""
    name = folder.path.resolve().name
    keys: Keys = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": name,
        "general.quantization_version": _QUANTIZATION_VERSION,
    }
    sized = _SIZED.fullmatch(name)
    if sized:
        keys |= {"general.basename": sized["base"], "general.size_label": sized["size"].upper()}
    if sized and sized["rest"]:
        keys["general.finetune"] = sized["rest"]
    return keys


def check_config(model: Model) -> None:
    """Raises UnsupportedModel for a key of config.json that asks for something that is not converted."""
    _check_fixed(model)
    _check_known(model)
    check_rope(model)
    model.recipe.check(model)


def _check_fixed(model: Model) -> None:
    recipe = model.recipe
    for key, values in {**_FIXED, **recipe.fixed}.items():
        found = model.config.get(key)
        if found not in values:
            only = " or ".join("absent" if value is None else json.dumps(value) for value in values)
            model.refuse(key, f"must be {only} in {recipe.name}: found {_shown(found)}")


def _check_known(model: Model) -> None:
    recipe = model.recipe
    read = _READ | recipe.reads | recipe.spellings.keys() | recipe.fixed.keys() | _FIXED.keys()
    if recipe.experts is not None:
        read |= {*recipe.experts.count, recipe.experts.used}
    unknown = sorted(key for key in model.given.values.keys() - read - _WITHOUT_EFFECT if not _HARMLESS.fullmatch(key))
    asking = [key for key in unknown if model.given.get(key) not in (False, 0, "", [], {})]
    for key in asking:
        if _WORDS.search(key):
            raise UnsupportedModel(
                f"{model.config.path}: {model.config.prefix}{key} is {_shown(model.given.get(key))}, which is not "
                f"known in {recipe.name} and may change what it computes; remove the key if it does not"
            )
    if asking:
        model.note(f"not looked at in config.json: {', '.join(asking)}")


def _shown(value: object) -> str:
    """As it stands in config.json, cut short."""
    return f"{json.dumps(value):.80}"


def _common(model: Model, n_vocab: int) -> Keys:
    config = model.config
    keys: Keys = {
        "block_count": len(model.blocks),
        "context_length": model.n_ctx,
        "embedding_length": model.n_embd,
        "attention.head_count": model.n_heads,
        "attention.head_count_kv": model.n_kv_heads,
        "attention.key_length": model.head_dim,
        "attention.value_length": model.head_dim,
        "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps", 1e-6, most=1.0),
        "vocab_size": n_vocab,
        **rope_keys(model),
    }
    if not model.n_experts or "intermediate_size" in config:  # where all layers have experts it may be missing
        keys["feed_forward_length"] = config.integer("intermediate_size", most=1 << 20)
    if model.n_experts and model.recipe.experts is not None:
        keys["expert_count"] = model.n_experts
        keys["expert_used_count"] = config.integer(model.recipe.experts.used, most=model.n_experts)
    return keys


def _sampling(model: Model, folder: Folder) -> Keys:
    """What generation_config.json advises for sampling, as llama.cpp's converter keeps it."""
    found = read_generation(folder)
    for note in found.notes:
        model.note(note)
    return {f"general.sampling.{key}": value for key, value in found.sampling.items()}
