"""What is shipped holds everything a run needs, and nothing else."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.contract.sources import ROOT


def _build(kind: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=90, check=True)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("wheel", tmp_path_factory.mktemp("wheel"))


def _relative(folder: str, kind: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(kind)}


def test_wheel_holds_the_package_with_its_configuration(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    configuration = {f"lightning_3d/{name}" for folder in ("conf", "recipes") for name in _relative(folder, "*.yaml")}
    assert configuration
    assert names == _relative("lightning_3d", "*.py") | {"lightning_3d/py.typed"} | configuration


def test_wheel_brings_command_and_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "lightning-3d = lightning_3d.cli:main" in texts["entry_points.txt"]
    assert "Apache License" in texts["LICENSE"]


def test_installed_package_finds_its_recipes(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import lightning_3d.config.search as search, lightning_3d.config.compose as compose;"
        "print(search.conf_dir()); print(compose.compose_run(['recipe=demo']).task_name)"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-c", f"import sys; sys.argv = ['lightning-3d']; {code}"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90, check=True
    )
    assert done.stdout.splitlines()[0] == str(tmp_path / "site" / "lightning_3d" / "conf")


def test_source_archive_can_be_built_and_tested(tmp_path: Path) -> None:
    with tarfile.open(_build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt", "conf/train.yaml"} <= names
    assert {"lightning_3d/cli.py", "tests/contract/test_wheel.py", "docs/index.md"} <= names
    assert not any(name.startswith((".git/", ".venv", "shared")) for name in names)
