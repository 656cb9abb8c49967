"""Two sides with one key talk, in order and without loss; anybody else learns nothing."""

import re
import socket
import threading

import pytest
import torch

from counterpoint.errors import LaunchError, PeerError, ProtocolError
from counterpoint.rpc.address import parse_address, resolve_address
from counterpoint.rpc.client import RpcClient
from counterpoint.rpc.connection import ConnectionLostError
from counterpoint.rpc.event_loop import EventLoop
from counterpoint.rpc.frame import RpcLimits, RpcMessage
from counterpoint.rpc.handshake import HELLO, REFUSAL, JobCredentials, SecurityMode, client_handshake
from counterpoint.rpc.job_key import new_key
from counterpoint.rpc.listener import listen, request_handler
from tests.other_user import STRANGER, as_root, as_user
from tests.rpc.conftest import Records, connect_and_record, echo, run_loop


def stranger(place):
    """A plain socket that is connected there and has said nothing."""
    family = socket.AF_UNIX if str(place).startswith("unix") else socket.AF_INET
    plain = socket.socket(family)
    plain.settimeout(5)
    plain.connect(f"\0counterpoint/{place.name}" if family == socket.AF_UNIX else (place.host, place.port))
    return plain


def test_questions_are_answered_in_the_order_in_which_they_were_asked(asking):
    tensors = [torch.arange(300_001.0), torch.tensor(7), torch.ones(2, 0, dtype=torch.int64), torch.eye(3).bool()]
    questions = [asking.request(RpcMessage("ask", {"index": index}, tensors)) for index in range(4)]
    answers = [question.wait(10.0) for question in questions]
    assert [answer.fields["index"] for answer in answers] == [0, 1, 2, 3]
    for sent, received in zip(tensors, answers[-1].tensors, strict=True):
        assert (sent.dtype, sent.shape) == (received.dtype, received.shape)
        assert torch.equal(sent, received)


def test_a_loop_in_its_own_thread_answers_without_a_waiting_thread(place_and_secret):
    place, secret = place_and_secret
    with EventLoop() as serving, EventLoop() as calling:
        server = listen(serving, place, secret, request_handler(echo))
        serving.start()
        calling.start()
        with RpcClient(calling, server.address, secret) as client:
            answers = [
                client.request(RpcMessage("ask", {"index": index}, [torch.zeros(100_000)])) for index in range(20)
            ]
            assert [each.wait(10.0).fields["index"] for each in answers] == list(range(20))


def test_a_wrong_key_is_refused_without_a_hint(loop, place, secret):
    records = Records()
    server = listen(loop, place, secret, records.message)
    with pytest.raises(
        ProtocolError, match=r"handshake failed: the two sides have different job keys, or belong to different"
    ):
        RpcClient(loop, place, JobCredentials(new_key())).wait_open()
    run_loop(loop)
    assert (server.connections, server.num_unauthenticated, records.messages) == ([], 0, [])


def test_another_generation_of_a_job_is_refused(loop, place):
    key = new_key()
    listen(loop, place, JobCredentials(key, "job 7, generation 1"), request_handler(echo))
    with pytest.raises(ProtocolError, match="belong to different jobs or generations"):
        RpcClient(loop, place, JobCredentials(key, "job 7, generation 2")).wait_open()


@pytest.mark.parametrize("has_key", ["server", "caller"])
def test_who_has_a_key_does_not_talk_to_those_who_have_none(loop, place, has_key):
    key = new_key()
    listen(loop, place, JobCredentials(key if has_key == "server" else None), request_handler(echo))
    with pytest.raises(ProtocolError, match=r"has a job key and .* has none"):
        RpcClient(loop, place, JobCredentials(key if has_key == "caller" else None)).wait_open()


@pytest.mark.parametrize(
    "greeting", [b"GET / HTTP/1.1\r\nHost: job\r\n\r\n" * 3, b"\x16\x03\x01" + bytes(100), bytes(200)]
)
def test_a_peer_without_a_handshake_gets_no_reply(loop, place_and_secret, greeting):
    place, secret = place_and_secret
    server = listen(loop, place, secret, request_handler(echo))
    with stranger(server.address) as plain:
        run_loop(loop, 3)
        plain.sendall(greeting)
        run_loop(loop)
        with pytest.raises(ConnectionResetError):
            plain.recv(100)


def test_a_peer_without_the_key_gets_one_handshake_and_one_refusal(loop, place, secret):
    server = listen(loop, place, secret, request_handler(echo))
    with stranger(server.address) as plain:
        plain.sendall(HELLO.pack(b"CPWS", 1, 2, bytes(32)) + bytes(32))
        run_loop(loop)
        records = plain.recv(1000)
    assert records[:8] == HELLO.pack(b"CPWS", 1, 2, bytes(32))[:8]
    assert records[HELLO.size :] == REFUSAL


