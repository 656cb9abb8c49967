"""Clusters that are known by name."""

import pytest

from counterpoint.errors import PlanError
from counterpoint.world.cluster_file import format_cluster, parse_cluster, resolve_cluster
from counterpoint.world.known_clusters import CLUSTER_NAMES, find_gpu_name


@pytest.mark.parametrize("hosts", ["", "3x"])
@pytest.mark.parametrize("network", ["", "-ethernet"])
@pytest.mark.parametrize("name", CLUSTER_NAMES)
def test_a_named_cluster_can_be_written_to_a_file_and_read_again(name, network, hosts):
    cluster = resolve_cluster(hosts + name + network)
    assert cluster.num_ranks == (24 if hosts else 8)
    assert parse_cluster(format_cluster(cluster)) == cluster


@pytest.mark.parametrize(
    ("name", "bf16", "memory_bandwidth", "nvlink", "infiniband"),
    [
        ("8xa100-40gb", 312e12, 1.555e12, 240e9, 25e9),
        ("8xa100-80gb", 312e12, 2.039e12, 240e9, 25e9),
        ("8xh100", 989.4e12, 3.35e12, 370.8e9, 50e9),
        ("8xh200", 989.4e12, 4.8e12, 370.8e9, 50e9),
    ],
)
def test_peaks_are_those_of_dense_products_and_links_those_of_one_direction(
    name, bf16, memory_bandwidth, nvlink, infiniband
):
    cluster = resolve_cluster(f"2x{name}")
    assert cluster.device.roofline is not None
    assert cluster.device.roofline.peak_flops_per_s("bf16") == bf16
    assert cluster.device.memory_bytes_per_s == memory_bandwidth
    assert [cluster.link_among((0, rank)).bytes_per_s for rank in (1, 8)] == [nvlink, infiniband]


def test_a_narrower_dtype_is_never_slower():
    for name in CLUSTER_NAMES:
        device = resolve_cluster(name).device
        assert device.roofline is not None
        speeds = [device.flops_per_s(dtype) for dtype in ("fp64", "fp32", "tf32", "bf16")]
        assert speeds == sorted(speeds)
        assert device.flops_per_s("bf16") == device.flops_per_s("fp16") == 0.75 * dict(device.roofline.peaks)["bf16"]


def test_a_dtype_without_a_peak_has_that_of_float32():
    device = resolve_cluster("8xa100-80gb").device
    assert device.flops_per_s("fp8") == device.flops_per_s("fp32")


def test_a_tenth_of_the_memory_is_reserved():
    device = resolve_cluster("8xh100").device
    assert (device.memory_bytes, device.usable_bytes) == (80 * 2**30, 72 * 2**30)


def test_ethernet_of_a_host_is_shared_by_its_gpus_unless_each_has_an_adapter():
    shared, own = (resolve_cluster(f"2x8x{gpu}-ethernet").levels[1] for gpu in ("h100", "h200"))
    assert (shared.link.bytes_per_s, shared.is_shared) == (100e9, True)
    assert (own.link.bytes_per_s, own.is_shared) == (50e9, False)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("8xh10", "8xh100?"),
        ("8xA100", "8xa100-40gb or 8xa100-80gb?"),
        ("16x8xh20", "16x8xh200"),
        ("4xh100", "8xh100"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(wrong, meant):
    with pytest.raises(PlanError, match=f"there is no cluster {wrong}, and no file of this name; did you mean {meant}"):
        resolve_cluster(wrong)


def test_upper_case_is_the_same_name_and_a_file_of_that_name_has_a_path(tmp_path, monkeypatch):
    assert resolve_cluster("8xH100") == resolve_cluster("8xh100")
    monkeypatch.chdir(tmp_path)
    own = (
        "device: {flops: 1 GFLOP/s, memory: 1 GiB, memory_bandwidth: 1 GB/s}\nlink: {latency: 1 us, bandwidth: 1 GB/s}"
    )
    (tmp_path / "8xh100").write_text(own)
    assert resolve_cluster("./8xh100").device.cost_per_s == 1e9
    assert resolve_cluster("8xh100").num_ranks == 8


@pytest.mark.parametrize(
    ("gpu", "gib", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "8xa100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "8xa100-80gb"),
        ("NVIDIA H100 80GB HBM3", 79.2, "8xh100"),
        ("NVIDIA H200", 139.8, "8xh200"),
        ("NVIDIA A100-PCIE-40GB", 39.4, None),
        ("NVIDIA H100 NVL", 93.1, None),
        ("NVIDIA GH200 144G HBM3e", 140.0, None),
        ("Tesla T4", 14.6, None),
    ],
)
def test_a_card_is_known_by_the_name_that_its_driver_gives_it(gpu, gib, name):
    assert find_gpu_name(gpu, int(gib * 2**30)) == name


def test_too_many_ranks_are_answered_with_more_hosts():
    with pytest.raises(PlanError, match=r"16 ranks do not fit into a cluster of 8 .*more hosts in its name, as in 2x8"):
        resolve_cluster("8xh100").require_ranks(16)
