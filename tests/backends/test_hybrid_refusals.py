"""What does not run recurrent layers says so by name, before anything is loaded."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from parts import missing
from recurrent_models import RECURRENT_MODELS, write_recurrent_model
from tiny_gated import GATED_ARCHITECTURES, GatedArchitecture, write_tiny_gated
from tiny_gemma4 import GEMMA4_VARIANTS, Gemma4Variant, write_tiny_gemma4
from tiny_hybrids import write_tiny_hybrid
from tiny_latents import write_tiny_latents

from edgeinfer.backends.onnx.decoder import check_spec as check_onnx
from edgeinfer.backends.opencl.parts import check_spec as check_opencl
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.genai.graph import genai_graph
from edgeinfer.exporters.mnn.graph import mnn_graph
from edgeinfer.models import ModelSpec, read_spec
from edgeinfer.models.gguf import ModelFile

Check = Callable[[ModelFile, ModelSpec], object]
CHECKS: dict[str, Check] = {
    "opencl": lambda file, spec: check_opencl(spec, file.path),
    "onnx": lambda file, spec: check_onnx(spec, file.path),
    "genai": lambda file, spec: genai_graph(file, spec, 64, True),
    "mnn": lambda file, spec: mnn_graph(file, spec, 64),
}


@pytest.fixture(scope="module", params=RECURRENT_MODELS)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelFile]:
    with ModelFile.open(write_recurrent_model(tmp_path_factory.mktemp("hybrids") / "m.gguf", request.param)) as model:
        yield model


@pytest.mark.parametrize("backend", CHECKS)
def test_a_recurrent_layer_is_refused_by_its_name(backend: str, file: ModelFile) -> None:
    spec = read_spec(file)
    kind = type(spec.layers[0].mixer).__name__
    with pytest.raises(UnsupportedModel, match=rf"m\.gguf: layers\.0\.mixer is a block {kind}, which the "):
        CHECKS[backend](file, spec)


@pytest.mark.parametrize("backend", CHECKS)
def test_gates_on_attention_are_refused_by_name(backend: str, tmp_path: Path) -> None:
    path = write_tiny_hybrid(tmp_path / "m.gguf", "qwen35", kinds=["attention", "attention"])
    with ModelFile.open(path) as file:
        with pytest.raises(UnsupportedModel, match=r"m\.gguf: layers\.0\.mixer has output_gate, which the "):
            CHECKS[backend](file, read_spec(file))


@pytest.mark.parametrize("backend", CHECKS)
def test_latent_attention_is_refused_by_its_name(backend: str, tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_latents(tmp_path / "m.gguf")) as file:
        with pytest.raises(UnsupportedModel, match=r"m\.gguf: layers\.0\.mixer is a block LatentAttention, which the "):
            CHECKS[backend](file, read_spec(file))


@pytest.mark.parametrize("architecture", GATED_ARCHITECTURES)
@pytest.mark.parametrize("backend", CHECKS)
def test_gates_of_their_own_are_refused_by_name(backend: str, architecture: GatedArchitecture, tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_gated(tmp_path / "m.gguf", architecture)) as file:
        with pytest.raises(UnsupportedModel, match=r"m\.gguf: layers\.0\.mixer has output_gate, which the "):
            CHECKS[backend](file, read_spec(file))


@pytest.mark.parametrize("variant", GEMMA4_VARIANTS)
@pytest.mark.parametrize("backend", CHECKS)
def test_gemma_4_is_refused_by_name(backend: str, variant: Gemma4Variant, tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_gemma4(tmp_path / "m.gguf", variant)) as file:
        names = r"layers\.0\.mixer has normed_values|layer_inputs is a block LayerInputs|layers\.0\.ffn is a block"
        with pytest.raises(UnsupportedModel, match=rf"m\.gguf: ({names}), which the "):
            CHECKS[backend](file, read_spec(file))


def test_heads_cannot_be_trained_for_them(file: ModelFile) -> None:
    if importlib.util.find_spec("torch") is None:
        missing("train", "torch is not installed: pip install 'edgeinfer[train]'")
    from torch import device

    from edgeinfer.training.target import TorchTarget

    with pytest.raises(UnsupportedModel, match=r"layers\.0\.mixer is a block .*, which the training backend cannot"):
        TorchTarget(file, read_spec(file), device("cpu"))
