"""From the last stage to all ranks of a pipeline: outputs, logged values, and what metrics compute."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from io import BytesIO
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.errors import Lightning3DError, ModuleError
from lightning_3d.graph.parameters import class_name

T = TypeVar("T")

# What fits into it travels in one broadcast, with its length before it: a loss and some logged values do.
_FIRST, _LENGTH = 4096, 8


class Relay:
    """Sends what the ranks of the last stage have found to the other ranks of their pipeline.

    Tensors travel as values on the CPU and arrive on the device of this rank; a part of the module travels as its name.

    Args:
        module: The user's module.
        group: The ranks of this pipeline: those of one data and one tensor position.
        source: Which of them owns the last stage.
        device: This rank's device.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, source: int, device: torch.device) -> None:
        self._module = module
        self._group = group
        self._source = source
        self._device = device

    @property
    def sends(self) -> bool:
        """Whether this rank owns the last stage."""
        return self._group.rank() == self._source

    def share(self, find: Callable[[], T], *, large: bool = True) -> T:
        """Returns on every rank of the pipeline what ``find()`` returns on that of the last stage. A collective.

        Args:
            find: Called on the rank of the last stage only.
            large: Send tensors with dims; else they arrive as tensors on the meta device.

        Raises:
            Lightning3DError: On every rank, what ``find`` raised.
        """
        if not self.sends:
            received: T = self._received()
            return received
        error: Lightning3DError | None = None
        found: Any = None
        try:
            found = find()
            content = self._packed(found, large=large)
        except Lightning3DError as raised:
            error, content = raised, self._packed(raised, large=large)
        self._send(content)
        if error is not None:
            raise error
        result: T = found
        return result

    def packed(self, value: Any) -> bytes | None:
        """Returns a value as bytes that may be shared inside of another one, all tensors whole; None if none can be."""
        try:
            return self._packed(value, large=True)
        # Objects of the user's raise what they like.
        except Exception:
            return None

    def unpacked(self, content: bytes) -> Any:
        """Returns what was `packed` on the rank of the last stage."""
        return _Unpacker(BytesIO(content), self._module, self._device).load()

    def _send(self, content: bytes) -> None:
        message = len(content).to_bytes(_LENGTH, "big") + content
        self._broadcast(message[:_FIRST].ljust(_FIRST, b"\0"), _FIRST)
        if len(message) > _FIRST:
            self._broadcast(message[_FIRST:], len(message) - _FIRST)

    def _broadcast(self, part: bytes, size: int) -> bytes:
        """Sends so many bytes, or receives them where ``part`` is empty."""
        buffer = torch.frombuffer(bytearray(part or size), dtype=torch.uint8).to(self._device)
        dist.broadcast(buffer, group_src=self._source, group=self._group)
        return buffer.cpu().numpy().tobytes()

    def _received(self) -> Any:
        first = self._broadcast(b"", _FIRST)
        size = int.from_bytes(first[:_LENGTH], "big") + _LENGTH
        content = first[_LENGTH:size]
        if size > _FIRST:
            content += self._broadcast(b"", size - _FIRST)
        found = self.unpacked(content)
        if isinstance(found, Lightning3DError):
            raise found
        return found

    def _packed(self, value: Any, *, large: bool) -> bytes:
        content = BytesIO()
        try:
            _Packer(content, self._module, self._device, large=large).dump(value)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ModuleError(
                f"what a step of {class_name(self._module)} returns or logs cannot be sent to the other ranks of the "
                f"pipeline: {error}.",
                valid="tensors, plain values, containers and objects that pickle",
            ) from error
        return content.getvalue()


class _Packer(pickle.Pickler):
    """Pickles values; tensors as numbers, so that none is tied to the sender's device."""

    def __init__(self, file: BytesIO, module: nn.Module, device: torch.device, *, large: bool) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._module = module
        self._device = device
        self._large = large

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        """Returns what is sent in place of a tensor or of a part of the module."""
        if isinstance(obj, nn.Module):
            name = next((name for name, child in self._module.named_modules() if child is obj), None)
            return None if name is None else ("module", name)
        if not isinstance(obj, Tensor):
            return None
        shape = tuple(obj.shape)
        if shape and not self._large:
            return ("elsewhere", obj.dtype, shape)
        return ("tensor", obj.dtype, shape, _bytes(obj), obj.device.type == self._device.type)


class _Unpacker(pickle.Unpickler):
    """Reads what a `_Packer` has written."""

    def __init__(self, file: BytesIO, module: nn.Module, device: torch.device) -> None:
        super().__init__(file)
        self._module = module
        self._device = device

    def persistent_load(self, pid: Any) -> Any:
        """Returns the tensor or the part of the module that was sent."""
        kind, *rest = pid
        if kind == "module":
            return self._module.get_submodule(rest[0])
        if kind == "elsewhere":
            dtype, shape = rest
            return torch.empty(shape, dtype=dtype, device="meta")
        dtype, shape, content, here = rest
        flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return flat.reshape(shape).to(self._device if here else "cpu")


def _bytes(tensor: Tensor) -> bytes:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    content: bytes = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return content
