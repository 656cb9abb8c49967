"""Two sides with one key talk, in order and without loss; anybody else learns nothing."""

import socket
import threading

import pytest
import torch

from counterpoint.errors import LaunchError, PeerError, ProtocolError
from counterpoint.server.wire.client import Client
from counterpoint.server.wire.connection import ConnectionLostError
from counterpoint.server.wire.greeting import HELLO, REFUSAL, Secret
from counterpoint.server.wire.key import new_key
from counterpoint.server.wire.letter import Letter
from counterpoint.server.wire.limits import Limits
from counterpoint.server.wire.loop import Loop
from counterpoint.server.wire.place import parse_place
from counterpoint.server.wire.server import replying, serve
from tests.server.wire.conftest import Records, called, echo, turns


def stranger(place):
    """A plain socket that is connected there and has said nothing."""
    family = socket.AF_UNIX if str(place).startswith("unix") else socket.AF_INET
    plain = socket.socket(family)
    plain.settimeout(5)
    plain.connect(f"\0counterpoint/{place.name}" if family == socket.AF_UNIX else (place.host, place.port))
    return plain


def test_questions_are_answered_in_the_order_in_which_they_were_asked(asking):
    tensors = [torch.arange(300_001.0), torch.tensor(7), torch.ones(2, 0, dtype=torch.int64), torch.eye(3).bool()]
    questions = [asking.ask(Letter("ask", {"index": index}, tensors)) for index in range(4)]
    answers = [question.answer(10.0) for question in questions]
    assert [answer.fields["index"] for answer in answers] == [0, 1, 2, 3]
    for sent, received in zip(tensors, answers[-1].tensors, strict=True):
        assert (sent.dtype, sent.shape) == (received.dtype, received.shape)
        assert torch.equal(sent, received)


def test_a_loop_in_a_thread_of_its_own_answers_while_nobody_waits(place_and_secret):
    place, secret = place_and_secret
    with Loop() as serving, Loop() as calling:
        server = serve(serving, place, secret, replying(echo))
        serving.start()
        calling.start()
        with Client(calling, server.place, secret) as client:
            answers = [client.ask(Letter("ask", {"index": index}, [torch.zeros(100_000)])) for index in range(20)]
            assert [each.answer(10.0).fields["index"] for each in answers] == list(range(20))


def test_a_wrong_key_is_refused_without_a_hint(loop, place, secret):
    heard = Records()
    server = serve(loop, place, secret, heard.letter)
    with pytest.raises(
        ProtocolError, match=r"refused: the two sides have not the same job key, or are not of the same"
    ):
        Client(loop, place, Secret(new_key())).await_open()
    turns(loop)
    assert (server.connections, server.num_strangers, heard.letters) == ([], 0, [])


def test_another_generation_of_a_job_is_refused(loop, place):
    key = new_key()
    serve(loop, place, Secret(key, "job 7, generation 1"), replying(echo))
    with pytest.raises(ProtocolError, match="not of the same job and generation"):
        Client(loop, place, Secret(key, "job 7, generation 2")).await_open()


@pytest.mark.parametrize("has_key", ["server", "caller"])
def test_who_has_a_key_does_not_talk_to_those_who_have_none(loop, place, has_key):
    key = new_key()
    serve(loop, place, Secret(key if has_key == "server" else None), replying(echo))
    with pytest.raises(ProtocolError, match=r"has a job key and .* has none"):
        Client(loop, place, Secret(key if has_key == "caller" else None)).await_open()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nHost: job\r\n\r\n" * 3, b"\x16\x03\x01" + bytes(100), bytes(200)])
def test_who_does_not_greet_hears_nothing(loop, place_and_secret, said):
    place, secret = place_and_secret
    server = serve(loop, place, secret, replying(echo))
    with stranger(server.place) as plain:
        turns(loop, 3)
        plain.sendall(said)
        turns(loop)
        with pytest.raises(ConnectionResetError):
            plain.recv(100)


def test_who_greets_without_the_key_hears_one_greeting_and_one_refusal(loop, place, secret):
    server = serve(loop, place, secret, replying(echo))
    with stranger(server.place) as plain:
        plain.sendall(HELLO.pack(b"CPWS", 1, 2, bytes(32)) + bytes(32))
        turns(loop)
        heard = plain.recv(1000)
    assert heard[:8] == HELLO.pack(b"CPWS", 1, 2, bytes(32))[:8]
    assert heard[HELLO.size :] == REFUSAL


def test_strangers_are_few_and_have_little_time(clock, still_loop, place, secret):
    server = serve(still_loop, place, secret, replying(echo), limits=Limits(strangers=3))
    silent = [stranger(place) for _ in range(10)]
    turns(still_loop)
    assert server.num_strangers == 3
    with Client(still_loop, place, secret):
        assert len(server.connections) == 1
    clock.now_s += 5.1
    turns(still_loop)
    assert server.num_strangers == 0
    assert [plain.close() for plain in silent] == [None] * 10


def test_a_server_that_nobody_started_is_an_error_that_says_to_call_again(loop, secret):
    with pytest.raises(ConnectionLostError, match=r"nobody listens at unix:nobody; .* call again"):
        Client(loop, parse_place("unix:nobody"), secret)
    with pytest.raises(ConnectionLostError, match=r"tcp:127.0.0.1:1 is gone \(connection refused\); .* call again"):
        Client(loop, parse_place("tcp:127.0.0.1:1"), secret).await_open()