def test_strangers_are_few_and_have_little_time(clock, still_loop, place, secret):
    server = listen(still_loop, place, secret, request_handler(echo), limits=RpcLimits(max_unauthenticated=3))
    silent = [stranger(place) for _ in range(10)]
    run_loop(still_loop)
    assert server.num_unauthenticated == 3
    with RpcClient(still_loop, place, secret):
        assert len(server.connections) == 1
    clock.now_s += 5.1
    run_loop(still_loop)
    assert server.num_unauthenticated == 0
    assert [plain.close() for plain in silent] == [None] * 10


def test_connecting_to_a_server_that_does_not_run_is_an_error_that_says_to_reconnect(loop, secret):
    with pytest.raises(ConnectionLostError, match=r"no process listens at unix:nobody; .* reconnect"):
        RpcClient(loop, parse_address("unix:nobody"), secret)
    with pytest.raises(
        ConnectionLostError, match=r"tcp:127.0.0.1:1 is unreachable \(connection refused\); .* reconnect"
    ):
        RpcClient(loop, parse_address("tcp:127.0.0.1:1"), secret).wait_open()


def test_a_close_frame_arrives_after_all_messages_before_it(loop, place, secret):
    records = Records()
    listen(loop, place, secret, records.message, on_end=records.end)
    connection, _ = connect_and_record(loop, place, secret)
    loop.wait_for(lambda: connection.state.value == "open", 5.0, "the handshake")
    for index in range(3):
        connection.send(RpcMessage("push", {"index": index}, [torch.zeros(200_000)]))
    connection.close()
    loop.wait_for(lambda: records.ends, 5.0, "the end")
    assert [message.fields["index"] for message in records.messages] == [0, 1, 2]
    assert records.ends == [None]


def test_what_was_sent_and_closed_before_the_handshake_arrives_after_it(loop, place_and_secret):
    (place, secret), records = place_and_secret, Records()
    server = listen(loop, place, secret, records.message, on_end=records.end)
    connection, ended = connect_and_record(loop, server.address, secret)
    connection.send(RpcMessage("push", {}, [torch.arange(10)]))
    connection.close()
    loop.wait_for(lambda: records.ends and ended.ends, 5.0, "the end on both sides")
    assert [message.kind for message in records.messages] == ["push"]
    assert records.ends == ended.ends == [None]


def test_a_server_that_closes_says_close_frame_to_those_it_knows(loop, place_and_secret):
    place, secret = place_and_secret
    server = listen(loop, place, secret, request_handler(echo))
    known, records = connect_and_record(loop, server.address, secret)
    loop.wait_for(lambda: server.connections, 5.0, "the handshake")
    silent = stranger(server.address)
    loop.wait_for(lambda: server.num_unauthenticated == 1, 5.0, "the stranger")
    server.close()
    loop.wait_for(lambda: known.is_ended, 5.0, "the close frame")
    assert (records.ends, server.num_unauthenticated) == ([None], 0)
    assert silent.recv(10) == b""
    silent.close()


def test_a_connection_that_breaks_off_is_an_error_on_the_other_side(loop, place, secret):
    server = listen(loop, place, secret, lambda connection, message: connection.abort())
    with RpcClient(loop, server.address, secret) as client:
        with pytest.raises(
            ConnectionLostError, match=r"server unix:.* closed the connection unexpectedly; .* then reconnect"
        ):
            client.request(RpcMessage("ask")).wait(5.0)
        with pytest.raises(ConnectionLostError, match="closed the connection unexpectedly"):
            client.request(RpcMessage("ask"))


def test_a_reader_that_finds_nonsense_ends_the_connection(loop, place, secret):
    def refuse(connection, message):
        raise ProtocolError(f"there is no {message.kind}")

    records = Records()
    listen(loop, place, secret, refuse, on_end=records.end)
    connection, _ = connect_and_record(loop, place, secret)
    connection.send(RpcMessage("dance"))
    loop.wait_for(lambda: records.ends, 5.0, "the end")
    assert isinstance(records.ends[0], ProtocolError)
    assert "there is no dance" in str(records.ends[0])


def test_an_answer_that_does_not_come_names_who_waits_for_what(loop, place, secret):
    listen(loop, place, secret, Records().message)
    with (
        RpcClient(loop, place, secret) as client,
        pytest.raises(PeerError, match=r"0.05 s for the reply of server unix:"),
    ):
        client.request(RpcMessage("pull")).wait(0.05)


