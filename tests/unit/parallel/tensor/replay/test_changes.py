from __future__ import annotations

from types import FunctionType

from lightning_3d.parallel.tensor.replay.changes import PlainGlobals

SCALE = 2.0


def scaled() -> float:
    return SCALE


def test_code_with_constants_that_have_no_hash() -> None:
    # torch.compile generates such code.
    code = scaled.__code__.replace(co_consts=(*scaled.__code__.co_consts, {}))
    read = PlainGlobals()
    with read.listening():
        FunctionType(code, globals())()
    assert (globals(), "SCALE", 2.0) in read.found
