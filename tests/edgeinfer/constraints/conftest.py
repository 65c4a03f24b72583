"""What these tests use; without llguidance they are skipped."""

import pytest
from constrained import grammar  # noqa: F401
from tiny_models import write_tiny_model

import edgeinfer

pytestmark = pytest.mark.usefixtures("grammar")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=512)


@pytest.fixture(scope="module")
def loaded(native):
    """Engines of files, with the tokens that end a text, closed at the end."""
    engines = {}

    def load(path, **options):
        key = path, str(options)
        if key not in engines:
            engines[key] = edgeinfer.load(path, **options)
        return engines[key]

    yield load
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="module")
def engine(loaded, model):
    return loaded(model, draft="none")
