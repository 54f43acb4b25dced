"""Cut CUDA libraries down to what a Hopper GPU runs: ``python -m benchmarks.first_light.hopper LIBRARY...``.

A library has one fat binary per source file, with code for several architectures. The driver chooses an entry by its
header and reads no other, so the other entries are overwritten with zeros, which compress to nothing.
"""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ARCHITECTURE = 90
_MAGIC = 0xBA55ED50
_PTX, _ELF = 1, 2


class _Entry(NamedTuple):
    kind: int
    architecture: int
    start: int
    end: int


def main() -> None:
    """Overwrite the libraries."""
    for path in map(Path, sys.argv[1:]):
        data = bytearray(path.read_bytes())
        dropped = cut(data)
        path.write_bytes(data)
        print(f"{path.name}: {dropped / 1e6:.0f} of {len(data) / 1e6:.0f} MB emptied", file=sys.stderr)


def cut(data: bytearray) -> int:
    """Empty every entry that Hopper has no use for.

    Returns:
        bytes emptied.
    """
    dropped = 0
    for entries in _fat_binaries(data):
        native = [entry for entry in entries if (entry.kind, entry.architecture) == (_ELF, ARCHITECTURE)]
        # Without machine code for it, the driver compiles the newest PTX that is not newer than the GPU.
        ptx = [entry for entry in entries if entry.kind == _PTX and entry.architecture <= ARCHITECTURE]
        kept = native or sorted(ptx, key=lambda entry: entry.architecture)[-1:]
        for entry in entries:
            if entry not in kept:
                data[entry.start : entry.end] = bytes(entry.end - entry.start)
                dropped += entry.end - entry.start
    return dropped


def _fat_binaries(data: bytearray) -> Iterator[list[_Entry]]:
    position, end = _section(data, b".nv_fatbin")
    while position < end:
        if not any(data[position : position + 4]):  # alignment
            position += 4
            continue
        magic, _, header, size = struct.unpack_from("<IHHQ", data, position)
        if magic != _MAGIC:
            raise ValueError(f"{magic:#x} at {position} does not start a fat binary")
        stop = position + header + size
        yield list(_entries(data, position + header, stop))
        position = stop


def _entries(data: bytearray, position: int, stop: int) -> Iterator[_Entry]:
    while position < stop:
        kind, _, header, size, _, _, _, _, architecture = struct.unpack_from("<HHIQIIHHI", data, position)
        start = position + header
        yield _Entry(kind, architecture, start, start + size)
        position = start + size


def _section(data: bytearray, wanted: bytes) -> tuple[int, int]:
    """Where a section of a 64-bit ELF file starts and ends."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", data, table + index * size) for index in range(count)]
    text = sections[names][4]
    for name, _, _, _, offset, length in sections:
        if data[text + name : text + name + len(wanted) + 1] == wanted + b"\0":
            return offset, offset + length
    raise ValueError(f"no section {wanted.decode()}")


if __name__ == "__main__":
    main()
