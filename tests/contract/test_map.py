from pathlib import Path

from tests.contract.house import PAGE, house_text
from tests.contract.map import MAP, map_text


def test_map_is_of_these_files() -> None:
    assert MAP.read_text() == map_text(), "run: python -m tests.contract.map"


def test_library_files_say_what_they_are() -> None:
    library = map_text().split("## conf")[0]
    assert "| `cli.py` | The command line" in library
    assert [line for line in library.splitlines() if line.endswith("|  |")] == []


def test_map_takes_the_first_words_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "lightning_3d").mkdir()
    (tmp_path / "lightning_3d" / "a.py").write_text('"""What it\nis | does.\n\nMore."""\n')
    (tmp_path / "lightning_3d" / "empty.py").write_text("")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "b.yaml").write_text("# @package _global_\n# A run.\nx: 1\n")
    (tmp_path / "conf" / "c.yaml").write_text("_target_: torch.optim.AdamW\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("import a\n")
    lines = map_text(tmp_path).splitlines()
    assert "| `a.py` | What it is \\| does. |" in lines
    assert "| `b.yaml` | A run. |" in lines
    assert "| `c.yaml` | `torch.optim.AdamW` |" in lines
    assert not any("test_a.py" in line for line in lines)
    assert not any("empty.py" in line for line in lines)


def test_house_is_of_these_floors() -> None:
    assert PAGE.read_text() == house_text(), "run: python -m tests.contract.house"