@pytest.mark.parametrize(
    "address", ["tcp:127.0.0.1:0", "tcp:localhost:0", "tcp:[::1]:0", "tcp:0.0.0.0:0", "tcp:[::]:0"]
)
def test_without_a_key_nothing_listens_on_tcp_not_even_on_loopback(loop, address):
    remedy = r"also over loopback; make a key with `counterpoint key job.key` .* or use unix:NAME"
    with pytest.raises(LaunchError, match=rf"^there is no job key for {re.escape(address)}, .*{remedy}"):
        listen(loop, parse_address(address), JobCredentials(None), request_handler(echo))


@pytest.mark.parametrize("address", ["tcp:192.0.2.1:4000", "tcp:127.0.0.1:4000"])
def test_without_a_key_nothing_is_connected_over_tcp(loop, address):
    with pytest.raises(LaunchError, match=f"there is no job key for {address}"):
        RpcClient(loop, parse_address(address), JobCredentials(None))


@as_root
@pytest.mark.parametrize("mode", [SecurityMode.NONE, SecurityMode.ENCRYPTED])
def test_another_user_without_the_key_is_not_let_in_over_loopback(loop, secret, mode):
    """It speaks the protocol as a member without a key does, and pretends to have one."""
    received = Records()
    server = listen(loop, parse_address("tcp:127.0.0.1:0"), secret, received.message, on_end=received.end)
    handshake = client_handshake(JobCredentials(None), mode, bytes(32))
    with as_user(STRANGER), stranger(server.address) as plain:
        plain.sendall(next(handshake).send)
        run_loop(loop)
        reply = plain.recv(HELLO.size)
        plain.sendall(bytes(32) if mode is SecurityMode.NONE else handshake.send(reply).send)
        loop.wait_for(lambda: received.ends, 5.0, "the end")
    assert "key" in str(received.ends[0])
    assert (server.connections, received.messages) == ([], [])


def test_messages_that_are_gathered_leave_together_at_the_end(loop, place_and_secret):
    records = Records()
    server = listen(loop, place_and_secret[0], place_and_secret[1], records.message)
    connection, _ = connect_and_record(loop, server.address, place_and_secret[1])
    run_loop(loop)
    with loop.cork():
        for kind in ("one", "two"):
            connection.send(RpcMessage(kind))
        run_loop(loop)
        assert not records.messages
    run_loop(loop)
    assert [message.kind for message in records.messages] == ["one", "two"]


def test_of_blocks_inside_each_other_the_outermost_one_counts(loop, place_and_secret):
    records = Records()
    server = listen(loop, place_and_secret[0], place_and_secret[1], records.message)
    connection, _ = connect_and_record(loop, server.address, place_and_secret[1])
    run_loop(loop)
    with loop.cork():
        with loop.cork():
            connection.send(RpcMessage("one"))
        run_loop(loop)
        assert not records.messages
    run_loop(loop)
    assert [message.kind for message in records.messages] == ["one"]


def test_a_block_of_another_thread_holds_nothing_back(loop, place_and_secret):
    records, is_inside, is_over = Records(), threading.Event(), threading.Event()
    server = listen(loop, place_and_secret[0], place_and_secret[1], records.message)
    connection, _ = connect_and_record(loop, server.address, place_and_secret[1])
    run_loop(loop)
    other = threading.Thread(target=stay_inside, args=(loop, is_inside, is_over))
    other.start()
    is_inside.wait(10.0)
    with loop.cork():
        connection.send(RpcMessage("one"))
    run_loop(loop)
    assert [message.kind for message in records.messages] == ["one"]
    is_over.set()
    other.join(10.0)


def stay_inside(loop, is_inside, is_over):
    with loop.cork():
        is_inside.set()
        is_over.wait(10.0)


def test_what_is_gathered_leaves_when_somebody_waits(loop, asking):
    with loop.cork():
        assert asking.request(RpcMessage("ask", {"index": 3})).wait(10.0).fields["index"] == 3


@pytest.mark.parametrize("host", ["a" * 70, "..", "é" * 60])
def test_a_name_that_no_host_can_have_is_unknown(host):
    with pytest.raises(LaunchError, match=r"cannot be resolved: .*; give a host's name or address"):
        resolve_address(parse_address(f"tcp:{host}:4000"), is_keyed=True)


@pytest.mark.parametrize("text", ["unix:x\udcff", "unix:", "tcp:x\udcff:4000", "tcp:127.0.0.1\0.a:4000", "tcp:a:70000"])
def test_a_text_that_is_no_address_is_refused(text):
    with pytest.raises(LaunchError, match="is not an address; write unix:NAME or tcp:HOST:PORT"):
        parse_address(text)
