from pathlib import Path

import pytest

from lightning_3d.config import search
from lightning_3d.errors import ConfigError


def test_a_checkout_has_them_beside_the_package() -> None:
    assert (search.conf_dir() / "train.yaml").is_file()
    assert search.recipe_files()["demo"].name == "demo.yaml"


def test_an_installed_package_has_them_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site" / "conf").mkdir(parents=True)
    (tmp_path / "conf").mkdir()
    monkeypatch.setattr(search, "_PACKAGE", tmp_path / "site")
    assert search.conf_dir() == tmp_path / "site" / "conf"


def test_a_broken_installation_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_PACKAGE", tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="directory conf/ of lightning_3d is missing"):
        search.conf_dir()