def test_a_goodbye_is_heard_on_the_other_side_after_everything_before_it(loop, place, secret):
    heard = Records()
    serve(loop, place, secret, heard.letter, on_end=heard.end)
    connection, _ = called(loop, place, secret)
    loop.wait_for(lambda: connection.stage.value == "open", 5.0, "the greeting")
    for index in range(3):
        connection.send(Letter("push", {"index": index}, [torch.zeros(200_000)]))
    connection.close()
    loop.wait_for(lambda: heard.ends, 5.0, "the end")
    assert [letter.fields["index"] for letter in heard.letters] == [0, 1, 2]
    assert heard.ends == [None]


def test_what_was_sent_and_closed_before_the_greeting_arrives_after_it(loop, place_and_secret):
    (place, secret), heard = place_and_secret, Records()
    server = serve(loop, place, secret, heard.letter, on_end=heard.end)
    connection, ended = called(loop, server.place, secret)
    connection.send(Letter("push", {}, [torch.arange(10)]))
    connection.close()
    loop.wait_for(lambda: heard.ends and ended.ends, 5.0, "the end on both sides")
    assert [letter.kind for letter in heard.letters] == ["push"]
    assert heard.ends == ended.ends == [None]


def test_a_server_that_closes_says_goodbye_to_those_it_knows(loop, place_and_secret):
    place, secret = place_and_secret
    server = serve(loop, place, secret, replying(echo))
    known, heard = called(loop, server.place, secret)
    loop.wait_for(lambda: server.connections, 5.0, "the greeting")
    silent = stranger(server.place)
    loop.wait_for(lambda: server.num_strangers == 1, 5.0, "the stranger")
    server.close()
    loop.wait_for(lambda: known.is_ended, 5.0, "the goodbye")
    assert (heard.ends, server.num_strangers) == ([None], 0)
    assert silent.recv(10) == b""
    silent.close()


def test_a_connection_that_breaks_off_is_an_error_on_the_other_side(loop, place, secret):
    server = serve(loop, place, secret, lambda connection, letter: connection.abort())
    with Client(loop, server.place, secret) as client:
        with pytest.raises(ConnectionLostError, match=r"server unix:.* is gone without a goodbye; .* then call again"):
            client.ask(Letter("ask")).answer(5.0)
        with pytest.raises(ConnectionLostError, match="is gone without a goodbye"):
            client.ask(Letter("ask"))


def test_a_reader_that_finds_nonsense_ends_the_connection(loop, place, secret):
    def refuse(connection, letter):
        raise ProtocolError(f"there is no {letter.kind}")

    heard = Records()
    serve(loop, place, secret, refuse, on_end=heard.end)
    connection, _ = called(loop, place, secret)
    connection.send(Letter("dance"))
    loop.wait_for(lambda: heard.ends, 5.0, "the end")
    assert isinstance(heard.ends[0], ProtocolError)
    assert "there is no dance" in str(heard.ends[0])


def test_an_answer_that_does_not_come_names_who_waits_for_what(loop, place, secret):
    serve(loop, place, secret, Records().letter)
    with (
        Client(loop, place, secret) as client,
        pytest.raises(PeerError, match=r"0.05 s for the answer of server unix:"),
    ):
        client.ask(Letter("pull")).answer(0.05)


@pytest.mark.parametrize("address", ["tcp:0.0.0.0:0", "tcp:[::]:0"])
def test_without_a_key_nothing_listens_beyond_loopback(loop, address):
    with pytest.raises(LaunchError, match="is beyond loopback and there is no job key"):
        serve(loop, parse_place(address), Secret(None), replying(echo))


def test_without_a_key_nobody_is_called_beyond_loopback(loop):
    with pytest.raises(LaunchError, match=r"tcp:192.0.2.1:4000 is beyond loopback and there is no job key"):
        Client(loop, parse_place("tcp:192.0.2.1:4000"), Secret(None))


def test_letters_that_are_gathered_leave_together_at_the_end(loop, place_and_secret):
    heard = Records()
    server = serve(loop, place_and_secret[0], place_and_secret[1], heard.letter)
    connection, _ = called(loop, server.place, place_and_secret[1])
    turns(loop)
    with loop.gathering():
        for kind in ("one", "two"):
            connection.send(Letter(kind))
        turns(loop)
        assert not heard.letters
    turns(loop)
    assert [letter.kind for letter in heard.letters] == ["one", "two"]


def test_of_blocks_inside_each_other_the_outermost_one_counts(loop, place_and_secret):
    heard = Records()
    server = serve(loop, place_and_secret[0], place_and_secret[1], heard.letter)
    connection, _ = called(loop, server.place, place_and_secret[1])
    turns(loop)
    with loop.gathering():
        with loop.gathering():
            connection.send(Letter("one"))
        turns(loop)
        assert not heard.letters
    turns(loop)
    assert [letter.kind for letter in heard.letters] == ["one"]


def test_a_block_of_another_thread_holds_nothing_back(loop, place_and_secret):
    heard, is_inside, is_over = Records(), threading.Event(), threading.Event()
    server = serve(loop, place_and_secret[0], place_and_secret[1], heard.letter)
    connection, _ = called(loop, server.place, place_and_secret[1])
    turns(loop)
    other = threading.Thread(target=stay_inside, args=(loop, is_inside, is_over))
    other.start()
    is_inside.wait(10.0)
    with loop.gathering():
        connection.send(Letter("one"))
    turns(loop)
    assert [letter.kind for letter in heard.letters] == ["one"]
    is_over.set()
    other.join(10.0)


def stay_inside(loop, is_inside, is_over):
    with loop.gathering():
        is_inside.set()
        is_over.wait(10.0)


def test_what_is_gathered_leaves_when_somebody_waits(loop, asking):
    with loop.gathering():
        assert asking.ask(Letter("ask", {"index": 3})).answer(10.0).fields["index"] == 3
