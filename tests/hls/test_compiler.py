"""Where C++ and Verilog are built: without a folder for caches, and with a compiler that has arguments."""

from pathlib import Path

import pytest

from edgeinfer.common.errors import BackendUnavailable
from edgeinfer.hls import compiler


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler, "cache_folder", lambda: tmp_path / "cache")
    assert compiler.build_folder("rtl") == tmp_path / "cache" / "rtl" and (tmp_path / "cache" / "rtl").is_dir()
    (tmp_path / "file").write_bytes(b"")
    for cache in (tmp_path / "file", None):
        monkeypatch.setattr(compiler, "cache_folder", lambda cache=cache: cache)
        own = compiler.build_folder("rtl")
        assert own.is_dir() and tmp_path not in own.parents and own == compiler.build_folder("rtl")


def test_the_compiler_may_have_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("#!/bin/sh\n")
    (tmp_path / "mine").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "mine -m64")
    assert compiler.cpp_compiler() == ["mine", "-m64"]
    monkeypatch.setenv("CXX", "none")
    with pytest.raises(BackendUnavailable, match="a C\\+\\+ compiler is needed .* found neither"):
        compiler.cpp_compiler()


def test_a_library_that_is_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.so").write_bytes(b"")
    with pytest.raises(BackendUnavailable, match="a.so must be a library for this machine: .*; delete it"):
        compiler.load_library(tmp_path / "a.so")
