"""The models that most of these tests use."""

import pytest
from tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=256)


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory):
    """The same floats in another type: it mostly agrees with the model."""
    return write_tiny_model(tmp_path_factory.mktemp("draft") / "draft.gguf", tensor_type="Q8_0", n_embd=256)
