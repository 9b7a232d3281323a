"""Deletion vectors: the dead rows of a data file, as compressed bitmaps in the log or in files next to the data.

A bitmap is Delta's magic number followed by the portable 64-bit roaring format. In a file, each bitmap stands between
its size and its checksum, after one byte for the version:

    01 │ size (4, big-endian) │ magic (4, little-endian) │ bitmap │ CRC-32 (4, big-endian) │ size …

A file may hold the vectors of many data files, so a batch writes one file however many it touches. Small vectors can be
stored in the log itself.
"""

from __future__ import annotations

import array
import struct
import uuid
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from penstock.destinations.delta.actions import VectorDescriptor
from penstock.destinations.delta.storage import Storage
from penstock.errors import RESYNC, PenstockError, TableRejected

INLINE, BY_UUID, BY_PATH = "i", "u", "p"
_MAGIC = struct.pack("<I", 1681511377)
_FILE_VERSION = b"\x01"
_SIZE = struct.Struct(">I")
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_Z85_VALUES = {letter: value for value, letter in enumerate(_Z85)}
_UUID_LETTERS = 20


class Vector:
    """An immutable set of row numbers of one file."""

    __slots__ = ("_rows",)
    EMPTY: ClassVar[Vector]

    def __init__(self, bitmap: BitMap64) -> None:
        self._rows = bitmap

    @classmethod
    def of(cls, rows: Iterable[int] | NDArray[Any]) -> Vector:
        """Create a vector from row numbers, in any order, with or without duplicates."""
        numbers = np.ascontiguousarray(np.fromiter(rows, np.uint64) if not isinstance(rows, np.ndarray) else rows)
        return cls(BitMap64(array.array("Q", numbers.astype(np.uint64, copy=False).tobytes())))

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vector) and self._rows == other._rows

    def __hash__(self) -> int:
        return hash((len(self._rows), self._rows.min() if self._rows else None))

    def __repr__(self) -> str:
        return f"Vector({len(self)} rows)"

    def __reduce__(self) -> tuple[Any, ...]:
        return Vector.from_bytes, (self.to_bytes(),)

    def rows(self) -> NDArray[np.uint64]:
        """Return the row numbers, ascending."""
        return np.frombuffer(self._rows.to_array(), np.uint64)

    def union(self, *others: Vector) -> Vector:
        """Return the rows of all vectors."""
        return Vector(BitMap64.union(self._rows, *(other._rows for other in others)))

    def difference(self, other: Vector) -> Vector:
        """Return the rows that the other vector lacks."""
        return Vector(self._rows - other._rows)

    def isdisjoint(self, other: Vector) -> bool:
        """Return True if the vectors have no row in common."""
        return self._rows.isdisjoint(other._rows)

    def alive(self, row_count: int) -> NDArray[np.bool_]:
        """Return a mask over the file's rows: True if a row is not in the vector."""
        mask = np.ones(row_count, np.bool_)
        mask[self.rows()] = False
        return mask

    def to_bytes(self) -> bytes:
        """Return the bitmap as Delta serialises it, with its magic number."""
        bitmap = self._rows.copy()
        bitmap.run_optimize()
        return _MAGIC + bitmap.serialize()

    @classmethod
    def from_bytes(cls, data: bytes) -> Vector:
        """Parse the output of `to_bytes`; raise `ValueError` for anything else."""
        if data[:4] != _MAGIC:
            raise ValueError("not a deletion vector: the magic number is missing")
        if len(data) < 12:
            raise ValueError("the deletion vector is incomplete")
        return cls(BitMap64.deserialize(data[4:]))


Vector.EMPTY = Vector(BitMap64())


