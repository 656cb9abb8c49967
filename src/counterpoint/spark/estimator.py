"""Spark ML estimator that trains a PyTorch model, and the transformer that it returns."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from pyspark import keyword_only
from pyspark.ml import Estimator, Model
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter
from torch import nn

from counterpoint.errors import CheckpointError, PlanError
from counterpoint.runtime.loss.loss_reduction import LossFunction
from counterpoint.spark.barrier_fit import fit_as_rank, load_named_tensors, named_tensors, with_learning_rate
from counterpoint.spark.module_codec import Trust, add_trusted, decode_model_table, encode_module
from counterpoint.spark.predictor import Predictor
from counterpoint.spark.ranks import run_ranks
from counterpoint.spark.samples import check_columns
from counterpoint.spark.training import train
from counterpoint.spark.training_loop import SparkOptions
from counterpoint.spark.training_spec import meta_copy
from counterpoint.value_codec import encode_value

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BIGDL = "bigdl"
"""Strategy name for training in two Spark jobs per step, without separate rank processes."""
SCHEMA = "prediction double, raw array<double>"
TRUSTED_MODULES = "spark.counterpoint.trustedModules"
"""Spark's setting with the modules that saved models may use, separated by commas; ``*`` for all."""


class _ColumnParams(Params):  # type: ignore[misc] # PySpark has no types
    """Params for the input and output columns."""

    featuresCols = Param(Params._dummy(), "featuresCols", "columns of the inputs", TypeConverters.toListString)  # noqa: N815, SLF001
    labelCol = Param(Params._dummy(), "labelCol", "column of the target", TypeConverters.toString)  # noqa: N815, SLF001
    predictionCol = Param(Params._dummy(), "predictionCol", "the class, or the number", TypeConverters.toString)  # noqa: N815, SLF001
    rawPredictionCol = Param(Params._dummy(), "rawPredictionCol", "the outputs", TypeConverters.toString)  # noqa: N815, SLF001

    def _set_defaults(self) -> None:
        self._setDefault(
            featuresCols=["features"], labelCol="label", predictionCol="prediction", rawPredictionCol="rawPrediction"
        )

    def setParams(self, **given: Any) -> Self:  # noqa: N802, ANN401 - Spark's name, and whatever params are of
        """Set params by name and return this stage."""
        self._set(**given)
        return self

    def _param_value(self, name: str) -> Any:  # noqa: ANN401 - whatever the param is of
        return self.getOrDefault(self.getParam(name))


