"""Fixtures of the tests that draft: engines of tiny models that never stop by themselves."""

from collections.abc import Callable, Iterator

import pytest
from parts import missing

import edgeinfer
from edgeinfer.engine import Engine, open_backend
from edgeinfer.errors import BackendUnavailable


@pytest.fixture(scope="module")
def native() -> None:
    """For tests that need the native engine."""
    try:
        open_backend("native")
    except BackendUnavailable as error:
        missing("native", str(error))


@pytest.fixture
def opened() -> Iterator[Callable[..., Engine]]:
    """Loads engines without stop tokens, which a random model draws at random, and closes them."""
    engines: list[Engine] = []

    def load(path, **options) -> Engine:
        engines.append(edgeinfer.load(path, **options))
        engines[-1].tokenizer.stop_ids = frozenset()
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()


@pytest.fixture
def plain(opened: Callable[..., Engine], model: object) -> Engine:
    """The engine of a module's model, without drafts."""
    return opened(model, draft="none")
