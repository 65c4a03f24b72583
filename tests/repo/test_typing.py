"""mypy --strict over the package in the shape in which it is shipped.

In this tree the folders backends/ and models/ do not lie inside edgeinfer/, and `mypy -p edgeinfer` would check a part
of the package without a word.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from parts import missing

ROOT = Path(__file__).parents[2]
EXTENSIONS = ("edgeinfer.models._strings", "edgeinfer.models.formats._quantize", "edgeinfer._sampler")
EXTENSIONS += ("edgeinfer.backends.native._core", "edgeinfer.models.gguf_reader._mapped")


def ship(to: Path) -> int:
    """Copy the package as the wheel has it, with the stubs of the extensions; gives back the number of modules."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"]["packages"]
    no_code = shutil.ignore_patterns("__pycache__", "heads")
    for package, folder in table.items():
        shutil.copytree(ROOT / folder, to / package, dirs_exist_ok=True, ignore=no_code)
    for folder in [path for path in to.rglob("*") if path.is_dir()]:
        if folder.is_dir() and not any(folder.rglob("*.py")):  # to mypy it would be a package
            shutil.rmtree(folder)
    for extension in EXTENSIONS:
        name = f"{extension.replace('.', '/')}.pyi"
        if not (to / name).exists():
            shutil.copy(stub(extension), to / name)
    return len(list(to.rglob("*.py"))) + len(EXTENSIONS)


def stub(extension: str) -> Path:
    """The stub beside the installed extension."""
    try:
        spec = importlib.util.find_spec(extension)
    except ImportError:
        spec = None
    path = Path(str(spec.origin)).with_name(f"{extension.rpartition('.')[2]}.pyi") if spec else None
    if path is None or not path.exists():
        missing("native", "the stub of the extension is made when it is built: make setup")
    return path


def test_the_package_as_shipped_is_strictly_typed(tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        missing("dev", "mypy is not installed: pip install --group dev")
    n_modules = ship(tmp_path)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / ".mypy_cache" / "shipped"), "-p", "edgeinfer"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    checked = re.search(r"no issues found in (\d+) source files", run.stdout)
    assert checked and int(checked[1]) == n_modules, run.stdout
