"""Everything that reads bytes of others: each reader with right inputs, from which wrong ones are made."""

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import cast

import torch
from isal.isal_zlib import crc32
from torch import nn, optim
from torch.optim.lr_scheduler import ExponentialLR

from counterpoint.checkpoint import Checkpoint, load, save
from counterpoint.checkpoint.folder_lock import LockOwner
from counterpoint.checkpoint.manifest import parse_manifest
from counterpoint.checkpoint.per_rank_save import read_parts
from counterpoint.checkpoint.shard import write_shard
from counterpoint.cli.config import file_layer
from counterpoint.compat.kvstore.optimizer_state_file import load_states, save_states
from counterpoint.compat.kvstore.updaters import TorchUpdater
from counterpoint.elastic.parameter_keys import BYTES_PER_ROW, parse_layout, rows_to_text, text_to_rows
from counterpoint.errors import ProtocolError
from counterpoint.fabric.frames import (
    CHECKSUM,
    FIXED_HEADER,
    HEADER_BYTES,
    FrameHeader,
    FrameKind,
    decode,
    encode,
)
from counterpoint.fabric.key_value_store import KeyValueTable, to_text
from counterpoint.json_reader import JsonValue, parse_json
from counterpoint.launchers.exit_report import ErrorRecord
from counterpoint.model.model_profile import (
    BatchSizeProfile,
    LayerKey,
    LayerProfile,
    ModelProfile,
    ProfiledOn,
    format_profile,
    load_profile as load_profile_file,
    parse_profile,
)
from counterpoint.plan.plan import Plan
from counterpoint.plan.registry import STRATEGIES
from counterpoint.planner.pipeline.layer_graph import GraphNode, chain_graph, format_graph, parse_graph
from counterpoint.program.text import parse_program
from counterpoint.program.trace import Trace, TraceEvent
from counterpoint.ps.consistency import Asp
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.message_codec import decode_message, encode_message
from counterpoint.ps.process.disk_layout import read_shard_state
from counterpoint.ps.process.job_file import read_job_file
from counterpoint.ps.process.message_framing import unpack_batch
from counterpoint.ps.write_ahead_log import decode_log, encode_chunks, encode_record
from counterpoint.rpc import frame as rpc_frame
from counterpoint.rpc.channel import FrameWriter
from counterpoint.rpc.frame import RpcMessage
from counterpoint.rpc.job_key import read_key
from counterpoint.rpc.records import CrcRecordWriter
from counterpoint.rpc.tensor_codec import as_memoryview
from counterpoint.spark.module_codec import decode_model_table, decode_module, encode_module
from counterpoint.strategies.options import option_types
from counterpoint.training.callbacks.run_folder import read_lines_until
from counterpoint.training.checkpointing.train_state import check_train_state, decode_position, find_scalar_flaw
from counterpoint.training.reporting.progress_renderers import parse_relayed
from counterpoint.value_codec import HEADER_SIZE, decode_value, encode_value, format_json
from counterpoint.world.cluster_file import parse_cluster
from counterpoint.world.process_stat import read_process_stat
from tests.ps.message_examples import MESSAGES, PUSH, STATE
from tests.rpc.frame_mutations import (
    LIMITS,
    MESSAGES as RPC_MESSAGES,
    caller_and_server,
    received,
    receiver,
    taken,
    wire_of,
)
from tests.training.trainers import fit
from tests.world.test_cluster_file import HOSTS

"\0".encode("unicode_escape")  # the codec of `terminal_text`, which Python imports when it is used first
GOLDEN = Path(__file__).parents[1] / "golden"
PLAN = """\
plan:
  strategy: pipeline(2) * data(2)
  num_microbatches: 4
"""


@dataclass(frozen=True)
class Reader:
    """What reads bytes, and bytes that it can read."""

    read: Callable[[bytes], object]
    examples: Callable[[], list[bytes]]


