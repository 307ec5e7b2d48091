"""TFRecord files, read sequentially and without TensorFlow.

A record consists of the length of its data in bytes (uint64), a checksum of the length (uint32), the data, and a
checksum of the data (uint32), all little-endian. The checksums are masked CRC-32C, see `masked_crc32c`.
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO

HEADER = struct.Struct("<QI")
CHECKSUM_BYTES = 4


def read_records(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Raises ValueError if a record is truncated or its length does not match the checksum.

    The checksum of the data is not verified, because computing it in Python takes longer than tokenizing.
    """
    end = 0
    while end < size:
        start, header = end, file.read(HEADER.size)
        if len(header) < HEADER.size:
            raise ValueError(f"the record at byte {start} is truncated")
        length, checksum = HEADER.unpack(header)
        if checksum != masked_crc32c(header[:8]):
            raise ValueError(f"no record starts at byte {start}")
        end = start + HEADER.size + length + CHECKSUM_BYTES
        if end > size:
            raise ValueError(f"the record at byte {start} is truncated")
        yield file.read(length + CHECKSUM_BYTES)[:length]


def masked_crc32c(data: bytes) -> int:
    """Returns the checksum that TFRecord files store: CRC-32C, rotated, plus a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def make_crc32c_table() -> list[int]:
    """Reflected Castagnoli polynomial."""
    entries = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        entries.append(crc)
    return entries


TABLE = make_crc32c_table()
