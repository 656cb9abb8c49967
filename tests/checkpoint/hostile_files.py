"""What an attacker, or a damaged disk, can put in place of a checkpoint's files."""

import gc
import json
import os
import time
from pathlib import Path

from counterpoint.checkpoint.manifest import _own_sha256

SHARD = "shard-00000.safetensors"


def forge(folder, change):
    """Change the manifest of a checkpoint, and give it the right checksum."""
    content = json.loads((folder / "manifest.json").read_text())
    change(content)
    write_forged(folder, content)


def write_forged(folder, content):
    """Write a manifest with the right checksum."""
    content.pop("sha256", None)
    text = json.dumps({**content, "sha256": _own_sha256(content)})
    (folder / "manifest.json").write_text(text)


def write_bomb(folder, place, text):
    """Put a text of JSON at a place of a manifest, and give it the right checksum, unless it is none."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["sha256"]
    holder = {"state": content["state"], "slices": content["files"][0]}.get(place, content)
    holder["bomb" if place == "state" else place] = "BOMB"
    text = json.dumps(content).replace('"BOMB"', text)
    try:
        sha256 = _own_sha256(json.loads(text))
    except (RecursionError, ValueError):
        sha256 = "0" * 64
    (folder / "manifest.json").write_text(f'{text[:-1]}, "sha256": "{sha256}"}}')


def replace_by_pipe(path):
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


def replace_by_link(path, target):
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def declare_boxes(folder, num_rows):
    """Declare a tensor of many rows in two columns, which has no byte in any file."""

    def change(content):
        shape = [num_rows, 2]
        record = {**content["files"][0]["slices"][0], "dtype": "uint8", "global_shape": shape, "shape": [num_rows, 1]}
        start = record["start"]
        content["files"][0]["slices"] = [
            {
                **record,
                "key": str(at),
                "offset": [0, at],
                "start": start + at * num_rows,
                "stop": start + (at + 1) * num_rows,
            }
            for at in range(2)
        ]
        content["files"][0]["num_bytes"] = start + 2 * num_rows

    forge(folder, change)


def measure(work):
    """Return the seconds that a call takes, and the bytes by which it raises the process's memory at its peak."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here on
    before, start = read_memory("VmRSS"), time.perf_counter()
    work()
    return time.perf_counter() - start, read_memory("VmHWM") - before


def read_memory(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
