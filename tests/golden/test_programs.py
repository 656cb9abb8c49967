"""Every named strategy and the typical compositions on a small mesh, as a person reads them.

Two microbatches, or four where an order shows only then; as many blocks as show the point.
"""

from pathlib import Path
from typing import Any

import pytest

from counterpoint.plan.registry import STRATEGIES
from counterpoint.program.text import format_program, parse_program
from counterpoint.simulator.cost_model import unit_costs
from counterpoint.simulator.simulate import simulate
from counterpoint.viz.ascii_timeline import draw_ascii_timeline
from tests.program.verify.random_plans import compile_text

EARLY = {"passes": ("overlap",)}
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "solo": ("solo", {"m": 2}),
    "data_2": ("data(2)", {"m": 2}),
    "data_2_overlap": ("data(2)", {"m": 2, **EARLY}),
    "data_2_shared": ("data(2, update=sharded)", {"m": 2}),
    "data_2_onebit": ("data(2, compress=onebit, compress_from=9)", {"m": 2}),
    "data_2_compress_overlap": ("data(2, compress=topk:0.01)", {"m": 2, **EARLY}),
    "data_2_data_2_compress": ("data(2) * data(2, compress=int8)", {}),
    "data_4_adasum_tied": ("data(4, reduce=adasum)", {"tied": True, "blocks": 3}),
    "pipeline_2_data_2_compress_tied": ("pipeline(2) * data(2, compress=powersgd:2)", {"tied": True, "blocks": 3}),
    "data_4_tied": ("data(4)", {"tied": True, "blocks": 3}),
    "data_2_sync_every_8": ("data(2, sync_every=8)", {"m": 2}),
    "data_2_staleness_1": ("data(2, staleness=1)", {"m": 2}),
    "pipeline_2_data_2_sync_every_8": ("pipeline(2) * data(2, sync_every=8)", {"m": 2}),
    "pipeline_2_data_2_staleness_1": ("pipeline(2) * data(2, staleness=1)", {"m": 2}),
    "zero_2": ("zero(2)", {"m": 2}),
    "zero1_2_overlap": ("zero1(2)", {"m": 2, **EARLY}),
    "zero2_2": ("zero2(2)", {"m": 2}),
    "zero3_2": ("zero3(2)", {"m": 2}),
    "zero3_2_overlap": ("zero3(2)", EARLY),
    "zero3_2_reshard_off": ("zero3(2, reshard_after_forward=off)", {"m": 2}),
    "zero3_2_quantized": (
        "zero3(2, quantized_weights=int8, quantized_gradients=int4)",
        {"blocks": 3, "passes": ("overlap", "prefetch")},
    ),
    "zero1_2_quantized": ("zero1(2, quantized_gradients=int8)", {"m": 2}),
    "zero3_2_quantized_data_2": ("zero3(2, quantized_weights=int8, quantized_gradients=int4) * data(2)", {}),
    "zero3_2_prefetch": ("zero3(2)", {"m": 2, "blocks": 3, "passes": ("overlap", "prefetch")}),
    "zero3_2_prefetch_depth_2": ("zero3(2)", {"m": 2, "blocks": 5, "passes": ("overlap", "prefetch:2")}),
    "zero2_2_offload": ("zero2(2)", {"passes": ("overlap", "offload:state=disk")}),
    "pipeline_2_offload_activations": (
        "pipeline(2)",
        {"m": 2, "blocks": 4, "passes": ("recompute", "offload:activations=disk")},
    ),
    "zero3_2_offload_host": ("zero3(2)", {"passes": ("offload:state=host",)}),
    "zero3_2_offload_weights": (
        "zero3(2)",
        {"blocks": 3, "passes": ("overlap", "prefetch", "offload:params=disk", "offload:state=disk")},
    ),
    "zero3_2_tied": ("zero3(2)", {"tied": True}),
    "pipeline_4": ("pipeline(4)", {"m": 4, "blocks": 4}),
    "gpipe_4": ("gpipe(4)", {"m": 4, "blocks": 4}),
    "one_f_one_b_2": ("one_f_one_b(2)", {"m": 4, "blocks": 3}),
    "pipedream_flush_2": ("pipedream_flush(2)", {"m": 2}),
    "gpipe_2_recompute": ("gpipe(2, checkpoint=except_last)", {"m": 3, "blocks": 4}),
    "pipedream_2_recompute": ("pipedream(2, recompute=always)", {}),
    "zero_bubble_2_recompute": ("zero_bubble(2, recompute=always)", {"m": 3}),
    "zero3_2_recompute": ("zero3(2)", {"blocks": 3, "passes": ("recompute",)}),
    "pipeline_2_data_2_recompute": (
        "pipeline(2) * data(2)",
        {"m": 2, "blocks": 4, "passes": ("overlap", "recompute:50%")},
    ),
    "gpipe_2_virtual_2": ("gpipe(2, chunks_per_stage=2)", {"m": 2, "blocks": 4}),
    "interleaved_2": ("interleaved(2)", {"m": 4, "blocks": 4}),
    "interleaved_2_zero2_2_tied": ("interleaved(2) * zero2(2)", {"blocks": 4, "tied": True}),
    "megatron_interleaved_2": ("megatron_interleaved(2, chunks_per_stage=3)", {"m": 3, "blocks": 6}),
    "zero_bubble_2": ("zero_bubble(2)", {"m": 4}),
    "zero_bubble_2_virtual_2": ("zero_bubble(2, chunks_per_stage=2)", {"m": 4, "blocks": 4}),
    "zero_bubble_2_tensor_2": ("zero_bubble(2) * tensor(2)", {}),
    "zero_bubble_2_zero3_2": ("zero_bubble(2) * zero3(2)", {}),
    "pipedream_3": ("pipedream(3)", {"blocks": 3}),
    "pipedream_3_vertical_sync": ("pipedream(3, vertical_sync=on)", {"blocks": 3}),
    "pipedream_2_replicas_2_1": ("pipedream(2, replicas=(2,1))", {"m": 2}),
    "pipedream_2bw_2": ("pipedream_2bw(2)", {"m": 2}),
    "tensor_2_pipedream_2": ("tensor(2) * pipedream(2)", {}),
    "gpipe_4_skips": ("gpipe(4)", {"m": 2, "blocks": 8, "skips": True}),
    "pipeline_2_skips": ("pipeline(2)", {"m": 2, "blocks": 4, "skips": True}),
    "interleaved_2_skips_data_2": ("interleaved(2) * data(2)", {"blocks": 4, "skips": True}),
    "pipedream_3_skips": ("pipedream(3)", {"blocks": 4, "skips": True}),
    "pipeline_2_tied": ("pipeline(2)", {"m": 2, "blocks": 4, "tied": True}),
    "pipeline_2_replicas_2_1": ("pipeline(2, replicas=(2,1))", {"m": 4, "blocks": 3}),
    "gpipe_2_replicas_1_2": ("gpipe(2, replicas=(1,2), balance=(1,2))", {"m": 2, "blocks": 3}),
    "tensor_2": ("tensor(2)", {"m": 2}),
    "tensor_2_partitioned": ("tensor(2)", {"blocks": 3, "passes": ("recompute", "partition_activations")}),
    "tensor_2_tied": ("tensor(2)", {"blocks": 3, "tied": True}),
    "server_2": ("server(2)", {"m": 2}),
    "bsp_2_servers_2": ("bsp(2, servers=2)", {"blocks": 3}),
    "asp_2": ("asp(2)", {"m": 2}),
    "asp_2_servers_2": ("asp(2, servers=2)", {"blocks": 3}),
    "ssp_3": ("ssp(3)", {"m": 2}),
    "asp_2_compress": ("asp(2, compress=twobit:0.5)", {}),
    "bsp_2_compress": ("data(2) * bsp(2, compress=int8)", {}),
    "asp_2_pull_every_3": ("asp(2, pull_every=3)", {}),
    "elastic_2_every_4": ("easgd(2, servers=2, alpha=0.25, tau=4)", {"m": 2}),
    "data_2_elastic_2": ("data(2) * easgd(2, alpha=0.5, tau=1)", {}),
    "pipeline_2_elastic_2_tied": ("pipeline(2) * easgd(2, alpha=0.45, tau=1)", {"blocks": 3, "tied": True}),
    "pipeline_2_data_2": ("pipeline(2) * data(2)", {"m": 2}),
    "pipeline_2_data_2_overlap": ("pipeline(2) * data(2)", {"m": 2, "blocks": 4, **EARLY}),
    "pipeline_2_zero_2": ("pipeline(2) * zero(2)", {"m": 2}),
    "pipeline_2_zero2_2": ("pipeline(2) * zero2(2)", {"m": 2}),
    "pipeline_2_zero2_2_tied": ("pipeline(2) * zero2(2)", {"tied": True}),
    "tensor_2_data_2": ("tensor(2) * data(2)", {}),
    "tensor_2_pipeline_2_data_2": ("tensor(2) * pipeline(2) * data(2)", {}),
    "pipeline_2_tensor_2": ("pipeline(2) * tensor(2)", {}),
    "zero3_2_data_2": ("zero3(2) * data(2)", {}),
    "data_2_zero2_2": ("data(2) * zero2(2)", {}),
    "data_2_server_2": ("data(2) * server(2)", {}),
    "pipeline_2_asp_2": ("pipeline(2) * asp(2)", {"blocks": 3, "tied": True}),
    "server_2_tensor_2": ("server(2) * tensor(2)", {}),
    "tree_4": ("tree(4)", {"m": 2}),
    "tree_3_chain_early": ("tree(3, shape=chain, send=during_backward)", {"m": 2}),
    "tree_4_star_tied": ("tree(4, shape=star)", {"tied": True, "blocks": 3}),
    "pipeline_2_tree_2_early": ("pipeline(2) * tree(2, send=during_backward)", {"m": 2}),
    "data_2_tree_2": ("data(2) * tree(2)", {}),
    "tree_2_data_2_overlap": ("tree(2) * data(2)", {"m": 2, **EARLY}),
    "tree_2_tensor_2": ("tree(2) * tensor(2)", {}),
}
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp_2": ("ddp(2)", {"m": 2, **EARLY}),
    "data_parallel_3": ("data_parallel(3)", {"m": 2}),
    "one_device_1": ("one_device(1)", {"m": 2}),
    "mirrored_2": ("mirrored(2)", {"m": 2}),
    "mirrored_4_hierarchical_copy": ("mirrored(4, cross_device_ops=hierarchical_copy)", {}),
    "mirrored_3_reduction_to_one_device": ("mirrored(3, cross_device_ops=reduction_to_one_device)", {}),
    "multi_worker_mirrored_2": ("multi_worker_mirrored(2)", {"m": 2, **EARLY}),
    "central_storage_3": ("central_storage(3)", {"m": 2}),
    "bigdl_2": ("bigdl(2)", {"m": 2}),
    "horovod_2": ("horovod(2)", {"m": 2, **EARLY}),
    "horovod_4_hierarchical": ("horovod(4, hierarchical_allreduce=on, per_host=2)", EARLY),
    "horovod_4_hierarchical_adasum": ("horovod(4, hierarchical_allreduce=on, per_host=2, op=adasum)", {}),
    "chainermn_2": ("chainermn(2)", {"m": 2}),
    "chainermn_4_hierarchical": ("chainermn(4, communicator=hierarchical, per_host=2)", {}),
    "chainermn_4_two_dimensional": ("chainermn(4, communicator=two_dimensional, per_host=2)", {}),
    "chainermn_2_double_buffering": ("chainermn(2, double_buffering=on)", {}),
    "firecaffe_4": ("firecaffe(4)", {"m": 2}),
    "s_caffe_4": ("s_caffe(4, per_host=2)", {"blocks": 3}),
    "intel_caffe_2": ("intel_caffe(2)", {"m": 2, **EARLY}),
    "numa_caffe_2": ("numa_caffe(2)", {"m": 2}),
    "mpi_caffe_4": ("mpi_caffe(4, comm_group=2)", {"m": 2}),
    "hypar_flow_4": ("hypar_flow(4, num_partitions=2)", {"m": 2}),
    "placement_2": ("placement(2, modules=block0:0+block1:1+block2:0)", {"m": 2, "blocks": 3}),
    "placement_3_ring_tied": (
        "placement(3, modules=block0:2+block1:0+block2:1+block3:2)",
        {"m": 2, "blocks": 4, "tied": True},
    ),
    "kvstore_3": ("kvstore(3)", {"m": 2}),
    "kvstore_4_dist_device_sync": (
        "kvstore(4, type=dist_device_sync, devices=2, gradient_compression=2bit:0.5)",
        {"m": 2},
    ),
    "kvstore_2_dist_async": ("kvstore(2, type=dist_async, servers=2)", {}),
    "mxnet_mpi_4": ("mxnet_mpi(4, groups=2)", {}),
    "mxnet_mpi_4_esgd": ("mxnet_mpi(4, groups=2, mode=esgd)", {}),
    "downpour_2": ("downpour(2, n_push=2, n_fetch=4)", {"m": 2}),
    "project_adam_2": ("project_adam(2)", {}),
    "parameter_server_strategy_2": ("parameter_server_strategy(2, servers=2)", {}),
    "easgd_2": ("easgd(2)", {}),
    "pipeline_2_cuts": ("pipeline(2, split_points=block2)", {"m": 2, "blocks": 3}),
    "interleaved_2_cuts": ("interleaved(2, split_points=block1+block2+block4)", {"m": 2, "blocks": 5}),
}
PROGRAMS |= SYSTEMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_reads_as_it_did(golden, name):
    text, given = PROGRAMS[name]
    program = compile_text(text, **given).program
    golden(f"{name}.program", format_program(program) + "\n")
    assert parse_program(format_program(program)) == program


