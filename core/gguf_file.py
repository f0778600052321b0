"""Reads a GGUF file without trusting it: every length is checked against the file before anything is read or allocated.

The reader of the ``gguf`` package trusts the counts in the header (an array that claims 2**60 entries makes it loop
until memory ends) and takes two seconds for a small model, so the header is parsed here. The package still provides
the block sizes and the dequantisation of every storage type.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_NAME_BYTES = 65_535
_MAX_MESSAGE = 1_000  # characters


class FetchError(RuntimeError):
    """A model could not be obtained or converted; the message is one line: what failed, and what to do."""

    def __init__(self, message: str) -> None:
        # Names from a damaged file may hold anything, and any amount of it: also what a terminal obeys.
        line = " ".join(message[:_MAX_MESSAGE].splitlines())
        super().__init__("".join(each if each.isprintable() else "\ufffd" for each in line))


class GgufError(FetchError):
    """The file is not a well-formed GGUF file (truncated, damaged, contradictory)."""


class UnsupportedGguf(FetchError):
    """The file is well formed, but this converter does not cover it; transformers' own loader may."""


@attrs.frozen
class TensorInfo:
    """Where one tensor lies. ``shape`` is row-major (outermost first), ``offset`` and ``num_bytes`` are in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


class GgufFile:
    """The metadata and the tensor table of a GGUF file (version 2 or 3, little-endian), memory-mapped read-only.

    Strings in ``metadata`` are ``str``, numbers are Python numbers, number arrays are numpy views of the file, string
    arrays are lists. Raises ``GgufError`` for anything that does not fit the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as stream:
                self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise GgufError(f"cannot read {self.path}: {error}") from error
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._parse()

    def _fail(self, what: str) -> GgufError:
        return GgufError(f"{self.path} is damaged or truncated: {what} at byte {self._at} of {len(self._data)}")

    def _take(self, num_bytes: int, what: str) -> int:
        """Offset of the next ``num_bytes`` bytes, which exist."""
        start = self._at
        if num_bytes > len(self._data) - start:
            raise self._fail(f"{what} needs {num_bytes} bytes, {len(self._data) - start} are left")
        self._at = start + num_bytes
        return start

    def _number(self, code: str, what: str) -> int:
        return struct.unpack_from(code, self._data, self._take(struct.calcsize(code), what))[0]

    def _string(self, what: str) -> str:
        length = self._number("<Q", what)
        start = self._take(length, what)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._fail(f"{what} is not UTF-8") from error

    def _name(self, what: str) -> str:
        name = self._string(what)
        if len(name) > _MAX_NAME_BYTES:
            raise self._fail(f"{what} of {len(name)} characters")
        return name

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._list(key)
        if kind not in _SCALARS:
            raise self._fail(f"{key} has the unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._data, dtype, 1, self._take(dtype.itemsize, key))[0].item()

    def _list(self, key: str) -> Any:
        kind, count = self._number("<I", key), self._number("<Q", key)
        if kind == _STRING:
            return [self._string(key) for _ in range(count)]  # a false count ends at the end of the file
        if kind not in _SCALARS:
            raise self._fail(f"{key} is an array of the unsupported type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        start = self._take(count * dtype.itemsize, key)
        return np.frombuffer(self._data, dtype, count, start) if count else np.empty(0, dtype)

    def _parse(self) -> None:
        if self._data[: self._take(4, "the magic number") + 4] != b"GGUF":  # a slice is a copy: never of the whole file
            raise GgufError(f"{self.path} is not a GGUF file")
        version = self._number("<I", "the version")
        if version not in (2, 3):
            raise UnsupportedGguf(f"{self.path} has GGUF version {version} (2 and 3 little-endian are read)")
        num_tensors, num_keys = self._number("<Q", "the tensor count"), self._number("<Q", "the key count")
        for _ in range(num_keys):
            key = self._name("a metadata key")
            if key in self.metadata:
                raise self._fail(f"the key {key} appears twice")
            self.metadata[key] = self._value(self._number("<I", key), key)
        found = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._fail(f"general.alignment is {alignment!r}")
        base = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in found:
            self._place(name, shape, kind, base + offset)
        self._check_overlaps()

    def _check_overlaps(self) -> None:
        """No byte belongs to two tensors: a small file cannot stand for a huge model."""
        end = 0
        for info in sorted(self.tensors.values(), key=lambda info: info.offset):
            if info.offset < end:
                raise self._fail(f"tensor {info.name} begins at byte {info.offset}, where another one lies,")
            end = info.offset + info.num_bytes

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._name("a tensor name")
        num_dims = self._number("<I", name)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._fail(f"tensor {name} has {num_dims} dimensions")
        dims = tuple(self._number("<Q", name) for _ in range(num_dims))
        return name, dims[::-1], self._number("<I", name), self._number("<Q", name)

    def _place(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> None:
        if name in self.tensors:
            raise self._fail(f"tensor {name} appears twice")
        try:
            quant = GGMLQuantizationType(kind)
            block, block_bytes = GGML_QUANT_SIZES[quant]
        except (ValueError, KeyError) as error:
            raise UnsupportedGguf(f"{self.path}: tensor {name} has the unknown storage type {kind}") from error
        if min(shape) < 1 or shape[-1] % block:
            raise self._fail(f"tensor {name} of shape {shape} does not divide into blocks of {block}")
        num_bytes = math.prod(shape) // block * block_bytes
        if offset + num_bytes > len(self._data):
            raise self._fail(f"tensor {name} ends at byte {offset + num_bytes}")
        self.tensors[name] = TensorInfo(name, shape, quant, offset, num_bytes)

    def array(self, name: str) -> np.ndarray:
        """The tensor without loss: float16 as float16, bfloat16 as its uint16 bits, everything else as float32."""
        info = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, info.num_bytes, info.offset)
        if info.kind is GGMLQuantizationType.F32:
            return raw.view("<f4").reshape(info.shape)
        if info.kind in (GGMLQuantizationType.F16, GGMLQuantizationType.BF16):
            dtype = "<f2" if info.kind is GGMLQuantizationType.F16 else "<u2"
            return raw.view(dtype).reshape(info.shape)
        rows = raw.reshape(*info.shape[:-1], -1)
        try:
            with np.errstate(all="ignore"):  # a scale may be infinite or no number: so are its values, then
                return dequantize(rows, info.kind).astype(np.float32, copy=False).reshape(info.shape)
        except NotImplementedError as error:
            raise UnsupportedGguf(f"{self.path}: no decoder for {info.kind.name} ({name})") from error
