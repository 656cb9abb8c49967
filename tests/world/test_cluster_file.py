"""Cluster files: parsed back as formatted, and all mistakes of a file reported together."""

import pytest
from hypothesis import strategies as st

from counterpoint.errors import PlanError
from counterpoint.world.cluster import Cluster, Device, Level, Link, Roofline, TimeSlicing
from counterpoint.world.cluster_file import format_cluster, load_cluster, parse_cluster
from counterpoint.world.quantities import (
    BANDWIDTH,
    FLOPS,
    LATENCY,
    MEMORY,
    format_quantity,
    parse_quantity,
)
from tests.covering import given_few_or_many

HOSTS = """\
device:
  flops: 30 GFLOP/s
  memory: 16 GiB
  memory_bandwidth: 10 GB/s
levels:
  - name: host
    count: 2
    latency: 5 us
    bandwidth: 10 GB/s
  - name: network
    count: 4
    latency: 50 us
    bandwidth: 1 Gbit/s
    shared: true
speeds: [1.0, 0.5]
compute_contention: [1.0, 0.6]
"""

rates = st.floats(min_value=0, max_value=1e300, exclude_min=True) | st.just(float("inf"))
links = st.builds(Link, st.floats(min_value=0, max_value=1e6), rates)
names = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "Z"]), min_size=1)
parts = st.floats(min_value=0, max_value=1, exclude_min=True)
levels = st.lists(
    st.builds(Level, names, st.integers(1, 10**6), links, is_shared=st.booleans()), min_size=1, max_size=3
)
devices = st.builds(Device, rates, st.integers(1, 2**60), rates, disk_bytes_per_s=rates, host_bytes_per_s=rates)
fractions = st.lists(parts).map(tuple)
slow = st.lists(st.tuples(st.just(0), st.just(0), parts), max_size=2).map(tuple)
turns = st.none() | st.builds(TimeSlicing, st.integers(1, 10**6), fractions, st.floats(min_value=0, max_value=1e6))
shared = {"compute_contention": fractions, "memory_contention": fractions, "slow_links": slow, "time_slicing": turns}
flat = st.builds(Cluster, devices, links, st.lists(parts).map(tuple), **shared)
nested = st.builds(Cluster, devices, levels=levels.map(tuple), **shared)


def mistakes(text):
    with pytest.raises(PlanError) as caught:
        parse_cluster(text, name="c.yaml")
    return str(caught.value).splitlines()


def changed(old, new):
    assert HOSTS.count(old) == 1
    return HOSTS.replace(old, new)


def test_a_file_is_read_as_it_says():
    inside, outside = Level("host", 2, Link(5e-6, 10e9)), Level("network", 4, Link(50e-6, 125e6), is_shared=True)
    device = Device(30e9, 16 * 2**30, 10e9)
    assert parse_cluster(HOSTS) == Cluster(device, Link(), (1.0, 0.5), (inside, outside), (1.0, 0.6))


@given_few_or_many(20, 100, flat | nested)
def test_every_cluster_is_read_as_it_was_written(cluster):
    assert parse_cluster(format_cluster(cluster)) == cluster


def test_a_written_cluster_reads_well():
    lines = format_cluster(parse_cluster(HOSTS)).splitlines()
    assert lines[:4] == HOSTS.splitlines()[:4]
    assert lines[4:7] == ["levels:", "- name: host", "  count: 2"]
    assert lines[-5:] == [
        "  latency: 50 us", "  bandwidth: 125 MB/s", "  shared: true", "speeds: [1.0, 0.5]", "compute_contention: [1.0, 0.6]",
    ]  # fmt: skip


@given_few_or_many(20, 100, rates, st.sampled_from([FLOPS, BANDWIDTH]))
def test_every_rate_is_read_as_it_was_written(rate, kind):
    assert parse_quantity(format_quantity(rate, kind), kind) == rate


