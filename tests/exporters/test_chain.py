"""The whole chain for every architecture: a checkpoint, its GGUF file, native logits, transformers' logits.

Transformers loads the tiny checkpoints without a missing or an unknown tensor. The tolerance is what a KV cache in
float16 costs; the numpy backend, which rounds the same way, has the same error.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_safetensors
from parts import missing
from tiny_checkpoints import CASES, N_VOCAB, VARIED, to_gguf, write

from edgeinfer.backends import reference_attention
from edgeinfer.backends.base import run_sequence
from edgeinfer.backends.native import NativeBackend
from edgeinfer.backends.reference import ReferenceBackend, ReferenceModel
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.exporters.architectures import all_recipes
from edgeinfer.exporters.checkpoint import Checkpoint
from edgeinfer.exporters.conversion.recipe import Recipe
from edgeinfer.exporters.huggingface import open_folder
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

TOKENS = np.random.default_rng(3).integers(0, N_VOCAB, 20, dtype=np.int32)
RECIPES = [recipe for recipe in all_recipes() if recipe.classes]  # else it is a part of a model
TOLERANCE = 1e-3  # of the largest logit
# Rounding grows with the layers; another window or scale gives 0.5 and more in these.
DEEP = {"gemma2_27b": 1e-2, "exaone4_32b": 1e-2}
# Likewise with gates above 1, and with keys that queries multiply by 3.87: with keys in float32 5e-6.
DEEP |= dict.fromkeys(("laguna", "laguna_per_element", "laguna_sees_all", "muse_glimmer"), 5e-3)
# Scores that are not scaled make of a rounded key another choice: compared with keys and values in float32, and the
# native engine with transformers' keys and values in halves. Of these, float64 and float32 in transformers differ by as
# much as they do from ours (9e-3 and 9e-3 in gemma4): what falls on another half. With unrounded keys it is 8e-2.
SHARP = "gemma4"
HALVES_TOLERANCE = 2e-2


@pytest.fixture(scope="module")
def transformers() -> Any:
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        missing("transformers", "transformers and torch are not installed: pip install torch transformers")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    return transformers


def theirs(transformers: Any, folder: Path, attention: str | None = None) -> np.ndarray:
    """Logits of all tokens.  attention: an implementation by its name, None for the library's choice."""
    import torch

    torch.set_num_threads(1)
    config = json.loads((folder / "config.json").read_text())
    has_images = config["architectures"][0].startswith("MuseGlimmer")  # which has no class for texts alone
    kind = transformers.MuseGlimmerForConditionalGeneration if has_images else transformers.AutoModelForCausalLM
    options = {"dtype": torch.float32, "attn_implementation": attention, "output_loading_info": True}
    model, info = kind.from_pretrained(folder, **options)
    # Of a block that drafts, of which it makes nothing, and of the part for images.
    others = (f"model.layers.{config.get('num_hidden_layers')}.", "model.vision_")
    assert not any(not name.startswith(others) for names in info.values() for name in names), info
    with torch.no_grad():
        return np.asarray(model(torch.tensor(TOKENS[None].astype(np.int64))).logits[0])


def ours(path: Path, backend: NativeBackend | ReferenceBackend | None = None) -> np.ndarray:
    backend = NativeBackend() if backend is None else backend
    with ModelFile.open(path) as file:
        spec = read_spec(file)
        session = backend.load(
            file, spec, backend.plan(file, spec, LoadSettings(len(TOKENS), n_batch=len(TOKENS))), Device(1)
        ).session()
        logits = run_sequence(session, TOKENS, logits="all").logits
        session.close()
    return logits


