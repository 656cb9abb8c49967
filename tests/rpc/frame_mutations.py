"""What may happen to bytes on their way, and what a peer with the key may get wrong, by seed."""

import random

import torch

from counterpoint.errors import ProtocolError
from counterpoint.rpc import frame as message, handshake as greeting
from counterpoint.rpc.buffers import ReceiveBufferPool
from counterpoint.rpc.channel import FrameReader, FrameWriter, RpcChannel
from counterpoint.rpc.frame import RpcLimits, RpcMessage
from counterpoint.rpc.handshake import SecurityMode
from counterpoint.rpc.job_key import JobKey
from counterpoint.rpc.records import AesGcmRecordReader, AesGcmRecordWriter, CrcRecordReader, CrcRecordWriter

KEY = bytes(range(16))
PROOF_BYTES = 32
LIMITS = RpcLimits(text_bytes=1 << 12, payload_bytes=1 << 16)
MESSAGES = [
    RpcMessage("push", {"key": "w", "sequence": index, "rows": [1, 2.5, None, True]}, tensors)
    for index, tensors in enumerate(
        [(), (torch.arange(5.0),), (torch.ones(2, 3, dtype=torch.bool), torch.arange(40)), (torch.zeros(0, 4),)]
    )
]
WAYS = {"keyed": (AesGcmRecordWriter, AesGcmRecordReader, (KEY,)), "checked": (CrcRecordWriter, CrcRecordReader, ())}


def wire_of(outbox):
    """Everything that the outbox sends."""
    sent = bytearray()
    while pieces := outbox.pending_buffers():
        sent += b"".join(pieces)
        outbox.on_sent(sum(map(len, pieces)))
    return bytes(sent)


def frames(way, *other):
    """The messages, and the close frame, as bytes on the wire, frame by frame; of this connection, or under another key."""
    sealer, _, keys = WAYS[way]
    outbox, result = FrameWriter(sealer(*(other or keys))), []
    for pieces in [*(message.encode_frame(each, LIMITS) for each in MESSAGES), message.close_frame()]:
        outbox.enqueue(pieces)
        result.append(wire_of(outbox))
    return result


def received(channel, raw):
    """Feed the bytes to a channel or an inbox: the messages that it believes, and the error that it ends with."""
    messages = []
    try:
        while raw:
            target = channel.receive_buffers()[0]
            num_bytes = min(len(target), len(raw))
            target[:num_bytes], raw = raw[:num_bytes], raw[num_bytes:]
            if (result := channel.on_bytes(num_bytes)) is not None:
                messages.append(result)
            if channel.is_closed_by_peer:
                return messages, None
        channel.on_eof()
    except ProtocolError as error:
        return messages, error
    return messages, None


def receiver(way):
    _, opener, keys = WAYS[way]
    return FrameReader(opener(*keys), LIMITS, ReceiveBufferPool())


def flipped(source, raw):
    changed = bytearray(raw)
    for _ in range(source.choice((1, 1, 2, 8))):
        changed[source.randrange(len(changed))] ^= 1 << source.randrange(8)
    return changed


def spliced(source, raw, other):
    start, length = source.randrange(len(raw)), source.randrange(1, 64)
    at = source.randrange(max(1, len(other) - length))
    return raw[:start] + other[at : at + length] + raw[start + source.choice((0, length)) :]


def in_transit(source, sent):
    """The frames as somebody in between, or a bad link, may hand them on."""
    frames, index, other = list(sent), source.randrange(len(sent)), source.randrange(len(sent))
    match source.randrange(8):
        case 0 | 1 | 2:
            frames[index] = flipped(source, frames[index])
        case 3:
            frames[index] = frames[index][: source.randrange(len(frames[index]))]
        case 4:
            frames[index] = spliced(source, frames[index], frames[other])
        case 5:
            frames[index], frames[other] = frames[other], frames[index]
        case 6:
            frames.insert(index, frames[other])
        case _:
            frames[index] = source.choice((b"", source.randbytes(source.randrange(1, 200))))
    return b"".join(frames)


def forge_length(source, way):
    """One frame, sealed as it should be, in which something has been changed before."""
    pieces = [bytearray(piece) for piece in message.encode_frame(source.choice(MESSAGES), LIMITS)]
    head, body = pieces[0], bytearray(b"".join(pieces[1:]))
    match source.randrange(5):
        case 0:  # a length
            at, width = source.choice(((6, 2), (8, 4), (12, 4), (16, 8)))
            forged_length = source.choice(
                (0, 16, 48, 4096, 1 << 15, source.getrandbits(8 * width), (1 << 8 * width) - 1)
            )
            head[at : at + width] = (forged_length % (1 << 8 * width)).to_bytes(width, "little")
        case 1:
            head[:] = flipped(source, head)
        case 2 | 3:
            body[:] = flipped(source, body) if body else body
        case _:
            text = source.choice(TEXTS)
            prefix = text + bytes(-len(text) % 16)
            head[:], body[:] = message.HEADER.pack(b"CPWL", 1, 1, 0, len(text), len(prefix), 0), prefix
    sealer, _, keys = WAYS[way]
    outbox = FrameWriter(sealer(*keys))
    outbox.enqueue([memoryview(head), memoryview(body)] if body else [memoryview(head)])
    return wire_of(outbox)


TEXTS = [
    b"", b"[]", b"{}", b"null", b'["a"]', b'["a",{},1]', b'["a",[]]', b'[1,{}]', b'["",{}]', b"[" * 4000,
    b'{"a":' * 700, b'["a",{"b":NaN}]', b'["a",{"b":Infinity}]', b'["a",{"b":1,"b":2}]', b'["a",{"b":1e999}]',
    b'["a",{"b":' + b"9" * 3900 + b"}]", b'["a",{"b":"\xff"}]', b'["a",{"b":"\\ud800"}]', b'["' + b"a" * 65 + b'",{}]',
    b'\xef\xbb\xbf["a",{}]',
]  # fmt: skip


def caller_and_server(key=bytes(32), job="job"):
    secret = greeting.JobCredentials(JobKey(key), job)
    caller = RpcChannel(
        greeting.client_handshake(secret, SecurityMode.ENCRYPTED, bytes(32)), LIMITS, ReceiveBufferPool()
    )
    return caller, RpcChannel(
        greeting.server_handshake(secret, SecurityMode.ENCRYPTED, bytes([1]) * 32), LIMITS, ReceiveBufferPool()
    )


def taken(channel):
    """What the channel has to send."""
    sent = b"".join(channel.pending_buffers())
    channel.on_sent(len(sent))
    return sent


def mutate_handshake(source):
    """What a server makes of a handshake that has been changed: messages, error, whether it is open, and ought to be."""
    caller, server = caller_and_server()
    right = taken(caller)
    if source.randrange(2):
        received(server, right)
        received(caller, taken(server))
        right = taken(caller)
    changed = in_transit(source, [right])
    messages, error = received(server, changed)
    return messages, error, server.is_open, len(right) == PROOF_BYTES and changed.startswith(right)


def seeds(count):
    source = random.Random(7)
    return (random.Random(source.getrandbits(64)) for _ in range(count))