@pytest.mark.parametrize(
    ("text", "kind", "amount"),
    [
        ("1 Gbit/s", BANDWIDTH, 125e6),
        ("10GB/s", BANDWIDTH, 10e9),
        ("1.5 KiB", MEMORY, 1536),
        (".1 GB", MEMORY, 10**8),
        ("2e3 GFLOP/s", FLOPS, 2e12),
        ("0 s", LATENCY, 0.0),
        ("0.3 ms", LATENCY, 3e-4),
        ("inf B/s", BANDWIDTH, float("inf")),
    ],
)
def test_a_quantity_is_a_number_and_a_unit(text, kind, amount):
    assert parse_quantity(text, kind) == amount


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("30 GFLOP/s", "30", "c.yaml:2: device.flops is 30; it has no unit; give the unit of floating point operations"),
        ("16 GiB", "16 gb", "c.yaml:3: device.memory is 16 gb; gb is not a unit of bytes; did you mean GB"),
        ("1 Gbit/s", "1 Gb/s", "c.yaml:13: levels[1].bandwidth is 1 Gb/s; Gb/s is not a unit of bits or bytes per second"),
        ("1 Gbit/s", "-1 Gbit/s", "c.yaml:13: levels[1].bandwidth is -1 Gbit/s; it must be more than 0"),
        ("1 Gbit/s", "0 Gbit/s", "c.yaml:13: levels[1].bandwidth is 0 Gbit/s; it must be more than 0"),
        ("50 us", "-50 us", "c.yaml:12: levels[1].latency is -50 us; it must be 0 or more"),
        ("50 us", "50 m", "c.yaml:12: levels[1].latency is 50 m; m is not a unit of seconds; did you mean ms"),
        ("16 GiB", "1e400 GiB", "c.yaml:3: device.memory is 1e400 GiB; it is too large"),
        ("16 GiB", "[16 GiB]", "c.yaml:3: device.memory is a list; it must be a number with a unit of bytes"),
        ("count: 4", "count: 0", "c.yaml:11: levels[1].count is 0; it must be an integer of at least 1"),
        ("count: 4", "count: 2.5", "c.yaml:11: levels[1].count is 2.5; it must be an integer"),
        ("  memory: 16", "  memry: 16", "c.yaml:3: device has an unknown key memry; did you mean memory?"),
        ("shared: true", "shared: 1", "c.yaml:14: levels[1].shared is 1; it must be true or false"),
        ("name: network", "name:", "c.yaml:10: levels[1].name is empty; it must be a name, as in name: host"),
        ("[1.0, 0.5]", "[1.0, -1]", "c.yaml:15: speeds[1] is -1; it must be a number above 0"),
        ("[1.0, 0.5]", str([1.0] * 9), "c.yaml:15: speeds has 9 numbers, but the levels have 8 ranks"),
        ("[1.0, 0.6]", "[1, 60]", "c.yaml:16: compute_contention has 60; a fraction cannot be more than 1"),
        ("compute_contention:", "memory_contention: [2]\ncompute_contention:", "c.yaml:16: memory_contention has 2; a fraction cannot"),
        ("speeds:", "time_slicing: {fractions: [1]}\nspeeds:", "c.yaml:15: time_slicing has no cores; give it, as in cores: 2"),
        ("speeds:", "time_slicing: {cores: 0}\nspeeds:", "c.yaml:15: time_slicing.cores is 0; it must be an integer of at least 1"),
        ("speeds:", "time_slicing: {cores: 1, message: 5}\nspeeds:", "c.yaml:15: time_slicing.message is 5; it has no unit"),
        ("speeds: [", "link: {latency: 0 s, bandwidth: 1 B/s}\nspeeds: [", "c.yaml:15: the file has both link and levels"),
        ("speeds:", "compute_contention:", "c.yaml:16: the file has compute_contention twice; give it once"),
        ("device:", "? [device]\n:", "c.yaml:1: a key is a list or a mapping; give it a name"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_with_its_line_the_rule_and_the_remedy(old, new, message):
    assert any(line.startswith(message) for line in mistakes(changed(old, new)))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{level: 1, group: 3, fraction: 2}", "slow_links[0].fraction is 2; it must be more than 0 and at most 1"),
        ("{level: 2, group: 0, fraction: 0.5}", "slow_links[0] is of level 2, but the outermost level is 1"),
        ("{level: 1, group: 4, fraction: 0.5}", "slow_links[0] is group 4, but level 1 has 4 groups, numbered from 0"),
        ("{level: host, group: 4, fraction: 0.5}", "slow_links[0].level is host; it must be an integer of at least 0"),
        ("{level: 1, group: 3}", "slow_links[0] has no fraction; give it, as in fraction: 0.5"),
    ],
)
def test_a_slow_link_is_one_that_there_is(entry, message):
    assert parse_cluster(f"{HOSTS}slow_links: [{{level: 0, group: 7, fraction: 0.5}}]").slow_links == ((0, 7, 0.5),)
    assert any(line.startswith(f"c.yaml:17: {message}") for line in mistakes(f"{HOSTS}slow_links: [{entry}]"))


def test_all_mistakes_are_reported_at_once_from_the_first_line_on():
    text = changed("30 GFLOP/s", "30").replace("count: 2", "count: 0").replace("speeds", "speed")
    assert [line.split(":")[1] for line in mistakes(text)] == ["2", "7", "15"]
    assert mistakes(text)[-1] == "c.yaml:15: the file has an unknown key speed; did you mean speeds?"


def test_a_missing_key_is_given_by_example():
    text = changed("    bandwidth: 10 GB/s\n", "")
    assert mistakes(text) == ["c.yaml:6: levels[0] has no bandwidth; give it, as in bandwidth: 1 Gbit/s"]


