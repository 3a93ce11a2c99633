from __future__ import annotations

import torch

from lightning_3d.parallel.pipeline.record.step import Origin, Value
from lightning_3d.parallel.pipeline.schedule.boundary import Boundary, Slot, boundary_of, slot_of
from lightning_3d.shards.layout import Layout

LONG = Slot((4,), torch.int64, False)


def _slot(*shape: int, dtype: torch.dtype = torch.float32) -> Slot:
    return Slot(shape, dtype, dtype.is_floating_point)


def test_a_cut_value_is_sent_in_parts() -> None:
    origin = Origin(kind="module", maker="block")
    whole = Value(origin=origin, shape=(2, 8, 3), dtype=torch.bfloat16)
    assert slot_of(whole) == Slot((2, 8, 3), torch.bfloat16, True)
    part = Value(origin=origin, shape=(2, 8, 3), dtype=torch.bfloat16, layout=Layout(1, (8,)), tensor_ranks=4)
    assert slot_of(part) == Slot((2, 2, 3), torch.bfloat16, True)
    assert slot_of(part).nbytes == part.nbytes


def test_equal_microbatches_send_their_values_as_they_are() -> None:
    kind = (_slot(2, 3), LONG)
    boundary = boundary_of([kind, kind])
    assert boundary == Boundary(kind)
    values = (torch.ones(3, 2).t(), torch.arange(4))
    sent = boundary.pack(values, kind)
    assert all(value.is_contiguous() for value in sent)
    for value, back in zip(values, boundary.unpack(sent, kind), strict=True):
        assert torch.equal(value, back)


def test_different_microbatches_are_packed_by_dtype() -> None:
    small, large = (_slot(2, 3), LONG, _slot(2)), (_slot(4, 3),)
    boundary = boundary_of([small, large])
    assert boundary == Boundary((_slot(12), LONG), packed=True)
    values = (torch.randn(2, 3), torch.arange(4), torch.randn(2))
    sent = boundary.pack(values, small)
    assert [tuple(value.shape) for value in sent] == [(12,), (4,)]
    for value, back in zip(values, boundary.unpack(sent, small), strict=True):
        assert torch.equal(value, back)
    (only,) = boundary.unpack(boundary.pack((torch.ones(4, 3),), large), large)
    assert torch.equal(only, torch.ones(4, 3))


def test_gradients_come_back_through_a_packed_boundary() -> None:
    small, large = (_slot(2), _slot(3)), (_slot(7),)
    boundary = boundary_of([small, large])
    first, second = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    (sent,) = boundary.pack((first, second), small)
    received = sent.detach().requires_grad_()
    a, b = boundary.unpack([received], small)
    (2 * a.sum() + 3 * b.sum()).backward()
    torch.autograd.backward(sent, received.grad)
    assert first.grad is not None
    assert second.grad is not None
    assert (first.grad.tolist(), second.grad.tolist()) == ([2, 2], [3, 3, 3])


def test_what_needs_no_gradient_is_sent_without() -> None:
    kind = (Slot((2,), torch.float32, False),)
    (sent,) = boundary_of([kind]).pack((torch.ones(2, requires_grad=True) * 2,), kind)
    assert not sent.requires_grad


def test_what_is_sent_may_be_detached_in_place() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    kind = (_slot(2, 2), _slot(4))
    sent = boundary_of([kind]).pack((weight, (weight * 2).view(4)), kind)
    for value in sent:
        value.detach_()
    assert weight.requires_grad


def test_slots_make_tensors() -> None:
    zeros = _slot(2, 3).on("cpu")
    assert zeros.requires_grad
    assert torch.equal(zeros, torch.zeros(2, 3))
    assert LONG.on("meta").is_meta
