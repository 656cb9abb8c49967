"""The systems by name: what each becomes, where ranks are on several hosts, and what it refuses."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from counterpoint.errors import PlanError
from counterpoint.plan.plan import Plan
from counterpoint.plan.registry import STRATEGIES
from counterpoint.spark import training_loop

SYSTEMS = {name: named for name, named in STRATEGIES.items() if not isinstance(named.doc_source, type)}
ALL = "bucket=1024GiB, first_bucket=1024GiB, tune=off"
EACH = "bucket=0, first_bucket=0, tune=off"

BECOMES = [
    ("ddp(4)", "data(4, tune=off)"),
    ("ddp(4, bucket_cap_mb=50)", "data(4, bucket=50MiB, first_bucket=50MiB, tune=off)"),
    ("ddp(4, bucket_cap_mb=0.5)", "data(4, bucket=512KiB, first_bucket=512KiB, tune=off)"),
    ("ddp(2, comm_hook=fp16_compress)", "data(2, compress=fp16, tune=off)"),
    ("ddp(2, comm_hook=bf16_compress)", "data(2, compress=bf16, tune=off)"),
    ("ddp(2, comm_hook=powerSGD, matrix_approximation_rank=4)", "data(2, compress=powersgd:4, tune=off)"),
    ("data_parallel(4)", "tree(4, shape=star)"),
    ("one_device(1)", "solo"),
    ("pipeline(2) * one_device(1)", "pipeline(2)"),
    ("mirrored(4)", f"data(4, {ALL})"),
    ("mirrored(4, num_packs=0)", f"data(4, {EACH})"),
    ("mirrored(4, cross_device_ops=hierarchical_copy)", "tree(4)"),
    ("mirrored(4, cross_device_ops=reduction_to_one_device)", "tree(4, shape=star)"),
    ("multi_worker_mirrored(4)", "data(4)"),
    ("multi_worker_mirrored(4, bytes_per_pack=50MiB)", "data(4, bucket=50MiB, first_bucket=50MiB, tune=off)"),
    ("central_storage(4)", "tree(4, shape=star)"),
    ("bigdl(4)", "zero(4, level=1)"),
    ("horovod(4)", "data(4, bucket=128MiB, first_bucket=128MiB, cycle=1, tune=off)"),
    ("horovod(4, fusion_threshold=0, cycle_time=0)", f"data(4, {EACH})"),
    ("horovod(4, autotune=on, cycle_time=5)", "data(4, bucket=128MiB, first_bucket=128MiB, cycle=5)"),
    ("horovod(2, fusion_threshold=0, cycle_time=0, op=adasum)", f"data(2, reduce=adasum, {EACH})"),
    ("horovod(2, fusion_threshold=0, cycle_time=0, compression=fp16)", f"data(2, compress=fp16, {EACH})"),
    ("chainermn(4)", f"data(4, {ALL})"),
    ("chainermn(4, communicator=pure, allreduce_grad_dtype=float16)", f"data(4, compress=fp16, {ALL})"),
    ("chainermn(4, communicator=naive)", f"data(4, {EACH})"),
    ("chainermn(4, communicator=flat)", f"data(4, {ALL})"),
    ("chainermn(4, communicator=non_cuda_aware)", f"data(4, {ALL})"),
    ("chainermn(4, communicator=single_node)", f"data(4, {ALL})"),
    ("chainermn(4, communicator=hierarchical)", "tree(4, shape=star)"),
    ("chainermn(4, communicator=two_dimensional)", "data(4, update=sharded)"),
    ("chainermn(4, double_buffering=on)", "data(4, staleness=1)"),
    ("firecaffe(8)", "tree(8)"),
    ("s_caffe(8)", "tree(8, shape=chain, send=during_backward)"),
    ("intel_caffe(4)", f"data(4, {EACH})"),
    ("numa_caffe(2)", "data(2)"),
    ("gpipe(4)", "pipeline(4, schedule=gpipe)"),
    ("gpipe(2, balance=(3,1), chunks=8, checkpoint=never)", "pipeline(2, schedule=gpipe, balance=(3,1))"),
    ("gpipe(2, split_points=blocks.2)", "pipeline(2, schedule=gpipe, split_points=blocks.2)"),
    ("gpipe(2, replicas=(2,1))", "pipeline(2, schedule=gpipe, replicas=(2,1))"),
    ("gpipe(2, chunks_per_stage=2)", "pipeline(2, schedule=gpipe, chunks_per_stage=2)"),
    (
        "placement(2, modules=embed:0+blocks.0:1+head:0)",
        "pipeline(2, schedule=gpipe, split_points=embed:0+blocks.0:1+head:0)",
    ),
    ("pipedream(4)", "pipeline(4, schedule=pipedream)"),
    ("pipedream(2, replicas=(3,1))", "pipeline(2, schedule=pipedream, replicas=(3,1))"),
    ("pipedream(2, vertical_sync=on)", "pipeline(2, schedule=pipedream, vertical_sync=on)"),
    ("pipedream_2bw(4, split_points=a+b+c)", "pipeline(4, schedule=pipedream_2bw, split_points=a+b+c)"),
    ("pipedream_flush(4, balance=(1,2,2,1))", "pipeline(4, balance=(1,2,2,1))"),
    ("megatron_interleaved(4)", "pipeline(4, schedule=interleaved, chunks_per_stage=2)"),
    ("megatron_interleaved(2, chunks_per_stage=3)", "pipeline(2, schedule=interleaved, chunks_per_stage=3)"),
    ("zero_bubble(4)", "pipeline(4, schedule=zero_bubble)"),
    ("zero_bubble(4, chunks_per_stage=2)", "pipeline(4, schedule=zero_bubble, chunks_per_stage=2)"),
    ("hypar_flow(8, num_partitions=4)", "pipeline(4, schedule=gpipe) * data(2)"),
    ("hypar_flow(8, strategy=hybrid, num_replicas=4)", "pipeline(2, schedule=gpipe) * data(4)"),
    ("hypar_flow(4, strategy=model, balance=(1,2,2,1))", "pipeline(4, schedule=gpipe, balance=(1,2,2,1))"),
    ("hypar_flow(4, strategy=data)", "data(4)"),
    ("mpi_caffe(4)", "tensor(4)"),
    ("mpi_caffe(4, comm_group=2)", "tensor(2) * pipeline(2, schedule=gpipe)"),
    ("mpi_caffe(4, comm_group=1)", "pipeline(4, schedule=gpipe)"),
    ("mpi_caffe(4, comm_group=2, split_points=head)", "tensor(2) * pipeline(2, schedule=gpipe, split_points=head)"),
    ("pipeline(2) * firecaffe(2)", "pipeline(2) * tree(2)"),
    ("kvstore(4)", "tree(4, shape=star)"),
    ("kvstore(4, type=local_update_cpu, update_on_kvstore=off)", f"data(4, {EACH})"),
    ("kvstore(4, type=device)", "data(4, update=sharded)"),
    ("kvstore(4, type=nccl, update_on_kvstore=off)", f"data(4, {EACH})"),
    ("kvstore(4, type=device, gradient_compression=2bit)", f"data(4, compress=twobit:0.5, {EACH})"),
    ("kvstore(4, type=dist)", "server(4, servers=1, consistency=bsp)"),
    ("kvstore(4, type=dist_device_sync)", "server(4, servers=1, consistency=bsp)"),
    ("kvstore(4, type=dist_sync, update_on_kvstore=off)", f"data(4, {EACH})"),
    ("kvstore(4, type=dist_sync_device, devices=2)", f"data(2, {EACH}) * server(2, servers=1, consistency=bsp)"),
    (
        "kvstore(4, type=dist_async, servers=2, gradient_compression=2bit:0.25)",
        "server(4, servers=2, consistency=asp, compress=twobit:0.25)",
    ),
    ("mxnet_mpi(4)", "data(4) * server(1, servers=1, consistency=bsp)"),
    ("mxnet_mpi(4, groups=1, servers=0)", "data(4)"),
    ("mxnet_mpi(4, groups=2)", "data(2) * server(2, servers=1, consistency=bsp)"),
    ("mxnet_mpi(4, groups=4, mode=asgd)", "server(4, servers=1, consistency=asp)"),
    ("mxnet_mpi(4, groups=2, mode=esgd, tau=8)", "data(2) * easgd(2, servers=1, alpha=0.45, tau=8)"),
    ("downpour(4)", "server(4, servers=1, consistency=asp)"),
    ("downpour(4, n_push=2)", "server(4, servers=1, consistency=asp)"),
    ("downpour(4, servers=2, n_push=2, n_fetch=6)", "server(4, servers=2, consistency=asp, pull_every=3)"),
    ("project_adam(4, servers=2)", "server(4, servers=2, consistency=asp)"),
    ("parameter_server_strategy(4)", "server(4, servers=1, consistency=asp)"),
    ("parameter_server_strategy(4, servers=2, mode=sync)", "server(4, servers=2, consistency=bsp)"),
    ("easgd(4)", "easgd(4, servers=1, alpha=0.225, tau=10)"),
    ("easgd(3, tau=1)", "easgd(3, servers=1, alpha=0.3, tau=1)"),
    ("easgd(4, tau=64, alpha=0.05)", "easgd(4, servers=1, alpha=0.05, tau=64)"),
    ("easgd(4, rho=2.5, eta=0.1)", "easgd(4, servers=1, alpha=0.25, tau=10)"),
]
"""What is written, and what it has become."""


@pytest.mark.parametrize(("text", "becomes"), BECOMES)
def test_a_system_is_a_plan_of_strategies_that_reads_back_as_itself(text, becomes):
    plan = Plan.parse(text)
    assert str(plan) == becomes
    assert Plan.parse(becomes, num_microbatches=plan.num_microbatches) == plan


def test_every_system_is_shown_above():
    assert {text.split("(")[0] for text, _ in BECOMES} >= SYSTEMS.keys()


PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "systems.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\|.*\| `([^`]+)` \| `([^`]+)` \|$", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize(("here", "becomes"), ROWS)
def test_the_page_says_what_a_system_becomes(here, becomes):
    assert str(Plan.parse(here)) == becomes


def test_every_system_is_on_the_page():
    assert {here.split("(")[0] for here, _ in ROWS} == SYSTEMS.keys()


INSIDE = "data(2, update=sharded)"
OPEN = "fusion_threshold=0, cycle_time=0"
BY_HOST = [
    (f"horovod(4, hierarchical_allreduce=on, {OPEN})", f"{INSIDE} * data(2, {EACH})"),
    (f"horovod(4, {OPEN})", f"data(4, {EACH})"),
    (f"horovod(4, hierarchical_allreduce=on, op=adasum, {OPEN})", f"data(2, {EACH}) * data(2, reduce=adasum, {EACH})"),
    (
        f"horovod(4, hierarchical_allreduce=on, compression=fp16, {OPEN})",
        f"data(2, compress=fp16, {EACH}) * data(2, compress=fp16, {EACH})",
    ),
    ("chainermn(4, communicator=hierarchical)", f"tree(2, shape=star) * data(2, {ALL})"),
    ("chainermn(4, communicator=two_dimensional)", f"{INSIDE} * data(2, {ALL})"),
    ("s_caffe(4)", "tree(2, shape=chain, send=during_backward) * tree(2, send=during_backward)"),
    ("mxnet_mpi(4)", "data(2) * server(2, servers=1, consistency=bsp)"),
]
"""What is written for two hosts of two ranks, and what it becomes there."""


@pytest.mark.parametrize(("text", "becomes"), BY_HOST)
def test_a_system_adds_up_inside_hosts_first_where_ranks_are_on_several(text, becomes):
    assert str(Plan.parse(text, hosts=(0, 0, 1, 1))) == becomes
    assert str(Plan.parse(text.replace(")", ", per_host=2)"))) == becomes


@pytest.mark.parametrize(
    ("text", "hosts", "becomes"),
    [
        ("s_caffe", (0, 0, 0, 0), "tree(4, shape=chain, send=during_backward)"),
        ("s_caffe", (0, 1, 2, 3), "tree(4, send=during_backward)"),
        ("s_caffe", (0, 0, 0, 1), "tree(4, send=during_backward)"),
        (
            "pipeline(2) * s_caffe",
            (0, 0, 0, 0, 1, 1, 1, 1),
            "pipeline(2) * tree(2, shape=chain, send=during_backward) * tree(",
        ),
        ("tensor(2) * s_caffe", (0, 0, 1, 1), "tensor(2) * tree(2, send=during_backward)"),
        ("s_caffe(4, per_host=4)", (0, 0, 1, 1), "tree(4, shape=chain, send=during_backward)"),
    ],
)
def test_what_hosts_say_is_about_the_ranks_along_the_axis(text, hosts, becomes):
    assert str(Plan.parse(text, num_ranks=len(hosts), hosts=hosts)).startswith(becomes)


def refusal(text, **given):
    with pytest.raises(PlanError) as caught:
        Plan.parse(text, **given)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "ddp(2, comm_hook=zip)",
            "ddp has no comm_hook=zip; give comm_hook=none, comm_hook=fp16_compress, comm_hook=b",
        ),
        ("ddp(2, comm_hook=post_localSGD)", "kinds of steps; write data(2, sync_every=4, sync_first=100)"),
        ("ddp(2, matrix_approximation_rank=2)", "matrix_approximation_rank=2 of ddp is for comm_hook=powerSGD only"),
        ("ddp(2, bucket_cap_mb=much)", "bucket_cap_mb=much in 'ddp(2, bucket_cap_mb=much)' must be a number"),
        ("ddp(2, bucket_cap_mb=-1)", "negative; give 0 or more"),
        ("ddp(2, bucket_cap=25)", "ddp has no option 'bucket_cap=25'; its options are bucket_cap_mb=, comm_hook=, m"),
        ("one_device(2)", "one_device is one rank, not 2; write one_device(1), or mirrored(2) to use them"),
        ("mirrored(2, cross_device_ops=ring)", "mirrored has no cross_device_ops=ring; give cross_device_ops=nccl, cr"),
        ("mirrored(2, num_packs=4)", "give num_packs=0 or 1, or write data(2, bucket=16MiB)"),
        (
            "mirrored(2, num_packs=2, cross_device_ops=hierarchical_copy)",
            "num_packs=2 of mirrored needs cross_device_ops=nccl; drop it",
        ),
        ("multi_worker_mirrored(2, implementation=ring)", "the transport chooses the algorithm; drop it, or"),
        (
            "multi_worker_mirrored(2, bytes_per_pack=big)",
            "bytes_per_pack=big is not a size; give whole numbers such as",
        ),
        ("horovod(2, op=sum)", "write op=average, and multiply the learning rate by 2 for a sum"),
        ("horovod(2, op=product)", "horovod has no op=product; give op=average, op=sum or op=adasum"),
        ("horovod(2, autotune=yes)", "there is no autotune=yes; give autotune=on or autotune=off"),
        (
            "horovod(2, op=adasum, compression=fp16)",
            "adasum needs uncompressed gradients; give reduce=adasum without compress",
        ),
        (
            "horovod(4, per_host=3)",
            "horovod(4, per_host=3) cannot have the same number of ranks on each host; give a per_host",
        ),
        ("s_caffe(4, per_host=8)", "give a per_host that divides 4"),
        ("chainermn(4, communicator=mpi)", "chainermn has no communicator=mpi; give communicator=pure_nccl"),
        ("chainermn(4, communicator=flat, double_buffering=on)", "give communicator=pure_nccl, or drop these"),
        ("chainermn(4, communicator=single_node, per_host=2)", "ranks on one host, but these 4 are on 2; give"),
        ("chainermn(2, double_buffering=on, allreduce_grad_dtype=float16)", "give one of the two"),
        (
            "gpipe(2, checkpoint=sometimes)",
            "gpipe has no checkpoint=sometimes; give checkpoint=never, checkpoint=except",
        ),
        (
            "gpipe(2, chunks=2) * gpipe(2, chunks=4)",
            "chunks=2 and chunks=4; a plan has one number of microbatches",
        ),
        ("placement(2)", "needs the rank of its modules; write placement(2, modules=embed:0+blocks.0:1),"),
        ("placement(2, modules=embed+head)", "placement(2) needs the rank of its modules; write placement(2,"),
        ("hypar_flow(8)", "a number of partitions or replicas; give num_partitions= or num_replicas="),
        ("hypar_flow(8, num_partitions=3)", "3 partitions of 2 replicas each, which take 6 ranks; give num_partitions"),
        ("hypar_flow(4, num_partitions=-2)", "num_partitions=-2 of hypar_flow(4) is a number of ranks; give 1 or mo"),
        ("hypar_flow(4, num_replicas=-2)", "num_replicas=-2 of hypar_flow(4) is a number of ranks; give 1 or more"),
        ("hypar_flow(8, strategy=data, num_partitions=2)", "has partitions or replicas, not 2 partitions of 4"),
        ("hypar_flow(2, strategy=data, balance=(1,1))", "several partitions, and there is one; drop it"),
        (
            "hypar_flow(2, strategy=both)",
            "hypar_flow has no strategy=both; give strategy=model, strategy=data or strat",
        ),
        ("kvstore(4, type=dist_asinc)", "kvstore has no type=dist_asinc; give one of local, local_update_cpu"),
        ("kvstore(4, type=horovod)", "type=horovod of kvstore is a system of its own here; write horovod(...)"),
        ("kvstore(4, servers=2)", "is one worker without servers; drop servers= and devices=, or give type=dist_sync"),
        ("kvstore(4, type=dist_sync, devices=3)", "give devices= that divides 4"),
        (
            "kvstore(4, type=dist_async, update_on_kvstore=off)",
            "kvstore(type=dist_async, update_on_kvstore=off) has no optimizer on the server",
        ),
        (
            "kvstore(4, type=dist_sync, update_on_kvstore=off, servers=1)",
            "would only sum gradients, which the ranks do",
        ),
        ("kvstore(4, gradient_compression=2bit)", "type=device or a dist type, as in MXNet; local has none:"),
        ("kvstore(4, type=device, gradient_compression=1bit)", "is not documented by MXNet; give 2bit:0.5"),
        ("kvstore(4, type=dist_sync, gradient_compression=2bit:-1)", "a positive number in digits;"),
        ("mxnet_mpi(4, groups=3)", "cannot have the same number of ranks in each group; give groups= that divides 4"),
        ("mxnet_mpi(4, groups=2, servers=0)", "its weights; give servers=1, or groups=1 and mode=sgd,"),
        ("mxnet_mpi(4, groups=2, tau=4)", "alpha and tau of mxnet_mpi need mode=esgd; drop them from mode=sgd"),
        ("mxnet_mpi(4, mode=adam)", "mxnet_mpi has no mode=adam; give mode=sgd, mode=asgd or mode=esgd"),
        (
            "downpour(4, n_push=4, n_fetch=2)",
            "a worker fetches when it pushes, so that each gradient is computed with one",
        ),
        ("downpour(4, n_push=0)", "n_push=0 in 'downpour(4, n_push=0)' is a number of microbatches; give 1 or more"),
        ("downpour(4, n_push=2) * gpipe(2, chunks=4)", "n_push=2 and chunks=4; a plan has one number of microbatches"),
        ("parameter_server_strategy(2, mode=ssp)", "has no mode=ssp; give mode=async or mode=sync"),
        (
            "easgd(4, rho=2)",
            "alpha=0, rho=2, eta=0 of easgd: alpha is eta times rho; give alpha, or both of the others",
        ),
        ("easgd(4, alpha=1.5)", "alpha=1.5 of easgd is not between 0 and 1; give alpha=0.9 divided"),
        (
            "easgd(4, tau=0)",
            "easgd(4, servers=1, tau=0) has no exchange with a center; give servers=1 and tau=1, or more",
        ),
        ("mpi_caffe(4, comm_group=3)", "give a comm_group that divides 4"),
        (
            "mpi_caffe(4, split_points=head)",
            "split_points=head of mpi_caffe(4) needs several groups; also give a comm_group",
        ),
    ],
)
def test_invalid_options_of_a_system_are_refused_with_the_text_to_write(text, message):
    assert message in refusal(text)


@pytest.mark.parametrize(
    ("name", "key", "why"),
    [(name, key, why) for name, named in SYSTEMS.items() for key, why in named.unsupported.items()],
)
def test_an_option_that_says_nothing_here_is_answered_with_the_reason(name, key, why):
    assert refusal(f"{name}(2, {key}=on)") == f"{name} has no option {key}=: {why}"


def test_a_bare_name_that_cannot_take_the_ranks_says_why():
    assert refusal("one_device", num_ranks=4).startswith("one_device is one rank, not 4; write one_device(1)")
    assert refusal("chainermn(3, communicator=hierarchical, per_host=2)").startswith("chainermn(3, per_host=2) cannot")


@pytest.mark.parametrize(
    ("text", "given", "count"),
    [
        ("gpipe(4, chunks=8)", None, 8),
        ("gpipe(4, chunks=8) * data(2)", 8, 8),
        ("gpipe(4)", 3, 3),
        ("gpipe(4)", None, 1),
    ],
)
def test_chunks_are_the_microbatches_of_the_plan(text, given, count):
    assert Plan.parse(text, num_microbatches=given).num_microbatches == count


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ("-1", "chunks=-1 in 'gpipe(2, chunks=-1)' is a number of microbatches; give 1 or more"),
        ("0", "chunks=0 in 'gpipe(2, chunks=0)' is a number of microbatches; give 1 or more"),
        ("+4", "chunks=+4 in 'gpipe(2, chunks=+4)' must be whole numbers"),
        ("1_6", "chunks=1_6 in 'gpipe(2, chunks=1_6)' must be whole numbers"),
        ("", "chunks= in 'gpipe(2, chunks=)' must be whole numbers"),
    ],
)
def test_chunks_that_are_no_number_of_microbatches_are_refused(chunks, message):
    assert refusal(f"gpipe(2, chunks={chunks})") == message


def test_chunks_and_another_number_of_microbatches_are_refused():
    assert "has chunks=8, but num_microbatches=4; give one of the two" in refusal(
        "gpipe(4, chunks=8)", num_microbatches=4
    )


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_says_what_it_is_promises_and_costs_and_explains_each_option(name):
    text = SYSTEMS[name].doc_source.__doc__ or ""
    assert all(f"{part}:" in text for part in ("Args", "Promise", "Cost", "Source"))
    assert [key for key in SYSTEMS[name].options if not re.search(rf"^ +{key}: ", text, re.MULTILINE)] == []


def test_a_remedy_for_bigdl_names_classes_and_options_of_spark():
    """Two of them named a class and options that had been renamed."""
    remedies = " ".join(STRATEGIES["bigdl"].unsupported.values())
    calls = re.findall(r"([A-Z]\w+)\((?:(\w+)=)?", remedies)
    assert {"SparkOptions", "StragglerPolicy"} <= {name for name, _ in calls}
    assert all(hasattr(training_loop, name) for name, _ in calls)
    assert {option for _, option in calls if option} <= {field.name for field in fields(training_loop.SparkOptions)}