DRAWN = {
    "gpipe_4_drawn": ("gpipe(4)", 4, 8),
    "one_f_one_b_4_drawn": ("one_f_one_b(4)", 4, 8),
    "gpipe_4_recompute_drawn": ("gpipe(4, checkpoint=except_last)", 4, 8),
    "one_f_one_b_4_recompute_drawn": ("one_f_one_b(4, recompute=except_last)", 4, 8),
    "interleaved_4_drawn": ("interleaved(4)", 8, 8),
    "zero_bubble_4_drawn": ("zero_bubble(4)", 4, 8),
    "zero_bubble_4_virtual_2_drawn": ("zero_bubble(4, chunks_per_stage=2)", 8, 8),
    "placement_3_drawn": ("placement(3, modules=block0:0+block1:1+block2:2+block3:0)", 4, 4),
    "pipedream_4_drawn": ("pipedream(4)", 4, 1),
    "pipedream_2_replicas_2_1_drawn": ("pipedream(2, replicas=(2,1))", 2, 2),
    "pipedream_2bw_4_drawn": ("pipedream_2bw(4)", 4, 4),
    "hypar_flow_4_drawn": ("hypar_flow(4, num_partitions=2)", 2, 4),
    "ssp_3_staleness_0_drawn": ("ssp(3, staleness=0)", 2, 1),
    "easgd_2_drawn": ("easgd(2)", 2, 2),
    "mpi_caffe_4_drawn": ("mpi_caffe(4, comm_group=2)", 2, 4),
}
"""Plans and numbers of blocks, one for each chunk, and of microbatches."""


