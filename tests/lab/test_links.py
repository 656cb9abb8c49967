"""Links of the lab: rate, counters, loss, partitions, delay."""

import pytest

from benchmarks.lab import Lab, LabError, wait_all

pytestmark = [pytest.mark.process, pytest.mark.slow]

RATE, BYTES_PER_S, NUM_BYTES = "100mbit", 12.5e6, 15_000_000


def transfer(lab, peer_command, source, target, num_bytes):
    """Send bytes over one connection and return (bytes, bytes per second) as the target saw them."""
    taking = lab.start(target, peer_command("take"))
    taking.wait_for("ready")
    lab.run({source: peer_command("give", target, num_bytes)})[source].text()
    _, total, speed = wait_all([taking], deadline_s=20)[0].text().split()
    return int(total), float(speed)


def count_received(lab, peer_command, source, target, number, patience_s=20):
    """Throw datagrams and return how many arrived."""
    counting = lab.start(target, peer_command("count", patience_s))
    counting.wait_for("ready")
    lab.run({source: peer_command("throw", target, number)})[source].text()
    return int(wait_all([counting], deadline_s=40)[0].text().split()[-1])


def reached(lab, peer_command, source, target):
    return lab.run({source: peer_command("reach", target)})[source].text().strip()


def echo(lab, peer_command, *hosts):
    for host in hosts:
        lab.start(host, peer_command("echo")).wait_for("ready")


@pytest.mark.parametrize(("source", "target"), [("h0", "h1"), ("h1", "h0")])
def test_a_link_carries_its_rate_and_no_more(permitted, peer_command, source, target):
    with Lab(hosts=2, rate=RATE) as lab:
        total, speed = transfer(lab, peer_command, source, target, NUM_BYTES)
    assert total == NUM_BYTES
    assert 0.85 * BYTES_PER_S < speed < 1.01 * BYTES_PER_S


@pytest.mark.slow
def test_two_senders_share_the_rate_of_the_link_to_their_target(permitted, peer_command):
    with Lab(hosts=3, rate=RATE) as lab:
        taking = [lab.start("h0", peer_command("take", port)) for port in (5000, 5001)]
        for one in taking:
            one.wait_for("ready")
        lab.run({"h1": peer_command("give", "h0", NUM_BYTES, 5000), "h2": peer_command("give", "h0", NUM_BYTES, 5001)})
        reports = [one.text().split() for one in wait_all(taking, deadline_s=20)]
    longest_s = max(float(total) / float(speed) for _, total, speed in reports)
    assert 0.8 * BYTES_PER_S < 2 * NUM_BYTES / longest_s < 1.1 * BYTES_PER_S


def test_a_link_takes_another_rate_while_it_is_up(lab, peer_command):
    lab.shape("h1", "50mbit")
    assert 0.85 * 6.25e6 < transfer(lab, peer_command, "h0", "h1", 5_000_000)[1] < 1.01 * 6.25e6


def test_counters_count_what_crosses_the_wire_and_not_what_stays(lab, peer_command):
    before = {name: lab.traffic(name) for name in lab.names}
    transfer(lab, peer_command, "h0", "h1", 1_000_000)
    transfer(lab, peer_command, "h0", "h0", 1_000_000)
    crossed = {name: lab.traffic(name) - before[name] for name in lab.names}
    assert 1_000_000 < crossed["h0"].sent_bytes < 1_100_000
    assert abs(crossed["h0"].sent_bytes - crossed["h1"].received_bytes) < 1000  # the switch has a word to say, too
    assert crossed["h1"].sent_bytes < 100_000


def test_loss_loses_its_share_in_its_direction_only(faults, peer_command):
    with Lab(hosts=2, rate="5mbit") as lab:
        lab.lose("h0", "h1", 0.2)
        assert 1450 < count_received(lab, peer_command, "h0", "h1", 2000) < 1750
        assert count_received(lab, peer_command, "h1", "h0", 2000) == 2000


def test_a_one_way_cut_is_silent_one_way(faults, lab, peer_command):
    lab.cut("h0", "h1")
    assert count_received(lab, peer_command, "h0", "h1", 10, patience_s=1) == 0
    assert count_received(lab, peer_command, "h1", "h0", 10) == 10


def test_a_partition_cuts_its_sides_only_and_heals(faults, peer_command):
    with Lab(hosts=3) as lab:
        echo(lab, peer_command, "h0", "h1")
        lab.partition("h0", ("h1", "h2"))
        assert [reached(lab, peer_command, "h2", to) for to in ("h0", "h1")] == ["TimeoutError", "reached"]
        lab.heal()
        assert reached(lab, peer_command, "h2", "h0") == "reached"


def test_an_unplugged_host_is_silent_until_it_is_plugged_in(lab, peer_command):
    echo(lab, peer_command, "h1")
    lab.unplug("h1")
    assert reached(lab, peer_command, "h0", "h1") in {"TimeoutError", "OSError"}
    lab.plug("h1")
    assert reached(lab, peer_command, "h0", "h1") == "reached"


def test_a_delay_applies_each_way_whichever_side_connects(faults, lab, peer_command):
    echo(lab, peer_command, "h0", "h1")
    lab.delay("h0", "h1", 0.03)
    lab.delay("h1", "h0", 0.01)
    times = [
        float(lab.run({one: peer_command("round_trip", to)})[one].text()) for one, to in (("h0", "h1"), ("h1", "h0"))
    ]
    assert all(0.04 <= time_s < 0.06 for time_s in times)


def test_a_delay_that_ends_is_gone(faults, lab, peer_command):
    echo(lab, peer_command, "h1")
    lab.delay("h0", "h1", 0.03)
    lab.delay("h0", "h1", 0.0)
    assert float(lab.run({"h0": peer_command("round_trip", "h1")})["h0"].text()) < 0.02


@pytest.mark.slow
def test_jitter_follows_the_seed(faults, peer_command):
    times = []
    for seed in (1, 1, 3):
        with Lab(hosts=2, seed=seed) as lab:
            echo(lab, peer_command, "h1")
            lab.delay(lab.names, lab.names, 0.01, jitter_s=0.1)
            times.append(float(lab.run({"h0": peer_command("round_trip", "h1")})["h0"].text()))
    assert abs(times[0] - times[1]) < 0.02 < abs(times[0] - times[2])
    assert min(times) > 0.02


def test_bytes_that_are_delayed_still_come_at_the_rate_of_the_link(faults, peer_command):
    with Lab(hosts=2, rate=RATE, latency_s=0.02) as lab:
        total, speed = transfer(lab, peer_command, "h0", "h1", NUM_BYTES)
        assert lab.traffic("h0").sent_bytes < 1.1 * NUM_BYTES
    assert total == NUM_BYTES
    assert 0.8 * BYTES_PER_S < speed < 1.05 * BYTES_PER_S


def test_a_delayed_connection_without_a_listener_is_reset(faults, lab, peer_command):
    lab.delay("h0", "h1", 0.01)
    assert reached(lab, peer_command, "h0", "h1") == "ConnectionResetError"


@pytest.mark.slow
def test_two_losses_at_once_each_have_their_share(faults, peer_command):
    with Lab(hosts=3, rate="5mbit") as lab:
        lab.lose("h0", "h2", 0.5)
        lab.lose("h1", "h2", 0.1)
        assert 400 < count_received(lab, peer_command, "h0", "h2", 1000) < 600
        assert 850 < count_received(lab, peer_command, "h1", "h2", 1000) < 950


def test_a_ratio_above_one_is_refused(lab):
    with pytest.raises(LabError, match=r"ratio=5: give a number from 0"):
        lab.lose("h0", "h1", 5)
