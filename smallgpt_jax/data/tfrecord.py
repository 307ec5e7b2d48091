"""TFRecord files, read in order and without TensorFlow.

A record is the number of its bytes (uint64), a checksum of that number, the bytes, and a checksum of the bytes
(uint32 each, all little-endian). The checksums are CRC-32C, masked as below.
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO

HEADER = struct.Struct("<QI")
CHECKSUM_BYTES = 4


def records(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yields the records of a file of `size` bytes.

    Raises ValueError where a record is cut off, or where the number of its bytes does not match its checksum. The
    checksum of the bytes themselves is not compared: in Python that takes longer than tokenizing them.
    """
    end = 0
    while end < size:
        start, header = end, file.read(HEADER.size)
        if len(header) < HEADER.size:
            raise ValueError(f"the record at byte {start} is cut off")
        length, checksum = HEADER.unpack(header)
        if checksum != masked_crc32c(header[:8]):
            raise ValueError(f"no record begins at byte {start}")
        end = start + HEADER.size + length + CHECKSUM_BYTES
        if end > size:
            raise ValueError(f"the record at byte {start} is cut off")
        yield file.read(length + CHECKSUM_BYTES)[:length]


def masked_crc32c(data: bytes) -> int:
    """The checksum of `data` as a TFRecord file has it: rotated, and a constant added."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def table() -> list[int]:
    """What each byte adds to a CRC-32C (the reflected Castagnoli polynomial)."""
    entries = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        entries.append(crc)
    return entries


TABLE = table()
