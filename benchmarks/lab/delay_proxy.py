"""TCP proxy that delays connections: one on each host, for the connections opened by it.

Runs on the host as a script. The host's packet rules redirect its connections here; the proxy connects to the original
target, and holds every byte for the delay of its direction. Standard input has the delays, one JSON object per line,
each replacing the previous one: ``{"10.77.0.2": {"there": [0.01, 0.002], "back": [0.01, 0.0]}}``, seconds and jitter.
The proxy exits at the end of its input.

Data stays in order and nothing is lost, as TCP guarantees; a reset or half-close on one side is repeated on the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import selectors
import socket
import struct
import sys

ORIGINAL_TARGET = 80  # SO_ORIGINAL_DST: target of the connection before the redirect
CHUNK_BYTES = 64 * 1024
MAX_CHUNKS = 512  # in flight in one direction of one connection, at most 32 MiB
Direction = tuple[float, float]


class DelayProxy:
    """The delays by target address, and the open connections.

    Args:
        mark: of the proxy's own packets, which the rules do not redirect.
        seed: of the jitter; the n-th connection to a target has the same jitter in every run.
    """

    def __init__(self, mark: int, seed: str) -> None:
        self.mark = mark
        self.seed = seed
        self.delays: dict[str, dict[str, Direction]] = {}
        self.num_connections: dict[str, int] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    def delay_s(self, target: str, direction: str, chance: random.Random) -> float:
        """Return the delay of the next bytes of a direction; 0 after its delay was removed."""
        base_s, jitter_s = self.delays.get(target, {}).get(direction, (0.0, 0.0))
        return base_s + chance.uniform(0.0, jitter_s)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accept a redirected connection."""
        task = asyncio.ensure_future(self.relay(reader, writer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect after one round trip, as a handshake takes, and relay both directions until both have ended."""
        raw = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_IP, ORIGINAL_TARGET, 16)
        port, packed = struct.unpack_from("!2xH4s", raw)
        target = socket.inet_ntoa(packed)
        ordinal = self.num_connections[target] = self.num_connections.get(target, 0) + 1
        there, back = (random.Random(f"{self.seed} {target} {ordinal} {way}") for way in ("there", "back"))
        try:
            await asyncio.sleep(self.delay_s(target, "there", there) + self.delay_s(target, "back", back))
            far_reader, far_writer = await self.connect(target, port)
        except OSError:
            reset(writer)
            return
        ways = (
            self.relay_direction(reader, far_writer, target, "there", there),
            self.relay_direction(far_reader, writer, target, "back", back),
        )
        try:
            async with asyncio.TaskGroup() as both:
                for way in ways:
                    both.create_task(way)
        except* OSError:
            reset(writer)
            reset(far_writer)
        writer.close()
        far_writer.close()

    async def connect(self, target: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the original target, bypassing the rules."""
        far = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        far.setblocking(False)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, self.mark)
        try:
            await asyncio.get_running_loop().sock_connect(far, (target, port))
        except OSError:
            far.close()
            raise
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return await asyncio.open_connection(sock=far, limit=CHUNK_BYTES)

    async def relay_direction(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        target: str,
        direction: str,
        chance: random.Random,
    ) -> None:
        """Relay one direction; bytes read at t are written at t plus the delay, in order."""
        clock = asyncio.get_running_loop().time
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS)

        async def take() -> None:
            chunk = b"."
            while chunk:
                chunk = await reader.read(CHUNK_BYTES)
                await under_way.put((clock() + self.delay_s(target, direction, chance), chunk))

        async def give() -> None:
            while True:
                due, chunk = await under_way.get()
                if (wait_s := due - clock()) > 0:
                    await asyncio.sleep(wait_s)
                if not chunk:
                    break
                writer.write(chunk)
                await writer.drain()
            with contextlib.suppress(OSError):
                writer.write_eof()

        async with asyncio.TaskGroup() as ends:
            ends.create_task(take())
            ends.create_task(give())


def reset(writer: asyncio.StreamWriter) -> None:
    """Reset a connection, so that its peer sees a reset instead of an orderly close."""
    with contextlib.suppress(OSError):
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def serve(mark: int, seed: str) -> None:
    """Print the port, then serve until standard input ends."""
    proxy = DelayProxy(mark, seed)
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0, limit=CHUNK_BYTES, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    while line := await lines.readline():
        proxy.delays = json.loads(line)
        print("set", flush=True)


if __name__ == "__main__":
    # select() waits to the microsecond, epoll to the millisecond
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(serve(int(sys.argv[1]), sys.argv[2]))
