from __future__ import annotations

from pathlib import Path

import pytest

from lightning_3d.errors import ConfigError
from lightning_3d.pictures import new_figure, save


@pytest.mark.parametrize(
    ("name", "said"),
    [("plan.abc", r"picture=.*plan\.abc: no picture ends with \.abc"), ("none/plan.png", "cannot be written: No such")],
)
def test_a_picture_that_cannot_be_written_says_so(name: str, said: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    with pytest.raises(ConfigError, match=said) as caught:
        save(new_figure(1, 1), tmp_path / name, "picture")
    assert caught.value.valid is not None


def test_a_picture_without_an_ending_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    save(new_figure(1, 1), tmp_path / "plan", "picture")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
