"""The models that most of these tests use, and a machine whose speed decides nothing."""

import pytest
from steady_clock import steady_machine
from tiny_models import write_tiny_model


@pytest.fixture(scope="module", autouse=True)
def _steady(tmp_path_factory):
    """Costs that were measured so are not for the tests of other folders."""
    with steady_machine(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=256)


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory):
    """The same floats in another type: it mostly agrees with the model."""
    return write_tiny_model(tmp_path_factory.mktemp("draft") / "draft.gguf", tensor_type="Q8_0", n_embd=256)
