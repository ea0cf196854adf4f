"""Two steps of the build that pyproject.toml cannot say: the messages of RocketMQ's gRPC protocol, the compiled codec.

RocketMQ publishes the definitions of `apache.rocketmq.v2` with its clients. The one on PyPI carries them as serialised
descriptors, which is all that a compiler needs; so they are read out of it, as bytes (nothing of the client is
imported), and compiled into `timeball/edges/grpc/_generated`. What is there is never edited and never committed.

The files get names of ours: a program that imports Timeball's stubs and the client's own finds two modules then, and
the generated code imports its neighbours by the place where they lie.

The hot codec of the remoting protocol is compiled where Cython and a C compiler are. Without them the package is whole
too, and runs the reference in Python. It is compiled for the Python that builds it. With `bdist_wheel
--py-limited-api=cp311`, it is compiled for the stable ABI: one wheel for each Python from 3.11 on, but slower.
"""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sysconfig
import tempfile
from importlib.metadata import files
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

SOURCE = "rocketmq-python-client"
NAMES = ("definition", "service")  # admin.proto has one call, to change a log level, which no client makes
PACKAGE = Path("timeball", "edges", "grpc", "_generated")
SOURCES = Path("src", "timeball")
STABLE_ABI = "0x030B0000"  # of the oldest Python that we run on


class BuildStubs(build_py):
    """Make the stubs before the package's files are gathered."""

    def run(self) -> None:
        """Write the stubs, then gather the package's files.

        setuptools lists the packages before any command runs, so a clean tree's list lacks the one that is made here.
        """
        generate(Path(__file__).parent / "src")
        made = ".".join(PACKAGE.parts)
        if made not in self.packages:
            self.packages = [*self.packages, made]
        super().run()


def generate(root: Path) -> None:
    """Write the stubs below `root`, unless they are younger than this file and what they are made from."""
    from grpc_tools import protoc

    published = {path.stem: Path(str(path.locate())) for path in files(SOURCE) or [] if path.suffix == ".py"}
    sources = [published[f"{name}_pb2"] for name in NAMES]
    made = [root / PACKAGE / f"{name}_pb2{end}" for name in NAMES for end in (".py", ".pyi")]
    if all(path.exists() for path in made) and min(p.stat().st_mtime for p in made) > max(
        p.stat().st_mtime for p in [*sources, Path(__file__)]
    ):
        return
    (root / PACKAGE).mkdir(parents=True, exist_ok=True)
    (root / PACKAGE / "__init__.py").write_text('"""Made by setup.py: not to be edited."""\n')
    with tempfile.TemporaryDirectory() as folder:
        described = Path(folder, "definitions")
        described.write_bytes(descriptors([descriptor(path) for path in sources]))
        names = [f"{PACKAGE.as_posix()}/{name}.proto" for name in NAMES]
        arguments = [f"--descriptor_set_in={described}", f"--python_out={root}", f"--pyi_out={root}"]
        if protoc.main(["protoc", *arguments, *names]) != 0:
            raise SystemExit("the definitions of RocketMQ's gRPC protocol could not be compiled")


def descriptor(path: Path) -> bytes:
    """The serialised FileDescriptorProto in a module that protoc has written."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "AddSerializedFile":
            found = ast.literal_eval(node.args[0])
            assert isinstance(found, bytes)
            return found
    raise SystemExit(f"{path.name} of {SOURCE} has no descriptor: another version?")


def descriptors(serialised: list[bytes]) -> bytes:
    """A FileDescriptorSet of these and of what they import, with our names of the files."""
    from google.protobuf import descriptor_pb2, duration_pb2, timestamp_pb2

    found = descriptor_pb2.FileDescriptorSet()
    for known in (timestamp_pb2, duration_pb2):
        known.DESCRIPTOR.CopyToProto(found.file.add())
    for data in serialised:
        file = found.file.add()
        file.ParseFromString(data)
        file.name = f"{PACKAGE.as_posix()}/{Path(file.name).name}"
        for at, name in enumerate(file.dependency):
            if not name.startswith("google/"):
                file.dependency[at] = f"{PACKAGE.as_posix()}/{Path(name).name}"
    return found.SerializeToString()


# ---- the compiled codec ---------------------------------------------------------------------------------------


class BuildCodec(build_ext):
    """Compile the modules that `codec_modules` lists; the C that Cython writes goes where the objects go."""

    def initialize_options(self) -> None:
        """Set Cython's own option; it is not there without Cython."""
        super().initialize_options()
        self.cython_c_in_temp = True

    def finalize_options(self) -> None:
        """Choose the stable ABI if the wheel is to have it, and as many compilers as there are cores."""
        if self.distribution.get_option_dict("bdist_wheel").get("py_limited_api"):
            for module in self.distribution.ext_modules:
                module.py_limited_api = True
                module.define_macros = [("Py_LIMITED_API", STABLE_ABI)]
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def run(self) -> None:
        """Note where the modules go, before setuptools takes that away; then compile."""
        self.in_tree = bool(self.inplace) or self.editable_mode
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Compile one module, and name it first: it takes some seconds.

        A module in the source tree that is younger than its source stays. setuptools would compile it again for an
        editable install, in a temporary folder and without a word.
        """
        module = Path("src", self.get_ext_filename(self.get_ext_fullname(ext.name)))
        if self.in_tree and is_younger(module, [*ext.sources, *ext.depends]):
            return
        print(f"compiling {ext.name}", flush=True)
        super().build_extension(ext)


def is_younger(made: Path, sources: list[str]) -> bool:
    """Return whether the file exists and is younger than all of its sources."""
    return made.exists() and made.stat().st_mtime > max(Path(each).stat().st_mtime for each in sources)


def codec_modules() -> list[Extension]:
    """Return the modules to compile: none without Cython or a compiler that finds Python's headers."""
    if find_spec("Cython") is None or not compiles("#include <Python.h>\n"):
        print("the codec is not compiled: no Cython, or no C compiler with Python's headers")
        return []
    return [
        Extension(
            ".".join(path.with_suffix("").parts[1:]),
            [str(path)],
            depends=[Path(__file__).name, *(str(each) for each in sorted(SOURCES.rglob("*.pxd")))],
            # Cython writes a conversion that this code does not use. Python's own -g would be four fifths of the bytes.
            extra_compile_args=["-Wno-unused-function", "-g0"],
            optional=True,
        )
        for path in compiled_sources()
    ]


def compiled_sources() -> list[Path]:
    """Return the sources of the modules: each .pyx, and each .py that has a .pxd with types for the compiler."""
    typed = (path.with_suffix(".py") for path in SOURCES.rglob("*.pxd"))
    return sorted([*SOURCES.rglob("*.pyx"), *(path for path in typed if path.exists())])


def compiles(source: str) -> bool:
    """Return whether the C compiler that builds modules for this Python takes this."""
    command = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    command += ["-I", sysconfig.get_paths()["include"], "-fsyntax-only", "-x", "c", "-"]
    try:
        return subprocess.run(command, input=source, capture_output=True, text=True).returncode == 0
    except OSError:
        return False


setup(
    cmdclass={"build_py": BuildStubs, "build_ext": BuildCodec},
    ext_modules=codec_modules(),
)
