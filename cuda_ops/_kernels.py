"""The CUDA kernels in the op library: finds the fat binaries that nvcc put there, and asks cuda_ops._C about them."""

import struct
from pathlib import Path

FATBIN_MAGIC = 0xBA55ED50


def elf_sections(data: bytes):
    """(name, contents) of each section of a 64-bit little-endian ELF file; ValueError if it is not a sound one."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")

    def section(offset, size):
        if offset + size > len(data):
            raise ValueError(f"{size} bytes at {offset} lie outside of the file of {len(data)} bytes")
        return data[offset : offset + size]

    table, entry_size, count, names_index = struct.unpack("<Q10xHHH", section(40, 24))
    if count == 0:
        return []
    if entry_size != 64 or names_index >= count:
        raise ValueError("unsound section table")
    headers = [struct.unpack("<IIQQQQ", section(table + i * 64, 40)) for i in range(count)]

    def contents(header):
        _, kind, _, _, offset, size = header
        return b"" if kind == 8 else section(offset, size)  # 8: SHT_NOBITS takes no room in the file

    names = contents(headers[names_index])
    sections = []
    for header in headers:
        end = names.find(b"\0", header[0])
        if end < 0:
            raise ValueError("unsound section name")
        sections.append((names[header[0] : end].decode(), contents(header)))
    return sections


def fat_binaries(path: Path) -> list[bytes]:
    """The fat binaries of a library, one for each .cu file: one after the other in .nv_fatbin, each with a header of
    magic, version, size of the header (16 bits) and size of the rest (64 bits)."""
    found = []
    for name, section in elf_sections(Path(path).read_bytes()):
        if name != ".nv_fatbin":
            continue
        offset = 0
        while offset + 16 <= len(section):
            magic, _, header_size, size = struct.unpack_from("<IHHQ", section, offset)
            if magic != FATBIN_MAGIC:
                offset += 8  # padding up to the alignment of the next one
                continue
            end = offset + header_size + size
            if end > len(section):
                raise ValueError("a fat binary ends behind its section")
            found.append(section[offset:end])
            offset = end + -end % 8
    return found


def kernels(path: Path, device: int = 0) -> list[dict]:
    """What cuda_ops._C.kernels says of every kernel in the library, by name."""
    from . import _C

    rows = [row for code in fat_binaries(path) for row in _C.kernels(code, device)]
    return sorted(rows, key=lambda row: row["name"])
