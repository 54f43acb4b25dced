"""Reduce CUDA libraries to the code that a Hopper GPU runs: ``python -m benchmarks.first_light.hopper LIBRARY...``.

A library has one fat binary per source file, with code for several architectures. The code that Hopper runs is moved to
its front, and zeros, which compress well, fill the rest.
"""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_HOPPER = 90
_MAGIC = 0xBA55ED50
_HEADER = "<IHHQ"
_PTX, _ELF = 1, 2


class _Entry(NamedTuple):
    kind: int
    architecture: int
    content: bytes


def main() -> None:
    """Overwrite the libraries."""
    for path in map(Path, sys.argv[1:]):
        data = bytearray(path.read_bytes())
        dropped = cut(data)
        path.write_bytes(data)
        print(f"{path.name}: {dropped / 1e6:.0f} of {len(data) / 1e6:.0f} MB emptied", file=sys.stderr)


def cut(data: bytearray) -> int:
    """Drop every entry that Hopper cannot use, and return the number of bytes.

    Raises:
        ValueError: ``data`` is not a library with fat binaries.
    """
    position, end = _section(data, b".nv_fatbin")
    dropped = 0
    while position < end:
        if not any(data[position : position + 4]):  # alignment
            position += 4
            continue
        magic, version, header, size = struct.unpack_from(_HEADER, data, position)
        if magic != _MAGIC:
            raise ValueError(f"{magic:#x} at {position} does not start a fat binary")
        start, stop = position + header, position + header + size
        kept = b"".join(entry.content for entry in _needed([*_entries(data, start, stop)]))
        struct.pack_into(_HEADER, data, position, magic, version, header, len(kept))
        data[start:stop] = kept.ljust(size, b"\0")
        dropped += size - len(kept)
        position = stop
    return dropped


def _needed(entries: list[_Entry]) -> list[_Entry]:
    native = [entry for entry in entries if (entry.kind, entry.architecture) == (_ELF, _HOPPER)]
    # Without machine code for it, the driver compiles the newest PTX that is not newer than the GPU.
    ptx = [entry for entry in entries if entry.kind == _PTX and entry.architecture <= _HOPPER]
    return native or sorted(ptx, key=lambda entry: entry.architecture)[-1:]


def _entries(data: bytearray, position: int, stop: int) -> Iterator[_Entry]:
    while position < stop:
        kind, _, header, size, _, _, _, _, architecture = struct.unpack_from("<HHIQIIHHI", data, position)
        end = position + header + size
        yield _Entry(kind, architecture, bytes(data[position:end]))
        position = end


def _section(data: bytearray, wanted: bytes) -> tuple[int, int]:
    """Return the start and end of a section of a 64-bit ELF file."""
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
