"""What `pyproject.toml` says about the package: its version, entry points, dependencies and files."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import weightgrad
from weightgrad import extras
from weightgrad.cli import app

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="Python 3.10 has no tomllib")

ROOT = Path(__file__).parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
COMMANDS: dict[str, str] = PROJECT["entry-points"]["weightgrad.commands"]
EXCEPT = {"torch"}  # constraints-oldest.txt says why
NOT_INSTALLED = {"mypy", "pytest-cov", "ruff", "types-pyyaml"}  # scripts/test-oldest checks neither style nor coverage
NOT_INSTALLED |= {"accelerate", "compressed-tensors", "kubeflow-trainer-api", "lightning", "peft", "tensorboard"}
NOT_INSTALLED |= {"transformers"}  # nor integrations,
NOT_INSTALLED |= {"triton"}  # nor GPUs


def pins(name: str) -> dict[str, str]:
    """The versions of a constraints file, by the normalized name of the package."""
    lines = (ROOT / name).read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normalized(package): version for package, version in pairs}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def bounds(requirements: list[str]) -> dict[str, str]:
    """The lower bound of each requirement."""
    bare = [requirement.split(";")[0] for requirement in requirements]
    found = [re.fullmatch(r"([\w.-]+)>=([\w.]+)", requirement) for requirement in bare]
    assert all(found), requirements
    return {normalized(match[1]): match[2] for match in found if match}


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without zeros at the end: 6 and 6.0 are the same."""
    return tuple(int(number) for number in re.sub(r"(\.0)+$", "", version).split("."))


def test_the_version_is_written_once() -> None:
    assert weightgrad.__version__ == importlib.metadata.version("weightgrad")
    files = ROOT.glob("weightgrad/**/*.py")
    assert not [path for path in files if f'"{PROJECT["version"]}"' in path.read_text()]


def test_the_version_of_the_documents_is_that_of_the_package() -> None:
    tags = re.findall(r"weightgrad:(\d[\w.]*)", (ROOT / "deploy" / "Dockerfile").read_text())
    assert set(tags) == {PROJECT["version"]}
    citation = ROOT / "CITATION.cff"
    if citation.exists():
        assert re.findall(r"^version: *\"?([\w.]+)", citation.read_text(), flags=re.M) == [PROJECT["version"]]


def test_the_package_says_who_made_it_and_where_it_is() -> None:
    assert PROJECT["authors"]
    assert {"Homepage", "Documentation", "Repository", "Changelog", "Issues"} == PROJECT["urls"].keys()
    assert all(url.startswith("https://") for url in PROJECT["urls"].values())
    assert (ROOT / PROJECT["readme"]).exists()
    assert all((ROOT / name).exists() for name in PROJECT["license-files"])


@pytest.mark.parametrize("target", [*PROJECT["scripts"].values(), *COMMANDS.values()])
def test_every_entry_point_loads(target: str) -> None:
    assert callable(importlib.metadata.EntryPoint("name", target, "group").load())


def test_commands_are_sorted() -> None:
    assert list(COMMANDS) == sorted(COMMANDS)


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    oldest = pins("constraints-oldest.txt")
    wanted = {**bounds(PROJECT["dependencies"]), **bounds(PROJECT["optional-dependencies"]["dev"])}
    for name, version in wanted.items():
        if name not in EXCEPT | NOT_INSTALLED:
            assert release(oldest[name]) == release(version), name