class TorchEstimator(_ColumnParams, Estimator):  # type: ignore[misc]
    """Estimator that trains a model on a DataFrame under any strategy; ``fit`` returns a :class:`TorchModel`.

    Args:
        model: any module; it is not changed, and every ``fit`` starts from its weights.
        loss: from the model's output and the targets to the mean loss of the samples.
        optimizer: a factory such as ``partial(Adam, lr=0.01)``.
        strategy: ``"bigdl"`` trains in two Spark jobs per step, which does not need importable functions. Any other
            plan, ``"zero3"`` or ``"pipeline(2) * data(2)"``, runs as ranks in the tasks of a barrier stage.
        ranks: number of ranks; by default the number of partitions.
        batchSize: samples of one *global* batch.
        epochs: passes over the data.
        maxSteps: maximum number of steps; -1 for no limit.
        seed: of the sample order and of the model's random numbers.
        learningRate: replaces that of the factory, for a search such as CrossValidator's; 0 keeps it.
        featuresCols: input columns.
        labelCol: target column.
        predictionCol: output column: the class of the largest output, or the number if there is one output.
        rawPredictionCol: output column: all outputs of a sample.
        options: more fields of :class:`counterpoint.spark.training_loop.SparkOptions` for ``"bigdl"``, of a ``Trainer``
            for other plans.

    Raises:
        PlanError: the arguments contradict each other, or cannot be serialized.

    Example:
        A pipeline: ``Pipeline(stages=[assembler, TorchEstimator(net, loss=F.cross_entropy, optimizer=adam)])``.
    """

    strategy = Param(Params._dummy(), "strategy", "bigdl, or a plan", TypeConverters.toString)  # noqa: SLF001
    ranks = Param(Params._dummy(), "ranks", "of a plan; 0 for one each partition", TypeConverters.toInt)  # noqa: SLF001
    batchSize = Param(Params._dummy(), "batchSize", "samples of a global batch", TypeConverters.toInt)  # noqa: N815, SLF001
    epochs = Param(Params._dummy(), "epochs", "passes over the data", TypeConverters.toInt)  # noqa: SLF001
    maxSteps = Param(Params._dummy(), "maxSteps", "steps at most; -1 for no limit", TypeConverters.toInt)  # noqa: N815, SLF001
    seed = Param(Params._dummy(), "seed", "of order and draws", TypeConverters.toInt)  # noqa: SLF001
    learningRate = Param(Params._dummy(), "learningRate", "0 for the factory's own", TypeConverters.toFloat)  # noqa: N815, SLF001

    @keyword_only  # type: ignore[untyped-decorator]
    def __init__(  # noqa: PLR0913 - Spark's way: every param by keyword
        self,
        *,
        model: nn.Module,
        loss: LossFunction,
        optimizer: Callable[..., Any],
        strategy: str = BIGDL,
        ranks: int = 0,
        batchSize: int = 64,  # noqa: N803 - Spark's names
        epochs: int = 1,
        maxSteps: int = -1,  # noqa: N803
        seed: int = 0,
        learningRate: float = 0.0,  # noqa: N803
        featuresCols: Sequence[str] = ("features",),  # noqa: N803
        labelCol: str = "label",  # noqa: N803
        predictionCol: str = "prediction",  # noqa: N803
        rawPredictionCol: str = "rawPrediction",  # noqa: N803
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._set_defaults()
        if isinstance(optimizer, torch.optim.Optimizer):
            raise PlanError(
                "an estimator trains copies of its model; give an optimizer factory such as partial(Adam, lr=0.01)"
            )
        self.model, self.loss, self.optimizer, self.options = model, loss, optimizer, dict(options or {})
        self._setDefault(
            strategy=BIGDL, ranks=0, batchSize=64, epochs=1, maxSteps=-1, seed=0, learningRate=0.0
        )  # fmt: skip
        given = {key: value for key, value in self._input_kwargs.items() if self.hasParam(key)}
        self._set(**{key: list(value) if key == "featuresCols" else value for key, value in given.items()})

    def _fit(self, dataset: DataFrame) -> TorchModel:
        model = copy.deepcopy(self.model)
        optimizer = with_learning_rate(self.optimizer, self._param_value("learningRate") or None)
        columns = [*self._param_value("featuresCols"), self._param_value("labelCol")]
        run = self._fit_in_jobs if self._param_value("strategy") == BIGDL else self._fit_in_ranks
        plan, losses = run(dataset, model, optimizer, columns)
        return self._copyValues(TorchModel(model, plan, losses))  # type: ignore[no-any-return]

    def _fit_in_jobs(
        self, dataset: DataFrame, model: nn.Module, optimizer: Callable[..., Any], columns: Sequence[str]
    ) -> tuple[str, list[float]]:
        options = SparkOptions(**self._fit_options(), seed=self._param_value("seed"), **self.options)
        result = train(dataset, model, loss=self.loss, optimizer=optimizer, options=options, columns=columns)
        return result.plan, result.losses

    def _fit_in_ranks(
        self, dataset: DataFrame, model: nn.Module, optimizer: Callable[..., Any], columns: Sequence[str]
    ) -> tuple[str, list[float]]:
        payload = encode_module((model, self.loss, optimizer), "the model, the loss or the optimizer")
        trainer = {"strategy": self._param_value("strategy"), "seed": self._param_value("seed"), **self.options}
        args = [payload, {"trainer": trainer, "fit": self._fit_options()}]
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        count = self._param_value("ranks") or None
        (first, *_) = run_ranks(dataset, fit_as_rank, ranks=count, args=args, columns=columns, dtype=dtype)
        load_named_tensors(model, first["values"])
        return first["plan"], first["losses"]

    def _fit_options(self) -> dict[str, Any]:
        steps = self._param_value("maxSteps")
        return {
            "batch_size": self._param_value("batchSize"),
            "epochs": self._param_value("epochs"),
            "max_steps": None if steps < 0 else steps,
        }


class TorchModel(_ColumnParams, Model, MLWritable, MLReadable):  # type: ignore[misc]
    """A trained model as a transformer of DataFrames.

    ``transform`` adds two columns: ``predictionCol`` has the class of the largest output, or the output itself if there
    is one, as a double; ``rawPredictionCol`` has all outputs. ``write().save(path)`` and ``TorchModel.load(path)``
    store it in any file system that Spark supports, without pickle; the classes of its modules must be importable.

    What is loaded may only use torch's own layers and functions. For other classes say whose code you would run:
    ``TorchModel.load(path, trust=["my_models"])``, or ``trust=True`` for everything. Where Spark does the loading, as
    in ``PipelineModel.load``, set ``spark.conf.set("spark.counterpoint.trustedModules", "my_models")``, or ``"*"``.

    Args:
        model: trained, on the CPU.
        plan: that trained it.
        losses: of each step.
    """

    def __init__(self, model: nn.Module | None = None, plan: str = "", losses: Sequence[float] = ()) -> None:
        super().__init__()
        self._set_defaults()
        self.model, self.plan, self.losses = model, plan, list(losses)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        from pyspark.ml.functions import vector_to_array
        from pyspark.sql.functions import col

        assert self.model is not None, "only a reader creates a model without it"
        names = self._param_value("featuresCols")
        kinds = {field.name: field.dataType.simpleString() for field in dataset.schema.fields}
        check_columns(kinds, [*names, names[0]])
        inputs = [vector_to_array(col(name)) if kinds[name] == "vector" else col(name) for name in names]
        struct_column = f"counterpoint_{secrets.token_hex(4)}"
        added = [
            col(f"{struct_column}.{part}").alias(self._param_value(name))
            for part, name in (("prediction", "predictionCol"), ("raw", "rawPredictionCol"))
            if self._param_value(name)
        ]
        rows = dataset.withColumn(struct_column, make_predict_udf(dataset, self.model, names)(*inputs))
        return rows.select(*(col(name) for name in dataset.columns), *added)

    def write(self) -> MLWriter:
        """Return the writer of this model."""
        return _TorchModelWriter(self)

    @classmethod
    def read(cls, *, trust: Trust = False) -> MLReader:
        """Return the reader of models, and of what else may be imported for them; see :class:`TorchModel`."""
        return _TorchModelReader(trust)

    @classmethod
    def load(cls, path: str, *, trust: Trust = False) -> TorchModel:
        """Return the model stored at a path; see :class:`TorchModel` for ``trust``."""
        return cls.read(trust=trust).load(path)  # type: ignore[no-any-return]


def make_predict_udf(dataset: DataFrame, model: nn.Module, names: Sequence[str]) -> Callable[..., Any]:
    """Return a Spark function from input columns to a prediction and the raw outputs."""
    import pandas as pd
    from pyspark.sql.functions import pandas_udf

    dtype = next((param.dtype for param in model.parameters()), torch.float32)
    tensors = dataset.sparkSession.sparkContext.broadcast(encode_value(named_tensors(model), "the model"))
    predictor = Predictor(secrets.token_hex(8), meta_copy(model), tensors, tuple(names), dtype)

    def predict(batches):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202 - below, as objects that Spark looks at
        return predictor(batches if len(names) > 1 else ((one,) for one in batches))

    input_type = pd.Series if len(names) == 1 else tuple[pd.Series, ...]
    predict.__annotations__ = {"batches": Iterator[input_type], "return": Iterator[pd.DataFrame]}  # type: ignore[valid-type]
    return pandas_udf(predict, SCHEMA)  # type: ignore[no-any-return]


class _TorchModelWriter(MLWriter):  # type: ignore[misc]
    """Writer of a model: Spark's metadata, and a table of one row."""

    def __init__(self, instance: TorchModel) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str) -> None:  # noqa: N802 - Spark's name
        """Write the model to the path."""
        model = self.instance
        row = (bytearray(encode_module(model.model, "the model")), model.plan, model.losses)
        DefaultParamsWriter.saveMetadata(model, path, self.sparkSession)
        frame = self.sparkSession.createDataFrame([row], "model binary, plan string, losses array<double>")
        frame.coalesce(1).write.parquet(f"{path}/files")


