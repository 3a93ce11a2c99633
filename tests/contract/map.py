"""The map of the code: one line per file, its words taken from the file. ``python -m tests.contract.map`` writes it."""

import ast
from pathlib import Path

from tests.contract.sources import ROOT

MAP = ROOT / "docs" / "map.md"
_FOLDERS = ("lightning_3d", "conf", "recipes", "tests")
_MIRROR_OF_SOURCE = "test_"
_HEAD = """# Map of the code

One line per file, in its own first words. `make docs` writes this page; a test compares it with the files.
"""


def map_text(root: Path = ROOT) -> str:
    """Returns the page: a section for each folder with files, top folders in order."""
    sections = [_HEAD]
    for top in _FOLDERS:
        files = [path for kind in ("*.py", "*.yaml") for path in (root / top).rglob(kind)]
        for folder in sorted({path.parent for path in files}):
            rows = [_row(path) for path in sorted(files) if path.parent == folder and _is_shown(path)]
            if rows:
                sections.append(
                    f"## {folder.relative_to(root)}\n\n| file | what |\n|---|---|\n" + "\n".join(rows) + "\n"
                )
    return "\n".join(sections)


def _is_shown(path: Path) -> bool:
    # A test that mirrors a source file is found by its name; it is shown only if it has something to say.
    return bool(path.read_text().strip()) and not (path.name.startswith(_MIRROR_OF_SOURCE) and not _first_words(path))


def _row(path: Path) -> str:
    return f"| `{path.name}` | {_first_words(path).replace('|', chr(92) + '|')} |"


def _first_words(path: Path) -> str:
    text = path.read_text()
    if path.suffix == ".py":
        docstring = ast.get_docstring(ast.parse(text)) or ""
        return " ".join(docstring.split("\n\n")[0].split())
    comments = (line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    targets = (f"`{line.split()[1]}`" for line in text.splitlines() if line.startswith("_target_:"))
    return next((words for words in (*comments, *targets) if not words.startswith("@package")), "")


if __name__ == "__main__":
    MAP.write_text(map_text())
