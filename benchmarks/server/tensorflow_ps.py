"""TensorFlow's ParameterServerStrategy: ``tensorflow_ps.py chief|worker|ps INDEX WORKLOAD FOLDER CLUSTER``.

The chief measures. Updates run on the server by TensorFlow's own operations, so that only gradients are sent.
"""

import itertools
import json
import os
import sys
import time
from pathlib import Path

import server_workloads
from timed_run import wait_for_file, write_result

os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="", GRPC_FAIL_FAST="use_caller")
import tensorflow as tf

RATE, MOMENTUM = 0.01, 0.9


class TensorFlowModel:
    """Linear layers with ReLU between them, after an embedding table if there is one."""

    def __init__(self, widths, table):
        draw = tf.random.Generator.from_seed(0)
        self.table = tf.Variable(draw.normal(table)) if table else None
        pairs = list(itertools.pairwise(widths))
        self.weights = [tf.Variable(draw.normal(pair, stddev=pair[0] ** -0.5)) for pair in pairs]
        self.biases = [tf.Variable(tf.zeros(wide)) for _, wide in pairs]

    @property
    def dense(self):
        return [*self.weights, *self.biases]

    def __call__(self, inputs):
        x = inputs if self.table is None else tf.reduce_sum(tf.gather(self.table, inputs), axis=1)
        for at, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = tf.linalg.matmul(x, weight) + bias
            x = x if at + 1 == len(self.weights) else tf.nn.relu(x)
        return x


def make_step(strategy, name):
    """Return a worker's step on its next batch."""
    with strategy.scope():
        if name == "D":
            model, momenta = (
                TensorFlowModel(
                    (server_workloads.WIDTH, 128, 64, 2), (server_workloads.NUM_ROWS, server_workloads.WIDTH)
                ),
                None,
            )
        else:
            model = TensorFlowModel((1024, 4096, 4096, 1024, 10), None)
            momenta = [tf.Variable(tf.zeros_like(one)) for one in model.dense]

    @tf.function
    def step(iterator):
        inputs, targets = next(iterator)
        table = [] if model.table is None else [model.table]
        with tf.GradientTape() as tape:
            output = model(inputs)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=output)
            loss = tf.reduce_mean(losses)
        (*slices,) = gradients = tape.gradient(loss, [*table, *model.dense])
        for one in table:
            sparse = slices.pop(0)
            with tf.device(one.device):
                tf.raw_ops.ResourceScatterSub(resource=one.handle, indices=sparse.indices, updates=RATE * sparse.values)
        for at, (one, gradient) in enumerate(zip(model.dense, gradients[len(table) :], strict=True)):
            with tf.device(one.device):
                if momenta is None:
                    tf.raw_ops.ResourceApplyGradientDescent(var=one.handle, alpha=RATE, delta=gradient)
                else:
                    tf.raw_ops.ResourceApplyMomentum(
                        var=one.handle, accum=momenta[at].handle, lr=RATE, grad=gradient, momentum=MOMENTUM
                    )
        return loss

    return step


def dataset(name):
    """Return a worker's batches, repeated."""
    batch = server_workloads.worker_batches(name, 0)
    drawn = [batch(number) for number in range(server_workloads.NUM_DISTINCT_BATCHES[name])]
    inputs = tf.stack([one.numpy() for one, _ in drawn])
    targets = tf.stack([two.numpy() for _, two in drawn])
    return tf.data.Dataset.from_tensor_slices((inputs, targets)).repeat()


def run_chief(name, folder, cluster):
    """Schedule steps on free workers, and measure their total time."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    step = make_step(strategy, name)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: dataset(name)))
    num_workers = len(cluster["worker"])
    for _ in range(num_workers * server_workloads.WARM_UP[name]):
        coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    (folder / "ready.chief").touch()
    wait_for_file(folder / "go")
    steps, began = num_workers * server_workloads.STEPS[name], time.perf_counter()
    losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(steps)]
    coordinator.join()
    elapsed = time.perf_counter() - began
    write_result(
        folder, "chief", {"steps": steps, "elapsed": elapsed, "losses": [float(loss.fetch()) for loss in losses]}
    )


def main(role, index, name, folder, cluster):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    if role == "chief":
        run_chief(name, Path(folder), json.loads(cluster))
        return
    found = json.loads(cluster)
    tf.distribute.Server(
        tf.train.ClusterSpec(found), job_name=role, task_index=int(index), protocol="grpc", start=True
    ).join()


if __name__ == "__main__":
    main(*sys.argv[1:])