def test_a_unit_that_may_be_bits_or_bytes_is_asked_about():
    assert mistakes(changed("1 Gbit/s", "1 Gb/s"))[0].endswith("did you mean GB/s or Gbit/s?")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "c.yaml is empty; a cluster has a device and a link or levels"),
        ("a: [b", "c.yaml:1: the cluster is not YAML: while parsing a flow sequence"),
        ("words", "c.yaml:1: the file is words; it must have keys with values, device, link, levels, speeds"),
        ("[1, 2]", "c.yaml:1: the file is a list; it must have keys"),
        ("device:\nlink:", "c.yaml:1: device is empty; it must have keys with values, flops, memory, memory_bandwidth, disk_bandwidth, host_bandwidth"),
        ("levels: []", "c.yaml:1: levels must be a list with at least one item"),
        ("device: {}", "c.yaml:1: the file has neither link nor levels; give one of them"),
        ("levels: [x]", "c.yaml:1: the file has no device; give it, as in device: {flops: 30 GFLOP/s, memory: 16 GiB"),
    ],
)  # fmt: skip
def test_what_is_no_cluster_at_all_is_refused(text, message):
    assert any(line.startswith(message) for line in mistakes(text))


def test_a_file_that_is_not_there_is_named_with_the_command_that_writes_it(tmp_path):
    with pytest.raises(PlanError, match=r"cluster file .*none\.yaml cannot be read: No such file .* probe --out"):
        load_cluster(tmp_path / "none.yaml")


def test_more_ranks_than_the_levels_have_are_refused_and_fewer_are_not():
    cluster = parse_cluster(HOSTS)
    cluster.require_ranks(3)
    with pytest.raises(PlanError, match=r"9 ranks do not fit into a cluster of 8 \(host=2, network=4\); take as many"):
        cluster.require_ranks(9)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("crowding", "compute_contention", f"{HOSTS}crowding: [0.5]"),
        ("memory_crowding", "memory_contention", f"{HOSTS}memory_crowding: [0.5]"),
        ("turns", "time_slicing", f"{HOSTS}turns: {{cores: 2}}"),
        ("parts", "fractions", f"{HOSTS}time_slicing: {{cores: 2, parts: [0.5]}}"),
        ("copied", "shared_memory", HOSTS.replace("    count: 4", "    copied: true\n    count: 4")),
        ("part", "fraction", f"{HOSTS}slow_links: [{{level: 0, group: 7, part: 0.5}}]"),
    ],
)
def test_a_key_with_an_earlier_name_is_refused_with_its_present_one(old, new, text):
    (message,) = mistakes(text)
    assert message.endswith(f" has an unknown key {old}; {old} is now called {new}")


PEAKS = """\
device:
  name: a card
  flops: {fp32: 1 TFLOP/s, bf16: 4 TFLOP/s}
  memory: 8 GiB
  memory_bandwidth: 1 TB/s
  reserve: 1 GiB
  flops_fraction: 0.5
  launch: 2 us
link: {latency: 1 us, bandwidth: 1 GB/s}
"""


def test_a_device_may_have_peaks_by_dtype():
    roofline = Roofline("a card", (("fp32", 1e12), ("bf16", 4e12)), flops_fraction=0.5, launch_s=2e-6)
    assert parse_cluster(PEAKS).device == Device(1e12, 8 * 2**30, 1e12, 2**30, roofline)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("fp32: 1 ", "fp64: 1 ", "c.yaml:3: device.flops has no fp32; give it, as in flops: {fp32: 67 TFLOP/s"),
        ("bf16", "bf61", "c.yaml:3: device.flops has an unknown key bf61; did you mean bf16?"),
        ("4 TFLOP/s", "4", "c.yaml:3: device.flops.bf16 is 4; it has no unit"),
        ("reserve: 1 GiB", "reserve: 8 GiB", "c.yaml:6: device.reserve is not less than device.memory"),
        ("0.5", "1.5", "c.yaml:7: device.flops_fraction is 1.5; it must be more than 0 and at most 1"),
        (
            "{fp32: 1 TFLOP/s, bf16: 4 TFLOP/s}",
            "1 TFLOP/s",
            "c.yaml:7: device.flops_fraction is for peaks by dtype, but device.flops is 1 TFLOP/s; write it as in flops:",
        ),
    ],
)
def test_a_mistake_in_peaks_is_reported(old, new, message):
    assert any(line.startswith(message) for line in mistakes(PEAKS.replace(old, new)))


def test_a_quantity_with_too_many_digits_is_refused():
    for text in ("9" * 5000, f"1.{'9' * 5000}"):
        (message,) = mistakes(changed("30 GFLOP/s", f"{text} GFLOP/s"))
        assert message.endswith(
            "it must be a number with a unit of floating point operations per second, as in 30 GFLOP/s"
        )
