"""Zero the machine code of all GPU architectures but one in a CUDA library, so that it compresses to a fifth.

    python benchmarks/gpu/keep_architecture.py libnccl.so.2 90 libnccl-sm90.so.2

A library holds fat binaries: a header of 16 bytes (magic, version, header size, payload size), then one entry for each
architecture, whose own header has its size and its architecture. Headers stay, so that the loader finds its entry.
"""

import struct
import sys
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)
FATBIN_HEADER = struct.Struct("<IHHQ")
ENTRY_HEADER = struct.Struct("<HHIQ")
ARCHITECTURE_OFFSET = 28
LAST_KIND = 64


def keep_architecture(library: bytearray, architecture: int) -> int:
    """Zero all other architectures' code in place; return the number of zeroed bytes."""
    position = num_zeroed = 0
    while (position := library.find(MAGIC, position)) >= 0:
        _, version, header_size, payload_size = FATBIN_HEADER.unpack_from(library, position)
        entry, end = position + header_size, position + header_size + payload_size
        if version != 1 or header_size != FATBIN_HEADER.size or end > len(library):
            position += len(MAGIC)
            continue
        while entry + 64 <= end:
            kind, _, entry_header_size, code_size = ENTRY_HEADER.unpack_from(library, entry)
            if kind > LAST_KIND:
                break
            code = entry + entry_header_size
            if struct.unpack_from("<I", library, entry + ARCHITECTURE_OFFSET)[0] != architecture:
                library[code : code + code_size] = bytes(code_size)
                num_zeroed += code_size
            entry = code + code_size
        position = end
    return num_zeroed


def main():
    source, architecture, target = sys.argv[1:]
    library = bytearray(Path(source).read_bytes())
    num_zeroed = keep_architecture(library, int(architecture))
    Path(target).write_bytes(library)
    print(f"zeroed {num_zeroed >> 20} of {len(library) >> 20} MiB")


if __name__ == "__main__":
    main()