def as_floats(folder: Path) -> Path:
    """A checkpoint in MXFP4 with the weights that transformers makes of it."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source, tensors = Checkpoint.open(folder), {}
    for name in source.names:
        if name.endswith("_blocks"):
            scales = name.removesuffix("_blocks") + "_scales"
            packed = (torch.tensor(source.data(each).reshape(source.shape(each))) for each in (name, scales))
            floats = convert_moe_packed_tensors(*packed, dtype=torch.float32)
            tensors[name.removesuffix("_blocks")] = ("F32", floats.numpy())
        elif not name.endswith("_scales"):
            tensors[name] = ("F32", source.floats(name))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    found = folder.with_name("floats")
    found.mkdir()
    (found / "config.json").write_text(json.dumps(config))
    write_safetensors(found / "model.safetensors", tensors)
    return found


@pytest.mark.parametrize("case", CASES | VARIED)
def test_logits_are_those_of_transformers(
    case: str, transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    write(folder, case)
    to_gguf(open_folder(folder, vocabulary=False), tmp_path / "model.gguf")
    backend: NativeBackend | ReferenceBackend = NativeBackend()
    if case.startswith(SHARP):
        backend = ReferenceBackend()
        monkeypatch.setitem(reference_attention._CACHE_DTYPES, "f16", np.float32)
    found = ours(tmp_path / "model.gguf", backend)
    expected = theirs(transformers, as_floats(folder) if case.endswith("mxfp4") else folder)
    assert np.abs(found - expected).max() < DEEP.get(case, TOLERANCE) * np.abs(expected).max()
    assert (found.argmax(axis=-1) == expected.argmax(axis=-1)).all()


def add_attention_in_halves() -> str:
    """The name of an attention of Gemma 4 in transformers with keys and values in halves, as in a cache."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.gemma4.modeling_gemma4 import eager_attention_forward

    def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        return eager_attention_forward(module, query, key.half().float(), value.half().float(), *args, **options)

    ALL_ATTENTION_FUNCTIONS.register("in_halves", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("in_halves", eager_mask)
    return "in_halves"


@pytest.fixture
def wide_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of the reference in float64: those in float32 are another BLAS's on another CPU, and so are some halves."""

    def linear(self: ReferenceModel, matrix: Any, bias: Any, x: np.ndarray) -> np.ndarray:
        found = (x.astype(np.float64) @ self.weights_of(matrix).values.T.astype(np.float64)).astype(np.float32)
        return found if bias is None else found + self.weights_of(bias).values

    def expert_linear(self: ReferenceModel, matrix: Any, expert: int, x: np.ndarray) -> np.ndarray:
        return (self.weights_of(matrix).values[expert].astype(np.float64) @ x.astype(np.float64)).astype(np.float32)

    monkeypatch.setattr(ReferenceModel, "linear", linear)
    monkeypatch.setattr(ReferenceModel, "expert_linear", expert_linear)


@pytest.mark.usefixtures("wide_sums")
@pytest.mark.parametrize("case", [case for case in CASES | VARIED if case.startswith(SHARP)])
def test_native_logits_of_sharp_scores_are_those_of_transformers(case: str, transformers: Any, tmp_path: Path) -> None:
    folder, path = tmp_path / "model", tmp_path / "model.gguf"
    write(folder, case)
    to_gguf(open_folder(folder, vocabulary=False), path)
    found, reference = ours(path), ours(path, ReferenceBackend())
    expected = theirs(transformers, folder, add_attention_in_halves())
    size = np.abs(expected).max()
    assert np.abs(found - reference).max() < TOLERANCE * size  # measured: 4e-4 at most
    assert np.abs(found - expected).max() < HALVES_TOLERANCE * size
    assert (found.argmax(axis=-1) == expected.argmax(axis=-1)).all()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.model_types[0])
def test_what_is_taken_for_missing_keys_is_what_transformers_takes(recipe: Recipe, transformers: Any) -> None:
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[recipe.model_types[0]]()
    config.allow_global_per_layer_attribute_access = True  # else one that differs by layer cannot be asked for
    rope = getattr(config, "rope_parameters", {"rope_theta": None})  # Nemotron has no positions
    full, local = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    other = {ours: theirs for theirs, ours in recipe.spellings.items() if hasattr(config, theirs)}
    also = {"rope_theta": full["rope_theta"], "rope_local_base_freq": local.get("rope_theta")}
    also["partial_rotary_factor"] = full.get("partial_rotary_factor")
    also["rope_parameters"] = {key: rope[key] for key in recipe.defaults.get("rope_parameters", {})}
    expected = {key: also.get(key) or getattr(config, other.get(key, key)) for key in recipe.defaults}
    assert dict(recipe.defaults) == expected


def test_a_rotation_that_is_a_little_off_would_be_seen(transformers: Any, tmp_path: Path) -> None:
    """That the tolerance is small enough: a rotation with a base that is 20 % larger fails."""
    for name in ("model", "other"):
        write(tmp_path / name, "mistral")
    path = tmp_path / "other" / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["rope_theta"] *= 1.2
    path.write_text(json.dumps(config))
    to_gguf(open_folder(tmp_path / "other", vocabulary=False), tmp_path / "other.gguf")
    expected = theirs(transformers, tmp_path / "model")
    assert np.abs(ours(tmp_path / "other.gguf") - expected).max() > 2 * TOLERANCE * np.abs(expected).max()
