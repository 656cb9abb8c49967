r"""Proof of each pair of a gloo process group: gloo itself does not know who has connected.

::

    rank i                                   rank j
      | -- nonce i ------------------------> |
      | <------------------------ nonce j -- |
      | -- HMAC(i to j, nonces, group) ----> |
      | <---- HMAC(j to i, nonces, group) -- |  and only then tensors

The secret of the HMAC is in the job's store, which admits only processes of the job. A proof is about the connection at
its start: what follows is neither encrypted nor authenticated.
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from collections.abc import Mapping
from datetime import timedelta

import torch
from torch import Tensor

from counterpoint.errors import PeerError
from counterpoint.fabric.c10d import GlooProcessGroup, Store
from counterpoint.fabric.fabric import Group
from counterpoint.fabric.key_value_store import KeyValueStore

NONCE_TAG, PROOF_TAG = 1 << 21, (1 << 21) + 1
NUM_BYTES = 32


def share_secret(store: Store) -> bytes | None:
    """Return the secret that all ranks find in the store; None if the store is torch's, which anybody can read."""
    if not isinstance(store, KeyValueStore):
        return None
    return bytes.fromhex(store.compare_set("secret", "", secrets.token_hex(NUM_BYTES)).decode())


def prove_pairs(
    gloo: GlooProcessGroup, secret: bytes, connection: str, group: Group, rank: int, timeout_s: float
) -> None:
    """Prove to each member that this rank has the secret, and check the proof of each.

    Args:
        gloo: the connection.
        secret: of the job and generation.
        connection: its name, the same on all members.
        group: its members.
        rank: this rank.
        timeout_s: the longest that this may last.

    Raises:
        PeerError: a member did not prove it in time.
    """
    end = time.monotonic() + timeout_s
    others = [other for other in group if other != rank]
    own_nonces = {other: secrets.token_bytes(NUM_BYTES) for other in others}
    nonces = exchange(gloo, own_nonces, NONCE_TAG, group, end)
    proofs = exchange(
        gloo,
        {
            other: make_proof(secret, connection, group, rank, other, own_nonces[other] + nonces[other])
            for other in others
        },
        PROOF_TAG,
        group,
        end,
    )
    for other, proof in proofs.items():
        expected = make_proof(secret, connection, group, other, rank, nonces[other] + own_nonces[other])
        if not hmac.compare_digest(proof, expected):
            raise pair_error(other, "it has not proved that it belongs to the job")


def exchange(
    gloo: GlooProcessGroup, outgoing: Mapping[int, bytes], tag: int, group: Group, end: float
) -> dict[int, bytes]:
    """Send bytes to each rank, and return those of each.

    Raises:
        PeerError: a rank did not send them before ``end``.
    """
    received = {other: torch.empty(NUM_BYTES, dtype=torch.uint8) for other in outgoing}
    sent = {other: torch.frombuffer(bytearray(message), dtype=torch.uint8) for other, message in outgoing.items()}
    receives = {other: gloo.recv([buffer], group.index(other), tag) for other, buffer in received.items()}
    sends = {other: gloo.send([buffer], group.index(other), tag) for other, buffer in sent.items()}
    for works in (receives, sends):
        for other, work in works.items():
            try:
                work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
            except RuntimeError as error:
                raise pair_error(other, f"it ended while it proved that it belongs to the job: {error}") from error
    return {other: to_bytes(buffer) for other, buffer in received.items()}


def make_proof(secret: bytes, connection: str, group: Group, sender: int, receiver: int, nonces: bytes) -> bytes:
    """Return the proof that a sender has the secret, for one receiver of one connection."""
    transcript = json.dumps(["counterpoint pair", connection, list(group), sender, receiver, nonces.hex()])
    return hmac.digest(secret, transcript.encode(), "sha256")


def to_bytes(buffer: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return buffer.numpy().tobytes()


def pair_error(rank: int, reason: str) -> PeerError:
    """Return the error for a connection whose other end is not known to be this rank."""
    return PeerError(
        f"the connection to rank {rank} cannot be trusted: {reason}; nothing was sent over it: look for a program that "
        f"connects to the ports of this job, or at the output of rank {rank}"
    )