def test_what_the_scripts_install_is_pinned_and_allowed() -> None:
    pinned = pins("constraints.txt")
    extras = PROJECT["optional-dependencies"]
    wanted = {**bounds(PROJECT["dependencies"]), **bounds(extras["dev"]), **bounds(extras["demo"])}
    for name, version in wanted.items():
        assert release(pinned[name]) >= release(version), name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, built without a network."""
    pytest.importorskip("setuptools", minversion="77", reason="building a wheel without a network needs setuptools")
    out, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "recipes", source / "recipes")
    shutil.copytree(ROOT / "weightgrad", source / "weightgrad", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--wheel-dir", str(out), str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_a_wheel_has_every_file_that_the_code_reads(wheel: Path) -> None:
    names = {re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", name) for name in zipfile.ZipFile(wheel).namelist()}
    tracked = subprocess.run(["git", "ls-files", "weightgrad"], cwd=ROOT, capture_output=True, text=True, check=False)
    files = tracked.stdout.split() or [
        str(path.relative_to(ROOT))
        for path in ROOT.glob("weightgrad/**/*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    ]
    assert sorted(set(files) - names) == []
    recipes = {f"weightgrad/lab/recipes/shipped/{path.name}" for path in ROOT.glob("recipes/*.yaml")}
    assert recipes
    assert {name for name in names if name.endswith(".yaml")} == recipes, "each recipe once"
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]


def test_an_installed_wheel_runs_in_an_empty_directory(wheel: Path, tmp_path: Path) -> None:
    installed, empty = tmp_path / "site-packages", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(installed)
    for inside in installed.glob("*.data/*lib"):  # as pip does with a wheel of a platform
        shutil.copytree(inside, installed, dirs_exist_ok=True)
    empty.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "weightgrad", *words]
        done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    settings = ("training.steps=2", "training.evaluate_on=20", "training.evaluate_every=2")
    run("simulate", "laptop", *(word for setting in settings for word in ("--set", setting)))
    (model,) = empty.glob("runs/laptop-*/model.safetensors")
    assert model.stat().st_size > 0
    said = run("doctor")
    if list(installed.glob("weightgrad/kernels/*.so")):
        assert "compiled on this machine" not in said
        assert "kernels     native" in said
    else:
        assert shutil.which("cc") is None, "there is a compiler, and the wheel has no kernels"


# -- what an import loads, and what an extra would add ------------------------------------------------

IMPORTED = """
import json, sys, torch
before = set(sys.modules)
import weightgrad
first = set(sys.modules) - before
weightgrad.join
print(json.dumps([sorted(first), sorted(set(sys.modules) - before)]))
"""


def test_an_import_loads_few_packages() -> None:
    """Few packages are loaded fast on any machine; `benchmarks/import_time.py` has the seconds."""
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    of_import, of_join = (
        {name.partition(".")[0] for name in names} - sys.stdlib_module_names for names in json.loads(done.stdout)
    )
    allowed = {"weightgrad", "numpy", "torch", "xxhash"}
    assert {name for name in of_import if not name.startswith("_")} <= allowed
    allowed |= {"cryptography", "grpc", "prometheus_client", "safetensors", "torchgen", "typing_extensions"}
    assert {name for name in of_join if not name.startswith("_")} <= allowed


def test_every_extra_says_what_it_adds() -> None:
    assert extras.ADDS.keys() == PROJECT["optional-dependencies"].keys()
    assert all(extras.ADDS.values())


def test_the_doctor_tells_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_installed", lambda package: package != "plotly")
    output = CliRunner().invoke(app, ["doctor"]).output
    assert "pages with charts, and images: not installed (plotly); pip install 'weightgrad[demo]'" in output
    assert "[images]: CIFAR-10, and folders of images: installed" in output


MISSING = [
    ("plotly", "from weightgrad.lab.report.page import plotly_javascript; plotly_javascript()", "weightgrad[demo]"),
    ("PIL", "from weightgrad.lab.data.image_reader import read_image; read_image('x.png', 8)", "weightgrad[images]"),
    ("sklearn", "from weightgrad.lab.data.builtin import digits; digits()", "pip install scikit-learn"),
    ("ray", "import weightgrad.integrations.ray", "weightgrad[ray]"),
    ("transformers", "import weightgrad.integrations.transformers", "weightgrad[transformers]"),
    ("lightning", "import weightgrad.integrations.lightning", "weightgrad[lightning]"),
    ("accelerate", "import weightgrad.integrations.accelerate", "weightgrad[accelerate]"),
]
WITHOUT = """
import importlib.util, json, sys
missing = {"pytorch_lightning", *sys.argv[1].split(",")}
sys.modules.update({name: None for name in missing})
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in missing else find(name, *more)
said = []
for code in sys.argv[2:]:
    try:
        exec(code)
        said.append("nothing")
    except Exception as error:
        said.append(str(error))
print(json.dumps(said))
"""


def test_what_an_extra_would_add_is_said_where_it_is_missing() -> None:
    names, codes = ",".join(module for module, _, _ in MISSING), [code for _, code, _ in MISSING]
    command = [sys.executable, "-c", WITHOUT, names, *codes]
    said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    for (module, _, wanted), found in zip(MISSING, said, strict=True):
        assert wanted in found, f"without {module}: {found}"
