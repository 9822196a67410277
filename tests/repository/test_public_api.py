"""What users may rely on: sorted, importable, documented."""

from __future__ import annotations

import importlib
import inspect

import pytest

import weightgrad

PACKAGES = ["codecs", "core", "kernels", "lab.emulate", "lab.sim", "local", "quantized", "wire"]
MODULES = ["weightgrad", *(f"weightgrad.{package}" for package in PACKAGES)]


@pytest.mark.parametrize("name", MODULES)
def test_all_is_sorted_and_there(name: str) -> None:
    module = importlib.import_module(name)
    assert list(module.__all__) == sorted(module.__all__)
    for entry in module.__all__:
        assert hasattr(module, entry)


@pytest.mark.parametrize("name", MODULES)
def test_public_things_have_a_docstring(name: str) -> None:
    module = importlib.import_module(name)
    for entry in module.__all__:
        thing = getattr(module, entry)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), f"{name}.{entry}"


def test_the_api_is_what_we_meant() -> None:
    modules = ["codecs", "errors", "kernels", "wire"]
    files = ["load_packed", "load_quantized", "save_quantized"]
    assert sorted(weightgrad.__all__) == sorted([*modules, *files, "Site", "WeightGradError", "__version__", "join"])


def test_every_error_hangs_on_the_tree() -> None:
    drawn = weightgrad.errors.__doc__ or ""
    for name, thing in vars(weightgrad.errors).items():
        if inspect.isclass(thing) and issubclass(thing, Exception):
            assert issubclass(thing, weightgrad.WeightGradError)
            assert name in drawn, f"{name} is not in the drawing"
