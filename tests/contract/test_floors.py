import pytest

from tests.contract.floors import FLOORS, ISLAND, floor_of, violations
from tests.contract.sources import library_sources


def test_files_import_only_lower_floors() -> None:
    assert violations(library_sources()) == []


def test_most_of_the_library_is_looked_at() -> None:
    sources = library_sources()
    assert {"lightning_3d", "lightning_3d.cli", "lightning_3d.mesh.spec"} <= set(sources)
    assert {floor_of(module) for module in sources} >= {"cli", "doctor", "mesh", "config", "errors"}


def test_a_name_stands_on_one_floor() -> None:
    names = [name for floor in FLOORS for name in floor]
    assert len(names) == len(set(names))
    assert ISLAND not in names


_HOUSE = {
    "lightning_3d": '"""Doc."""',
    "lightning_3d.parallel": '"""Doc."""',
    "lightning_3d.parallel.data": '"""Doc."""',
    "lightning_3d.parallel.data.plan": "import torch",
    "lightning_3d.parallel.tensor": "",
    "lightning_3d.mesh": "from lightning_3d.mesh.spec import X",
    "lightning_3d.mesh.spec": "from lightning_3d.mesh import device\nfrom lightning_3d.errors import E",
    "lightning_3d.mesh.device": "",
    "lightning_3d.errors": "import difflib",
    "lightning_3d.config": "",
    "lightning_3d.reference": "import torch",
}


def test_a_sound_house_has_no_violation() -> None:
    assert violations(_HOUSE) == []


@pytest.mark.parametrize(
    ("module", "text", "complaint"),
    [
        ("lightning_3d.mesh.spec", "import lightning_3d.plan", "imports lightning_3d.plan"),
        ("lightning_3d.mesh.spec", "from lightning_3d import strategy", "imports lightning_3d.strategy"),
        ("lightning_3d.mesh.spec", "from lightning_3d import Mesh3DStrategy", "imports lightning_3d.Mesh3DStrategy"),
        (
            "lightning_3d.mesh",
            "from lightning_3d.config import X\nfrom lightning_3d.strategy import Y",
            "imports lightning_3d.strategy",
        ),
        ("lightning_3d.mesh.spec", "def f():\n    from lightning_3d.graph import X", "imports lightning_3d.graph"),
        (
            "lightning_3d.parallel.tensor",
            "from lightning_3d.parallel import data",
            "imports lightning_3d.parallel.data",
        ),
        (
            "lightning_3d.parallel.tensor",
            "from lightning_3d.parallel.data.plan import X",
            "imports lightning_3d.parallel.data.plan",
        ),
        ("lightning_3d.mesh.spec", "from lightning_3d.reference import gpt", "imports lightning_3d.reference"),
        ("lightning_3d.reference", "from lightning_3d.errors import E", "imports lightning_3d.errors"),
        ("lightning_3d.config", "def f():\n    import torch.nn", "imports torch"),
        ("lightning_3d.config", "from lightning.pytorch import Trainer", "imports lightning"),
        ("lightning_3d.cellar", "x = 1", "stands on no floor"),
        ("lightning_3d.parallel", "from lightning_3d.parallel.data import X", "stands on no floor"),
    ],
)
def test_a_wrong_import_is_seen(module: str, text: str, complaint: str) -> None:
    assert violations(_HOUSE | {module: text}) == [f"{module} {complaint}"]
