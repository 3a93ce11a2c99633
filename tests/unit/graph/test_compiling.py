"""Which backend compiles, and that machines which cannot are told before training."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.exc import InvalidCxxCompiler

from lightning_3d.errors import ConfigError
from lightning_3d.graph import compiling
from lightning_3d.graph.compiling import check_compiler, default_backend

CPU = torch.device("cpu")


def no_compiler() -> str:
    raise InvalidCxxCompiler


@pytest.fixture
def _without_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "get_cpp_compiler", no_compiler)
    monkeypatch.setattr(compiling, "has_triton", lambda: False)


@pytest.mark.usefixtures("_without_compilers")
def test_a_machine_without_compilers_is_told() -> None:
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler(?s:.*)CXX"):
        check_compiler(CPU)
    with pytest.raises(ConfigError, match="needs Triton for cuda:0"):
        check_compiler(torch.device("cuda", 0))


@pytest.mark.usefixtures("_without_compilers")
def test_other_backends_need_none() -> None:
    torch.compiler.set_default_backend("aot_eager")
    try:
        assert default_backend() == "aot_eager"
        check_compiler(CPU)
    finally:
        torch.compiler.set_default_backend(None)
    assert default_backend() == "inductor"