@pytest.mark.parametrize("name", DRAWN)
def test_a_schedule_is_drawn_as_in_its_paper(golden, name):
    """A forward takes one tick, and each of the two parts of a backward another one."""
    text, blocks, micros = DRAWN[name]
    trace = simulate(compile_text(text, m=micros, blocks=blocks).program, unit_costs(backward_ticks=2))
    golden(f"{name}.txt", draw_ascii_timeline(trace, tick_s=1, width=250) + "\n")


def test_a_u_net_is_drawn_as_gpipe_draws_any_model(golden):
    """Two blocks per stage; skip connections are received before they are needed, so that no stage waits longer for them."""
    trace = simulate(compile_text("gpipe(4)", m=2, blocks=8, skips=True).program, unit_costs(backward_ticks=2))
    golden("gpipe_4_skips_drawn.txt", draw_ascii_timeline(trace, tick_s=1, width=250) + "\n")


def test_every_name_of_the_table_has_a_program_of_its_own():
    alone = {text.split("(")[0] for text, _ in PROGRAMS.values() if "*" not in text}
    assert alone - {"solo"} == STRATEGIES.keys()


def test_no_program_is_left_over_from_a_test_that_is_gone():
    assert {path.stem for path in Path(__file__).parent.glob("*.program")} == PROGRAMS.keys()
