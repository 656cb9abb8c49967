"""The native part: one plain C library for every Python and every torch; without a compiler it is left out."""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class PlainLibrary(build_ext):
    """A library without a Python module's name and entrance: it is loaded by ctypes."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return a name without the Python's ABI in it."""
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Return nothing: no PyInit function is looked for."""
        return []


class AnyPythonWheel(bdist_wheel):
    """One wheel per platform for all Pythons; without the native part, one for all platforms."""

    def run(self) -> None:
        """Build first: only then is it known whether there is a native part."""
        self.run_command("build")
        library = self.get_finalized_command("build_ext").get_outputs()
        self.root_is_pure = not any(Path(path).exists() for path in library)
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Return a tag that binds the wheel to the platform, if to anything."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "counterpoint.fabric.shm._native",
            sorted(str(path) for path in Path("native").glob("*.cpp")),
            depends=sorted(str(path) for path in Path("native").glob("*.[hi]*")),
            extra_compile_args=[
                "-O3",
                "-fno-math-errno",
                "-pthread",
                "-std=c++17",
                "-fvisibility=hidden",
                "-g0",
                "-Wall",
                "-Wextra",
            ],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": PlainLibrary, "bdist_wheel": AnyPythonWheel},
)
