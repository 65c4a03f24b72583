"""All native code under AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from parts import missing, required

from edgeinfer.backends.native import available_isas

ROOT = Path(__file__).parents[4]
BUILD = ROOT / "build" / "sanitize"
# What compares with other engines runs the same code as what compares the bits, pre-tokenisers are another library's,
# and the longest texts take long: of them, those of gemma2 have layers with windows and without.
LEFT_OUT = "reference or 200_tokens or 200_damaged or those_of_llama_cpp or pre_tokenisers"
LEFT_OUT += " or (long_texts_are_exact and not gemma2)"
# Formats and architectures run code of their own: each format in one architecture, each architecture in Q8_0.
LEFT_OUT += " or (test_native and depend_on_nothing and (qwen2 or ((F32 or Q4_K) and not llama)) and not qwen2-Q8_0)"
TESTS = ["tests/backends/native/kernels/test_matmul.py", "tests/backends/native/kernels/test_ternary.py"]
TESTS += ["tests/backends/native/test_native.py", "tests/backends/native/test_sinks.py"]
TESTS += ["tests/backends/native/test_experts.py", "tests/backends/native/test_disk_experts.py"]
TESTS += ["tests/backends/native/test_changed_files.py", "tests/backends/test_draft_head.py"]
TESTS += ["tests/backends/native/test_shared_pool.py", "tests/backends/native/test_layer_states.py"]
TESTS += ["tests/backends/native/test_hybrids.py"]
TESTS += ["tests/backends/native/test_latents.py", "tests/backends/native/test_gemma4.py"]
TESTS += ["tests/backends/native/test_assistant.py"]
TESTS += ["tests/models/test_arrays.py", "tests/models/test_gguf.py", "tests/models/test_tokenizer.py"]
TESTS += ["tests/models/formats/test_quantising.py"]
TESTS += ["tests/edgeinfer/test_sampling.py"]
# Of random walks over sessions of hybrids one with keys and values, and one without.
LEFT_OUT += " or (text_of_a_hybrid and (qwen35-1 or lfm2 or states-6))"
# Those of processes of their own, which have other extensions, and signals that are ASan's own.
LEFT_OUT += " or signal or bus_error or last_mapping"

pytestmark = pytest.mark.timeout(2400)  # it compiles the engine, and runs many tests slowly


@pytest.fixture(scope="module")
def sanitized() -> Path:
    """Folder of the extensions built with both sanitizers. Kept between runs: only what changed is compiled again."""
    if "asan" not in required() and not BUILD.exists():
        missing(
            "asan", "the build with sanitizers takes minutes and is made where it is asked for: EDGEINFER_REQUIRE=asan"
        )
    import nanobind

    compiler = shutil.which("g++")
    if compiler is None or shutil.which("cmake") is None:
        missing("asan", "g++ and cmake are needed to build with sanitizers")
    configure = ["cmake", "-S", ROOT / "backends", "-B", BUILD, f"-Dnanobind_DIR={nanobind.cmake_dir()}"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_CXX_COMPILER={compiler}"]
    configure += ["-DEI_SANITIZE=address,undefined", "-DCMAKE_BUILD_TYPE=Debug"]
    configure += [f"-DEI_SETS={','.join(available_isas())}"]  # the others cannot be run here
    subprocess.run(configure, check=True, capture_output=True)
    build = ["cmake", "--build", BUILD, "--target", "_core", "_strings", "_mapped", "_quantize", "_sampler", "-j", "2"]
    subprocess.run(build, check=True, capture_output=True)
    return BUILD


def library_of_the_compiler(name: str) -> str:
    found = subprocess.run(["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    path = found.stdout.strip()
    if not Path(path).is_absolute():
        missing("asan", f"the compiler has no {name}")
    return path


def test_kernels_and_decoder_run_clean_under_sanitizers(sanitized: Path) -> None:
    # libstdc++ too: the interceptors look for it when they load.
    libraries = [library_of_the_compiler(name) for name in ("libasan.so", "libstdc++.so")]
    environment = os.environ | {
        "EDGEINFER_TEST_CORE": str(next(sanitized.glob("native/_core.*.so"))),
        "EDGEINFER_TEST_STRINGS": str(next(sanitized.glob("models/_strings.*.so"))),
        "EDGEINFER_TEST_MAPPED": str(next(sanitized.glob("models/_mapped.*.so"))),
        "EDGEINFER_TEST_QUANTIZE": str(next(sanitized.glob("models/_quantize.*.so"))),
        "EDGEINFER_TEST_SAMPLER": str(next(sanitized.glob("sampling/_sampler.*.so"))),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaks at exit
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", "-k", f"not ({LEFT_OUT})", *TESTS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[:4000]