@cache
def scratch() -> Path:
    """Return a folder that is removed when the process ends; in memory, where the system has such a file system."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="counterpoint-fuzz-", dir=memory if os.access(memory, os.W_OK) else None)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@cache
def opened(name: str) -> tuple[Path, int]:
    """Return a file that only this user can read, and a descriptor to write it again and again."""
    path = scratch() / name
    path.parent.mkdir(exist_ok=True)
    return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)


def written(name: str, raw: bytes) -> Path:
    path, descriptor = opened(name)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, raw, 0)
    return path


def text_reader(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda raw: parse(raw.decode("utf-8", "replace"))


def file_reader(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    return lambda raw: read(written(name, raw))


def sealed(raw: bytes) -> bytes:
    """A frame with the checksums that belong to its bytes, so that what is behind them is read too."""
    changed = bytearray(raw)
    if len(raw) >= HEADER_BYTES:
        changed[FIXED_HEADER.size - 4 : FIXED_HEADER.size] = crc32(bytes(raw[HEADER_BYTES:])).to_bytes(4, "little")
        CHECKSUM.pack_into(changed, FIXED_HEADER.size, crc32(bytes(changed[: FIXED_HEADER.size])))
    return bytes(changed)


def read_frame(raw: bytes) -> object:
    return decode(torch.frombuffer(bytearray(sealed(raw) or b"\0"), dtype=torch.uint8))


def read_rpc_frame(raw: bytes) -> None:
    """A frame in a record that is sealed as it should be: what a peer with the key may send."""
    outbox = FrameWriter(CrcRecordWriter())
    head, body = raw[: rpc_frame.HEADER.size], raw[rpc_frame.HEADER.size :]
    outbox.enqueue([memoryview(head), memoryview(body)] if body else [memoryview(head or b"\0")])
    _, error = received(receiver("checked"), wire_of(outbox))
    if error is not None:
        raise error


def read_handshake(raw: bytes) -> None:
    _, server = caller_and_server()
    messages, error = received(server, raw)
    assert not messages
    assert not server.is_open
    if error is not None:
        raise error


def read_message(raw: bytes) -> object:
    kind, fields, count = "", cast("dict[str, JsonValue]", {}), 0
    match parse_or_none(raw):
        case [str(kind), dict(fields), int(count)]:
            pass
        case _:
            pass
    return decode_message(kind, fields, [torch.arange(4.0), torch.tensor([2, 40]), torch.ones(2, 2)][: max(count, 0)])


def parse_or_none(raw: bytes) -> object:
    try:
        return parse_json(raw)
    except ValueError:
        return None


def read_json(raw: bytes) -> None:
    try:
        format_json(parse_json(raw))
    except ValueError as error:
        if len(str(error)) >= 1000:
            raise


def sha256_of(content: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def read_manifest(raw: bytes) -> object:
    content = parse_or_none(raw)
    if isinstance(content, dict):
        content.pop("sha256", None)
        raw = json.dumps({**content, "sha256": sha256_of(content)}).encode()
    return parse_manifest(written("step-00000003/manifest.json", raw))


@cache
def saved() -> Path:
    tensors = {"w": torch.arange(4.0), "b": torch.ones(2, dtype=torch.int64)}
    return save(scratch() / "saved", 3, tensors, {"step": 3, "cursor": [0, 1]})


def read_shard(raw: bytes) -> object:
    """A checkpoint whose manifest is right and whose shard is these bytes."""
    written(f"saved/{saved().name}/{shard_name()}", raw)
    return load(saved())


@cache
def shard_name() -> str:
    (path,) = saved().glob("*.safetensors")
    return path.name


def profile() -> bytes:
    layer = LayerProfile(1e-3, 2e-3, 1e-3, 1e-3)
    keys, params = (LayerKey("0", 16, 8.0, 4),), (("0.weight", 16),)
    return format_profile(
        ModelProfile("Linear", keys, params, ProfiledOn("cpu"), (BatchSizeProfile(1, (layer,), layer),))
    ).encode()


def rpc_frames() -> list[bytes]:
    return [b"".join(map(bytes, rpc_frame.encode_frame(one, LIMITS))) for one in RPC_MESSAGES]


@cache
def part() -> bytes:
    folder = scratch() / "step-00000003.tmp-0a"
    folder.mkdir()
    record = write_shard(folder, 0, [])
    return json.dumps({"num_ranks": 1, "record": record.to_json(), "state": {"step": 3}}).encode()


def programs() -> list[bytes]:
    return [path.read_bytes() for path in sorted(GOLDEN.glob("*.program"))[::8] if path.stat().st_size < 3000]


def modules() -> list[bytes]:
    values = [
        nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.BatchNorm1d(3)),
        nn.LSTM(2, 2),
        nn.TransformerEncoderLayer(2, 1, 2, activation=nn.functional.gelu),
    ]
    return [encode_module(value, "model") for value in values]


def server_job() -> bytes:
    job = encode_message(JobConfig("job", Asp()))[1]
    return json.dumps({"coordinator": "tcp:127.0.0.1:4000", "job": job}).encode()


def batches() -> list[bytes]:
    entries = [[kind, fields, len(tensors)] for kind, fields, tensors in map(encode_message, MESSAGES[:6])]
    return [json.dumps(entries[start : start + 2]).encode() for start in (0, 2, 4)]


def read_batch(raw: bytes) -> object:
    """Messages that a peer with the key has sent together, and as many tensors as they say."""
    entries = cast("JsonValue", parse_or_none(raw))
    counts = [entry[-1] for entry in entries if isinstance(entry, list) and entry] if isinstance(entries, list) else []
    num_tensors = sum(count for count in counts if isinstance(count, int) and 0 < count < 9)
    tensors = [torch.arange(4.0), torch.ones(2, 2), torch.tensor([2, 40]), *[torch.zeros(0)] * num_tensors]
    return unpack_batch(RpcMessage("batch", {"messages": entries}, tensors[:num_tensors]))


def read_store(raw: bytes) -> None:
    """Requests to the store in which ranks meet, one after the other."""
    table, requests = KeyValueTable(), parse_or_none(raw)
    table.set("long", b"9" * 5000)
    for request in requests if isinstance(requests, list) else []:
        match request:
            case [str(kind), dict(fields)]:
                with suppress(ProtocolError):  # so that the following ones are served, too
                    table.reply(RpcMessage(kind, fields))
            case _:
                pass


def store_requests() -> list[bytes]:
    text = to_text(b"3")
    requests: list[object] = [
        ["set", {"key": "a", "value": text}],
        ["add", {"key": "a", "amount": 4}],
        ["add", {"key": "long", "amount": 4}],
        ["get", {"key": "long"}],
        ["check", {"keys": ["a", "b"]}],
        ["compare_set", {"key": "b", "expected": "", "desired": text}],
        ["delete", {"key": "a"}],
    ]
    return [json.dumps(requests).encode()]


def lock() -> bytes:
    return json.dumps(asdict(LockOwner.this_process("a1"))).encode()


def read_lock(raw: bytes) -> object:
    owner = LockOwner.parse(raw)
    return owner and (owner.is_known_dead(), str(owner))


@cache
def trained() -> Checkpoint:
    """A checkpoint of a training run."""
    schedule = partial(ExponentialLR, gamma=0.9)
    fit("solo", fit_options={"checkpoint_dir": scratch() / "trained"}, lr_scheduler=schedule)
    return Checkpoint.open(scratch() / "trained")


def read_state(raw: bytes) -> None:
    """The state of a training run, in a manifest that is right otherwise."""
    state = parse_or_none(raw)
    if isinstance(state, dict):
        checkpoint = replace(trained(), manifest=replace(trained().manifest, state=state))
        check_train_state(checkpoint)
        decode_position(checkpoint)
        find_scalar_flaw(checkpoint, {"step": torch.tensor(1.0), "lr": 0.1})


def model_table() -> list[bytes]:
    model = encode_module(nn.Sequential(nn.Linear(2, 1)), "model")
    return [json.dumps([{"model": b64encode(model).decode(), "plan": "data(2)", "losses": [0.5, 0.25]}]).encode()]


def read_model_table(raw: bytes) -> object:
    """The rows of the table of a saved Spark model; a table has bytes where JSON has text."""
    rows = parse_or_none(raw)
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    for row in rows:
        if isinstance(row.get("model"), str):
            with suppress(ValueError):
                row["model"] = b64decode(row["model"])
    return decode_model_table(rows, trust=False)


def layout_rows() -> list[bytes]:
    rows = text_to_rows(json.dumps({"0": ["0.weight", "0.bias"], "2": ["2.weight"]}))
    return [b'{"a": ["a.weight", "a.bias"], "b": ["b"]}', bytes(rows.to(torch.uint8).flatten().tolist())]


def read_layout(raw: bytes) -> object:
    """The rows that servers hold: as they are, and with the text in them packed as it should be."""
    padded = raw.ljust(max(1, -(-len(raw) // BYTES_PER_ROW)) * BYTES_PER_ROW, b"\0")
    with suppress(ProtocolError):
        parse_layout(rows_to_text(torch.tensor(list(padded), dtype=torch.float16).view(-1, BYTES_PER_ROW)))
    return parse_layout(rows_to_text(text_to_rows(raw.decode("ascii", "ignore"))))


def kvstore_states() -> list[bytes]:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = optim.SGD([param], lr=0.1, momentum=0.9)
    optimizer.step()
    updater = TorchUpdater(optimizer)
    updater("w", torch.ones(2), torch.ones(2))
    updater("e", torch.eye(2).to_sparse(1).coalesce(), torch.ones(2, 2))
    save_states(scratch() / "states", updater.states(), with_options=True)
    return [(scratch() / "states").read_bytes()]


@cache
def num_state_bytes() -> int:
    (raw,) = kvstore_states()
    (text_bytes,) = HEADER_SIZE.unpack_from(raw)
    return len(raw) - HEADER_SIZE.size - int(text_bytes)


def read_states(raw: bytes) -> None:
    """States of optimizers, which continue where they were; the length of their text is right."""
    num_bytes = max(0, len(raw) - HEADER_SIZE.size - num_state_bytes())
    path = written("states.bin", HEADER_SIZE.pack(num_bytes) + raw[HEADER_SIZE.size :])
    updater = TorchUpdater(partial(optim.SGD, lr=0.1, momentum=0.9))
    updater.load_states(load_states(path))
    updater("w", torch.ones(2), torch.ones(2))
    updater("e", torch.eye(2).to_sparse(1).coalesce(), torch.ones(2, 2))


def snapshot() -> bytes:
    return b"".join(map(as_memoryview, encode_chunks(STATE)))


def graph() -> bytes:
    nodes = [GraphNode(f"node{index}", "Linear(2, 3)", 1e-3, 2e-3, 8.0, 16.0) for index in range(3)]
    return format_graph(chain_graph(nodes)).encode()


def read_progress(raw: bytes) -> object:
    return parse_relayed(raw.decode("utf-8", "replace"))


def values() -> list[bytes]:
    value = {"a": [1, 2.5, None, True, (b"x", {3})], 7: torch.ones(2), "n": torch.arange(3).numpy(), "t": torch.float16}
    return [encode_value(value, "value"), encode_value([], "value")]


def plan_texts() -> list[bytes]:
    for entry in STRATEGIES.values():
        option_types(entry.doc_source)  # evaluates annotations of the source, which is not to be mistaken for data
    return [b"pipeline(2, schedule=gpipe) * data(2)", b"zero3(2, bucket=1 MiB) * tensor(2)"]


HEADER = FrameHeader(FrameKind.VALUE, 1, 0, 0, 0, bytes(16))
TRACE = Trace((TraceEvent(0, 0, "F0.0", 0.0, 1.0, "compute"),), 1, "simulated")
READERS = {
    "batch": Reader(read_batch, batches),
    "cluster": Reader(text_reader(parse_cluster), lambda: [HOSTS.encode()]),
    "gloo frame": Reader(read_frame, lambda: [bytes(as_memoryview(encode(HEADER, "x", [torch.ones(2)])))]),
    "handshake": Reader(read_handshake, lambda: [bytes(taken(caller_and_server()[0]))]),
    "job file": Reader(file_reader("job.yaml", file_layer), lambda: [b"training:\n  seed: 3\n", PLAN.encode()]),
    "graph": Reader(text_reader(parse_graph), lambda: [graph()]),
    "json": Reader(read_json, lambda: [b'{"a": [1, -2.5e3, "\\u00e9", null, true, {}]}']),
    "key": Reader(file_reader("key", read_key), lambda: [b"0f" * 32 + b"\n"]),
    "key layout": Reader(read_layout, layout_rows),
    "kvstore states": Reader(read_states, kvstore_states),
    "lock": Reader(read_lock, lambda: [lock()]),
    "log": Reader(lambda raw: decode_log(sealed(raw)), lambda: [encode_record(PUSH)]),
    "manifest": Reader(read_manifest, lambda: [next(saved().glob("manifest*")).read_bytes()]),
    "message": Reader(
        read_message,
        lambda: [json.dumps([kind, fields, len(tensors)]).encode()
                 for kind, fields, tensors in map(encode_message, MESSAGES)],
    ),
    "metrics": Reader(
        file_reader("metrics.jsonl", lambda path: list(read_lines_until(path, 9))),
        lambda: [b'{"event": "step", "step": 1, "loss": 0.5}\n{"event": "end", "step": 1}\n'],
    ),
    "model table": Reader(read_model_table, model_table),
    "module": Reader(decode_module, modules),
    "part": Reader(
        lambda raw: read_parts(written("step-00000004.tmp-0b/part-00000.json", raw).parent), lambda: [part()]
    ),
    "plan file": Reader(text_reader(Plan.from_yaml), lambda: [PLAN.encode(), *plan_texts()]),
    "plan text": Reader(text_reader(Plan.parse), plan_texts),
    "process": Reader(
        lambda raw: read_process_stat(written("1/stat", raw).parent), lambda: [Path("/proc/self/stat").read_bytes()]
    ),
    "profile": Reader(text_reader(parse_profile), lambda: [profile()]),
    "profile file": Reader(file_reader("plan.profile.json", load_profile_file), lambda: [profile()]),
    "program": Reader(text_reader(parse_program), programs),
    "progress": Reader(read_progress, lambda: [b'\x1e{"event": "step", "step": 1, "loss": 0.5}']),
    "record": Reader(
        file_reader("error.json", ErrorRecord.read),
        lambda: [b'{"kind": "a", "message": "b", "location": "c", "is_peer": true, "time_s": 1.5, "notes": ["d"], '
                 b'"stop_signal": 15}'],
    ),
    "rpc frame": Reader(read_rpc_frame, rpc_frames),
    "server job": Reader(file_reader("job.json", read_job_file), lambda: [server_job()]),
    "shard": Reader(read_shard, lambda: [next(saved().glob("*.safetensors")).read_bytes()]),
    "snapshot": Reader(
        lambda raw: read_shard_state(written("shard-0", sealed(raw))), lambda: [snapshot()]
    ),
    "state": Reader(read_state, lambda: [json.dumps(trained().state).encode()]),
    "store": Reader(read_store, store_requests),
    "trace": Reader(text_reader(Trace.from_json), lambda: [TRACE.to_json().encode()]),
    "value": Reader(decode_value, values),
}  # fmt: skip
