"""Build the C library of the moving averages; all other settings are declared in files.

The library is optional: without a C compiler, the package is installed without it and computes with PyTorch.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

LIBRARY = "luna_mega.kernels.recurrence._native"
SOURCE, HEADER = "kernels/recurrence/native.c", "kernels/recurrence/native_vectors.h"


class BuildLibrary(build_ext):
    """Build a shared library for ctypes: one file serves all versions of Python."""

    def get_ext_filename(self, fullname):
        return fullname.replace(".", os.sep) + ".so"

    def build_extensions(self):
        for ext in self.extensions:  # of an earlier build, which a wheel without a compiler would contain
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        super().build_extensions()
        # Strict editable installs fail if the file of a listed extension is missing.
        self.extensions = [ext for ext in self.extensions if Path(self.get_ext_fullpath(ext.name)).exists()]

    def copy_extensions_to_source(self):
        for ext in self.extensions:  # of an editable install
            built, target = Path(self.build_lib, self.get_ext_filename(ext.name)), Path(self.get_ext_fullpath(ext.name))
            # Other processes may have loaded the old library or be loading it, so it is not overwritten.
            partial = target.with_suffix(f".{os.getpid()}.so")
            try:
                shutil.copy(built, partial)
                partial.replace(target)
            except OSError as error:  # the checkout cannot be written
                self.warn(str(error))
                self.extensions = []


class Wheel(bdist_wheel):
    """Build a wheel for all versions of Python, on one platform if it contains the library and on all otherwise."""

    def get_tag(self):
        folder = self.get_finalized_command("build").build_lib
        built = Path(folder, LIBRARY.replace(".", os.sep) + ".so").exists()
        return "py3", "none", super().get_tag()[2] if built else "any"


library = Extension(
    LIBRARY,
    [SOURCE],
    depends=[HEADER],
    # GCC's -std=c11 disables contraction to fused multiply-add.
    extra_compile_args=["-std=gnu11", "-O2", "-g0", "-pthread", "-ffp-contract=fast"],
    extra_link_args=["-pthread", *(["-s"] if sys.platform.startswith("linux") else [])],
    optional=True,
)
# Microsoft's compiler does not have the vector extensions of GCC and Clang.
setup(ext_modules=[] if os.name == "nt" else [library], cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel})
