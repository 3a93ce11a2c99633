"""A tensor that shows its global shape and holds this rank's part: the data, without what operations do to it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_3d.errors import ModuleError
from lightning_3d.shards import nodes
from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.layout import Layout, is_even

_make_wrapper = torch.Tensor._make_wrapper_subclass


class ShardTensor(torch.Tensor):
    """A global view of a local part.

    Code that knows the sizes of the whole (``x.view(batch, steps, heads, width // heads)``) runs on it unmodified.
    Autograd sees only the local tensor. Classes below say what operations do.

    Args:
        local: This rank's part, a plain tensor.
        dim: The dim that is cut; negative counts from the end.
        segments: Global lengths of the segments of the dim.
        group: The ranks it is cut over.
    """

    __slots__ = ("_dim", "_group", "_local", "_segments")

    _local: Tensor
    _dim: int
    _segments: tuple[int, ...]
    _group: ShardGroup

    @staticmethod
    def __new__(cls: type[Self], local: Tensor, dim: int, segments: tuple[int, ...], group: ShardGroup) -> Self:
        """Makes the wrapper; all there is to do, as instances are made in each operation."""
        shape = list(local.shape)
        if dim < 0:
            dim += len(shape)
        shape[dim] = segments[0] if len(segments) == 1 else shape[dim] * group.size
        shard: Self = _make_wrapper(cls, shape, dtype=local.dtype, device=local.device)
        shard._local, shard._dim, shard._segments, shard._group = local, dim, segments, group
        return shard

    def __init__(self, *_: Any) -> None:
        """Nothing is left to do."""

    def like(self, local: Tensor, dim: int, segments: tuple[int, ...]) -> Self:
        """Returns the result of an operation on this shard.

        Args:
            local: This rank's part of the result.
            dim: The dim of the result that is cut; negative counts from the end.
            segments: Global lengths of its segments.
        """
        cls = type(self)
        return cls.__new__(cls, local, dim, segments, self._group)

    @property
    def cut(self) -> Layout:
        """How it is cut."""
        return Layout(self._dim, self._segments)

    @property
    def uneven(self) -> bool:
        """Whether the last rank's part is shorter than the others."""
        return not is_even(self._segments, self._group.size)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Where only compiled kernels arrive that took the tensor past torch's function protocol.

        Raises:
            ModuleError: Always: gradients would be lost without a sign.
        """
        raise ModuleError(
            f"{func} was called from compiled code with a tensor that is cut over the tensor-parallel ranks.",
            fix="tensor_plan={'<module that calls it>': 'replicate'}, or torch.library.custom_op around the kernel",
        )

    # ---- metadata: global where it is a size, the local tensor's else ----

    @property
    def _length(self) -> int:
        segments = self._segments
        return segments[0] if len(segments) == 1 else self._local.size(self._dim) * self._group.size

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Global shape."""
        sizes = list(self._local.shape)
        sizes[self._dim] = self._length
        return torch.Size(sizes)

    def size(self, dim: int | None = None) -> Any:
        """Global shape, or its length along ``dim``."""
        if dim is None:
            return self.shape
        local = self._local
        return self._length if dim % local.dim() == self._dim else local.size(dim)

    def dim(self) -> int:
        """Number of dims."""
        return self._local.dim()

    def numel(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    def stride(self, dim: int | None = None) -> Any:
        """Strides of a dense whole in the order of this one's dims."""
        shape, steps = self.shape, self._local.stride()
        strides, step = [0] * len(shape), 1
        for each in sorted(range(len(shape)), key=lambda each: (steps[each], -each)):
            if steps[each] or shape[each] == 1:
                strides[each] = step
                step *= max(shape[each], 1)
        return tuple(strides) if dim is None else strides[dim]

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        """As the local part."""
        return self._local.is_contiguous(*args, **kwargs)

    def is_floating_point(self) -> bool:
        """As the local part."""
        return self._local.is_floating_point()

    def is_complex(self) -> bool:
        """As the local part."""
        return self._local.is_complex()

    def is_inference(self) -> bool:
        """As the local part."""
        return self._local.is_inference()

    def element_size(self) -> int:
        """As the local part."""
        return self._local.element_size()

    def get_device(self) -> int:
        """As the local part."""
        return self._local.get_device()

    def __len__(self) -> int:
        return int(self.size(0))

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.cut}, rank {self._group.rank})"

    def __format__(self, spec: str) -> str:
        # Where one rank alone prints, it must not wait for the others.
        return format(repr(self), spec)

    ndimension = dim
    nelement = numel
    __str__ = __repr__

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the whole."""
        return math.prod(self.shape) * self._local.element_size()

    @property
    def _base(self) -> None:  # type: ignore[override]
        return None

    # ---- what autograd keeps at the local tensor ----

    @property
    def requires_grad(self) -> bool:
        """As the local part."""
        return self._local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._local.requires_grad = value

    @property
    def grad(self) -> Self | None:
        """The gradient, cut like this tensor."""
        gradient = self._local.grad
        return None if gradient is None else self.like(gradient, self._dim, self._segments)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._local.grad = None if value is None else self.part_of(value)

    @property
    def data(self) -> Self:
        """The values, without history."""
        return self.like(self._local.data, self._dim, self._segments)

    @data.setter
    def data(self, value: Tensor) -> None:
        self._local.data = self.part_of(value)

    def part_of(self, value: Tensor) -> Tensor:
        """Returns this rank's part of a value of the same shape, as this tensor is cut.

        Args:
            value: A replicated tensor, or a shard that may be cut in another way.
        """
        if isinstance(value, ShardTensor):
            if value.cut == self.cut:
                return value._local
            value = nodes.gather(value._local, value._group, value._dim, value._segments)
        return nodes.part(value, self._group, self._dim, self._segments)


def _of_local(name: str) -> property:
    return property(lambda shard: getattr(shard._local, name), doc="As the local part.")


_LOCAL_PROPERTIES = (
    "_backward_hooks", "_grad_fn", "_has_symbolic_sizes_strides", "_version", "device", "dtype", "grad_dtype",
    "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_mkldnn", "is_mps", "is_nested", "is_quantized",
    "is_sparse", "is_sparse_csr", "is_xla", "is_xpu", "itemsize", "layout", "name", "names", "ndim", "output_nr",
    "retains_grad",
)  # fmt: skip
for _name in _LOCAL_PROPERTIES:
    setattr(ShardTensor, _name, _of_local(_name))