class _TorchModelReader(MLReader):  # type: ignore[misc]
    """Reader of models written by :class:`_TorchModelWriter`.

    Args:
        trust: what else may be imported for them, besides what the session's settings say.
    """

    def __init__(self, trust: Trust) -> None:
        super().__init__()
        self._trust = trust

    def load(self, path: str) -> TorchModel:
        """Return the model stored at a path.

        Raises:
            CheckpointError: something else is stored there.
            PlanError: one of its classes is not trusted, or cannot be imported here.
            ProtocolError: the model is malformed.
        """
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        if metadata["class"].rpartition(".")[2] != TorchModel.__name__:
            raise CheckpointError(f"{path} stores a {metadata['class']}, not a TorchModel; load it with that class")
        rows = [row.asDict() for row in self.sparkSession.read.parquet(f"{path}/files").take(2)]
        trust = add_trusted(self._trust, self.sparkSession.conf.get(TRUSTED_MODULES, ""))
        try:
            loaded = TorchModel(*decode_model_table(rows, trust))
        except CheckpointError as error:
            raise CheckpointError(f"{path} stores no TorchModel: {error}") from error
        loaded._resetUid(metadata["uid"])  # noqa: SLF001 - as Spark's readers do
        DefaultParamsReader.getAndSetParams(loaded, metadata)
        return loaded
