"""Builds the native kernels and puts the recipes into the wheel; everything else is in pyproject.toml.

Without a C compiler the wheel is pure Python: the kernels are then compiled on first use if there is a compiler, and
otherwise the reference implementations in torch do the work. The kernels have a plain C ABI, so one wheel serves every
Python 3 of a platform.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent


def load_build():
    spec = importlib.util.spec_from_file_location("wg_build", HERE / "weightgrad" / "kernels" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    """build_py that also compiles csrc/ and copies recipes/; an editable install finds both in the checkout."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        recipes = sorted((HERE / "recipes").glob("*.yaml"))
        if not recipes:
            raise SystemExit(f"weightgrad: no recipes in {HERE / 'recipes'}; build from a whole checkout or sdist")
        shipped = Path(self.build_lib) / "weightgrad" / "lab" / "recipes" / "shipped"
        shipped.mkdir(parents=True, exist_ok=True)
        for recipe in recipes:
            self.copy_file(str(recipe), str(shipped / recipe.name))
        build = load_build()
        target = Path(self.build_lib) / "weightgrad" / "kernels" / build.library_name()
        try:
            build.compile_library(target)
        except build.BuildError as error:
            print(f"weightgrad: wheel without native kernels: {error}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """A wheel for this platform and any Python 3, if it contains the compiled kernels."""

    def finalize_options(self):
        super().finalize_options()
        try:
            load_build().find_compiler()
        except Exception:
            return
        self.root_is_pure = False

    def get_tag(self):
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