def write_vectors(storage: Storage, vectors: Sequence[Vector], *, inline_bytes: int = 0) -> list[VectorDescriptor]:
    """Write vectors, durably, and return the descriptors for the log, in order; one file holds all that are not inline.

    Vectors up to `inline_bytes` are stored in the log; with 0 all of them go to the file.
    """
    name = uuid.uuid4()
    content = bytearray(_FILE_VERSION)
    descriptors: list[VectorDescriptor] = []
    for vector in vectors:
        data = vector.to_bytes()
        if len(data) <= inline_bytes:
            descriptors.append(VectorDescriptor(INLINE, encode_z85(_padded(data)), len(data), len(vector)))
            continue
        descriptors.append(VectorDescriptor(BY_UUID, encode_z85(name.bytes), len(data), len(vector), len(content)))
        content += _SIZE.pack(len(data)) + data + _SIZE.pack(zlib.crc32(data))
    if len(content) > len(_FILE_VERSION):
        storage.put(_file_name("", name), bytes(content))
    return descriptors


def read_vector(storage: Storage, descriptor: VectorDescriptor) -> Vector:
    """Read one vector; raise `TableRejected` if it is missing or not as the log describes it."""
    if descriptor.storage_type == INLINE:
        data = decode_z85(descriptor.path_or_inline)[: descriptor.size]
        return _checked(descriptor, data, "an inline vector")
    path = vector_file(descriptor)
    assert path is not None
    offset = descriptor.offset or 0
    stored = storage.get_range(path, offset, descriptor.size + 2 * _SIZE.size)
    if stored is None:
        raise _broken(path, "is missing")
    if len(stored) < descriptor.size + 2 * _SIZE.size:
        raise _broken(path, "is incomplete")
    (size,) = _SIZE.unpack(stored[: _SIZE.size])
    data = stored[_SIZE.size : -_SIZE.size]
    if size != descriptor.size:
        raise _broken(path, "contains a vector whose size differs from the one in the log")
    if _SIZE.unpack(stored[-_SIZE.size :])[0] != zlib.crc32(data):
        raise _broken(path, "has a wrong checksum")
    return _checked(descriptor, data, path)


def vector_file(descriptor: VectorDescriptor) -> str | None:
    """Return the file of a vector, below the table's folder; None if it is stored in the log."""
    match descriptor.storage_type:
        case "i":
            return None
        case "u":
            encoded = descriptor.path_or_inline
            prefix = encoded[:-_UUID_LETTERS]
            return _file_name(prefix, uuid.UUID(bytes=decode_z85(encoded[-_UUID_LETTERS:])))
        case _:
            raise TableRejected(
                f"a deletion vector of storage type {descriptor.storage_type!r} is outside the table",
                hint="Penstock cannot write to a shallow clone; use a separate table.",
            )


def encode_z85(data: bytes) -> str:
    """Encode four bytes as five letters; the length must be a multiple of four."""
    letters: list[str] = []
    for start in range(0, len(data), 4):
        value = int.from_bytes(data[start : start + 4], "big")
        letters.extend(_Z85[value // 85**power % 85] for power in (4, 3, 2, 1, 0))
    return "".join(letters)


def decode_z85(text: str) -> bytes:
    """Parse the output of `encode_z85`; raise `ValueError` for anything else."""
    if len(text) % 5:
        raise ValueError("the length of z85 text must be a multiple of five")
    found = bytearray()
    for start in range(0, len(text), 5):
        value = 0
        for letter in text[start : start + 5]:
            if letter not in _Z85_VALUES:
                raise ValueError("a character is not part of z85")
            value = value * 85 + _Z85_VALUES[letter]
        if value >= 1 << 32:
            raise ValueError("five characters of z85 exceed four bytes")
        found += value.to_bytes(4, "big")
    return bytes(found)


def _checked(descriptor: VectorDescriptor, data: bytes, where: str) -> Vector:
    try:
        vector = Vector.from_bytes(data)
    except ValueError as error:
        raise _broken(where, "is not a deletion vector") from error
    if len(vector) != descriptor.cardinality:
        raise _broken(where, "marks a different number of rows than the log says")
    return vector


def _file_name(prefix: str, name: uuid.UUID) -> str:
    return f"{prefix}/deletion_vector_{name}.bin" if prefix else f"deletion_vector_{name}.bin"


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def _broken(where: str, what: str) -> PenstockError:
    return TableRejected(
        f"deletion vector: {where} {what}",
        hint=f"Another program changed the table's files. Copy the table again: {RESYNC}.",
    )
