"""Packet rules of one host: losses and cuts of incoming packets, and the redirect to the delay proxy.

Runs on the host as a script, reads one JSON object and replaces the host's rules by it atomically::

    {"drop": [["10.77.0.2", 0.05]], "redirect": {"port": 4000, "mark": 77, "targets": ["10.77.0.2"]}}

It configures nftables in the kernel by netlink, as ``nft`` would, because that command is often not installed. Packets
are dropped on the receiver's ``input`` hook: on ``output`` the sender would get an error, unlike for a real loss.

Source:
    include/uapi/linux/netfilter/nf_tables.h; the same rules as shown by nft:
    ``ip saddr 10.77.0.2 numgen random mod 1000000 < 50000 drop`` and
    ``ip daddr 10.77.0.2 meta l4proto tcp meta mark != 77 redirect to :4000``.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

NETLINK_NETFILTER, SUBSYSTEM, IPV4 = 12, 10, 2
BATCH_BEGIN, BATCH_END, NEW_TABLE, DEL_TABLE, NEW_CHAIN, NEW_RULE = 0x10, 0x11, 0, 2, 3, 6
REQUEST, ACK, CREATE, APPEND, NESTED = 0x1, 0x4, 0x400, 0x800, 0x8000
LOCAL_IN, LOCAL_OUT, NAT_PRIORITY = 1, 3, -100
EQUAL, NOT_EQUAL, LESS = 0, 1, 2
SOURCE_OFFSET, TARGET_OFFSET = 12, 16
META_MARK, META_PROTOCOL = 3, 16
MODULUS = 1_000_000
TABLE = b"lab\0"


def attribute(kind: int, *values: bytes) -> bytes:
    """Encode one attribute; several values or an encoded attribute inside make a nest."""
    body = b"".join(values)
    return struct.pack("=HH", 4 + len(body), kind) + body + b"\0" * (-len(body) % 4)


def nest(kind: int, *values: bytes) -> bytes:
    return attribute(kind | NESTED, *values)


def number(value: int) -> bytes:
    return struct.pack(">i", value)


def expression(name: bytes, *data: bytes) -> bytes:
    return nest(1, attribute(1, name + b"\0"), nest(2, *data))


def compare(operation: int, value: bytes) -> bytes:
    return expression(b"cmp", attribute(1, number(1)), attribute(2, number(operation)), nest(3, attribute(1, value)))


def address_is(offset: int, address: str) -> bytes:
    places = (number(1), number(1), number(offset), number(4))  # register 1, network header
    load = expression(b"payload", *(attribute(kind, place) for kind, place in enumerate(places, 1)))
    return load + compare(EQUAL, socket.inet_aton(address))


def meta(key: int, operation: int, value: bytes) -> bytes:
    return expression(b"meta", attribute(1, number(1)), attribute(2, number(key))) + compare(operation, value)


def random_match(ratio: float) -> bytes:
    draw = expression(b"numgen", attribute(1, number(1)), attribute(2, number(MODULUS)), attribute(3, number(1)))
    to_network_order = (number(1), number(1), number(1), number(4), number(4))
    turn = expression(b"byteorder", *(attribute(kind, part) for kind, part in enumerate(to_network_order, 1)))
    return draw + turn + compare(LESS, number(round(ratio * MODULUS)))


def drop() -> bytes:
    verdict = nest(2, nest(2, attribute(1, number(0))))
    return expression(b"immediate", attribute(1, number(0)), verdict)


def redirect(port: int) -> bytes:
    value = nest(2, attribute(1, struct.pack(">H", port)))
    load = expression(b"immediate", attribute(1, number(1)), value)
    return load + expression(b"redir", attribute(1, number(1)))


def chain(name: bytes, kind: bytes, hook: int, priority: int) -> bytes:
    place = nest(4, attribute(1, number(hook)), attribute(2, number(priority)))
    return attribute(1, TABLE) + attribute(3, name) + place + attribute(7, kind)


def rule(chain_name: bytes, *expressions: bytes) -> bytes:
    return attribute(1, TABLE) + attribute(2, chain_name) + nest(4, *expressions)


def netlink_messages(wanted: dict[str, Any]) -> Iterator[tuple[int, int, bytes]]:
    """Give kind, flags and attributes of everything that makes the rules what is wanted."""
    table = attribute(1, TABLE)
    yield NEW_TABLE, CREATE, table  # so that there is one to delete
    yield DEL_TABLE, 0, table
    yield NEW_TABLE, CREATE, table
    yield NEW_CHAIN, CREATE, chain(b"in\0", b"filter\0", LOCAL_IN, 0)
    for source, ratio in wanted.get("drop", ()):
        chance = () if ratio >= 1 else (random_match(ratio),)
        yield NEW_RULE, CREATE | APPEND, rule(b"in\0", address_is(SOURCE_OFFSET, source), *chance, drop())
    if way := wanted.get("redirect"):
        yield NEW_CHAIN, CREATE, chain(b"out\0", b"nat\0", LOCAL_OUT, NAT_PRIORITY)
        tcp = meta(META_PROTOCOL, EQUAL, bytes([socket.IPPROTO_TCP]))
        foreign = meta(META_MARK, NOT_EQUAL, struct.pack("=I", way["mark"]))
        for target in way["targets"]:
            parts = (address_is(TARGET_OFFSET, target), tcp, foreign, redirect(way["port"]))
            yield NEW_RULE, CREATE | APPEND, rule(b"out\0", *parts)


def message(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, flags | REQUEST, sequence, 0) + body


def netlink_batch(wanted: dict[str, Any]) -> tuple[bytes, int]:
    """Return one transaction for the kernel, and how many answers it will give."""
    edge = struct.pack(">BBH", 0, 0, SUBSYSTEM)
    header = struct.pack(">BBH", IPV4, 0, 0)
    parts = [message(BATCH_BEGIN, 0, 0, edge)]
    for kind, flags, attributes in netlink_messages(wanted):
        parts.append(message(SUBSYSTEM << 8 | kind, flags | ACK, len(parts), header + attributes))
    return b"".join([*parts, message(BATCH_END, 0, len(parts), edge)]), len(parts) - 1


def apply(wanted: dict[str, Any]) -> None:
    """Replace this host's rules.

    Raises:
        OSError: the kernel refused them; none has changed.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as kernel:
        kernel.settimeout(5)
        data, num_answers = netlink_batch(wanted)
        kernel.sendto(data, (0, 0))
        while num_answers > 0:
            answers = kernel.recv(1 << 16)
            while answers:
                length, _, _, sequence, _, error = struct.unpack_from("=IHHIIi", answers)
                if error:
                    raise OSError(-error, f"{os.strerror(-error)} (message {sequence})")
                num_answers -= 1
                answers = answers[(length + 3) & ~3 :]


if __name__ == "__main__":
    try:
        apply(json.load(sys.stdin))
    except OSError as refused:
        sys.exit(f"the kernel's nf_tables refused the rules: {refused}; it needs CONFIG_NF_TABLES with NFT_NUMGEN, NAT")
