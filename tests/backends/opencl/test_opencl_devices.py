"""OpenCL devices: what is listed, what is tried, and what is said where something is missing."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from parts import missing
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.backends.opencl import OpenCLDevice, check_device, choose_device, library, list_devices
from edgeinfer.backends.opencl import device as device_module
from edgeinfer.backends.opencl.probe import as_json
from edgeinfer.cli.devices import _device_lines
from edgeinfer.common.errors import BackendLost, BackendUnavailable, InvalidArgument

SOURCES = Path(device_module.__file__).parent


@pytest.fixture
def without_pyopencl(monkeypatch: pytest.MonkeyPatch) -> None:
    library.open_library.cache_clear()
    monkeypatch.setitem(sys.modules, "pyopencl", None)


def devices_process(*arguments: str, **environment: str) -> str:
    """What the command prints in such an environment. PATIENCE: seconds that it waits for the drivers."""
    patience = environment.pop("PATIENCE", "60")
    script = (
        f"import edgeinfer.backends.driver_probe as p; p.PATIENCE_SECONDS = {patience}; "
        "from edgeinfer.cli import main; main()"
    )
    command = [sys.executable, "-P", "-c", script, "devices", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_devices_are_listed_and_pass_their_check(opencl_device: OpenCLDevice) -> None:
    found = json.loads(devices_process("--json"))
    assert found["cpu"]["n_cores"] >= 1 and found["cpu"]["isa"] in found["cpu"]["isas"]
    assert found["cpu"]["available_memory_bytes"] > 0 and found["cpu"]["reason"] is None
    of_index = {device["index"]: device for device in found["opencl"]["devices"]}
    own = of_index[opencl_device.info.index]
    assert own["reason"] is None and own["memory_bytes"] >= own["max_buffer_bytes"] > 0 and own["compute_units"] >= 1
    text = devices_process()
    assert text.startswith("CPU") and f"OpenCL {own['index']}" in text and own["name"] in text


def test_without_pyopencl_the_cpu_is_listed_and_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "pyopencl.py").write_text("raise ModuleNotFoundError('No module named pyopencl')")
    run = devices_process(PYTHONPATH=str(tmp_path))
    assert run.startswith("CPU") and "pip install 'edgeinfer[opencl]'" in run
    assert json.loads(devices_process("--json", PYTHONPATH=str(tmp_path)))["opencl"]["devices"] == []


def test_without_pyopencl_a_model_is_refused_with_the_extra_to_install(without_pyopencl: None, tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"pip install 'edgeinfer\[opencl\]'"):
        edgeinfer.load(write_tiny_model(tmp_path / "m.gguf"), backend="opencl")


def test_without_a_driver_the_cpu_is_listed_and_it_is_said_what_to_install(
    opencl_device: OpenCLDevice, tmp_path: Path
) -> None:
    run = devices_process(OCL_ICD_VENDORS=str(tmp_path), OCL_ICD_FILENAMES="")
    assert run.startswith("CPU")
    assert "no OpenCL driver (ICD) is installed" in run and "pocl-opencl-icd" in run


@pytest.mark.parametrize(
    "function, patience, words",
    [("abort();", 60, "ended the process that asked it"), ("sleep(600);", 3, "not answer within 3 s")],
)
def test_a_driver_that_crashes_or_hangs_leaves_the_cpu(
    function: str, patience: int, words: str, opencl_device: OpenCLDevice, tmp_path: Path
) -> None:
    compiler = shutil.which("cc") or missing("compiler", "cc is not installed")
    source, library = tmp_path / "driver.c", tmp_path / "driver.so"
    source.write_text(
        "#include <stdlib.h>\n#include <unistd.h>\n"
        f"__attribute__((constructor)) static void start(void) {{ {function} }}"
    )
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    (tmp_path / "driver.icd").write_text(str(library))
    run = devices_process(OCL_ICD_VENDORS=str(tmp_path), OCL_ICD_FILENAMES="", PATIENCE=str(patience))
    assert run.startswith("CPU") and words in run


def test_a_device_that_builds_no_kernel_is_listed_with_the_reason(
    opencl_device: OpenCLDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dot.cl").write_text((SOURCES / "dot.cl").read_text())
    (tmp_path / "check.cl").write_text("kernel void dot_products(global int* out) { out[0] = no_such_name; }")
    monkeypatch.setattr(device_module, "_SOURCES", tmp_path)
    device, *_ = json.loads(as_json())["devices"]
    assert "the driver cannot compile this kernel" in device["reason"]
    lines = _device_lines(device | {"draft_device": "opencl:0"})
    assert any(line.startswith("  not usable") and device["reason"] in line for line in lines)


def test_a_device_that_calculates_wrong_is_found_out(
    opencl_device: OpenCLDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("dot.cl", "check.cl"):
        (tmp_path / name).write_text((SOURCES / name).read_text().replace("numbers[i], 0)", "numbers[i], 1)"))
    monkeypatch.setattr(device_module, "_SOURCES", tmp_path)
    assert "calculates wrong" in str(check_device(opencl_device.info))


def test_packed_dot_products_that_the_compiler_lacks_are_not_used(opencl_device: OpenCLDevice) -> None:
    if opencl_device.has_integer_dot:
        pytest.skip("this device has them")
    claiming = replace(opencl_device.info, extensions=(library.INTEGER_DOT,))
    assert claiming.has_integer_dot and not OpenCLDevice(claiming).has_integer_dot
    assert check_device(claiming) is None


def test_a_gpu_comes_before_a_cpu_and_a_device_can_be_named(
    opencl_device: OpenCLDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = replace(opencl_device.info, index=0, kind="cpu")
    gpu = replace(cpu, index=1, kind="gpu")
    monkeypatch.setattr(library, "list_devices", lambda: [cpu, gpu])
    assert choose_device() == gpu and choose_device(0) == cpu
    monkeypatch.setenv("EDGEINFER_OPENCL_DEVICE", "0")
    assert choose_device() == cpu
    for wrong, words in [("7", "there is no OpenCL device 7"), ("gpu", "must be the number of a device")]:
        monkeypatch.setenv("EDGEINFER_OPENCL_DEVICE", wrong)
        with pytest.raises(InvalidArgument, match=words):
            choose_device()


def test_a_device_that_has_gone_is_unavailable(opencl_device: OpenCLDevice) -> None:
    with pytest.raises(BackendUnavailable, match="has gone"):
        OpenCLDevice(replace(opencl_device.info, index=len(list_devices())))


def test_more_memory_than_there_is_is_a_lost_backend(opencl_device: OpenCLDevice) -> None:
    with pytest.raises(BackendLost, match=r"allocating \d+ bytes failed: .*out of memory") as caught:
        opencl_device.buffer(64 * opencl_device.info.memory_bytes)
    assert caught.value.exit_code == 5


def test_buffers_keep_what_is_written(opencl_device: OpenCLDevice, rng: np.random.Generator) -> None:
    values = rng.standard_normal((7, 13), dtype=np.float32)
    found = opencl_device.read(opencl_device.upload(values.T), np.empty((13, 7), dtype=np.float32))
    assert np.array_equal(found, values.T)
