"""An estimator in a pipeline of Spark ML: digits from a Parquet file, saved, loaded and applied."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from counterpoint import CheckpointError, PlanError
from tests.spark.models import Layers, Sum

ml = pytest.importorskip("pyspark.ml", reason="there is no PySpark; pip install 'counterpoint[spark]'")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.process,
    pytest.mark.serial,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
Adam = partial(torch.optim.Adam, lr=0.01)


def estimator(**given):
    from counterpoint.spark.estimator import TorchEstimator

    torch.manual_seed(0)
    return TorchEstimator(model=Layers(64), loss=F.cross_entropy, optimizer=Adam, **given)


def accuracy(frame):
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator

    return MulticlassClassificationEvaluator(metricName="accuracy").evaluate(frame)


@pytest.fixture(scope="module")
def digits(spark, tmp_path_factory):
    """Train and held-out rows of a Parquet file: 64 columns of numbers, and the label."""
    from sklearn.datasets import load_digits

    path = str(tmp_path_factory.mktemp("digits") / "parquet")
    images, labels = load_digits(return_X_y=True)
    rows = [(*map(float, image / 16), int(label)) for image, label in zip(images, labels, strict=True)]
    spark.createDataFrame(rows, [*names(), "label"]).repartition(2, "label").write.parquet(path)
    return spark.read.parquet(path).randomSplit([0.8, 0.2], seed=1)


def names():
    return [f"pixel_{at}" for at in range(64)]


def fitted(digits, **given):
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import VectorAssembler

    stages = [VectorAssembler(inputCols=names(), outputCol="features"), estimator(**given)]
    return Pipeline(stages=stages).fit(digits[0])


@pytest.mark.timeout(170)
def test_digits_of_a_parquet_file_are_known_to_95_percent_also_by_what_was_saved(digits, tmp_path):
    from pyspark.ml import PipelineModel

    model = fitted(digits, strategy="zero3", ranks=2, epochs=15)
    assert model.stages[-1].plan == "zero(2, level=3)"
    assert accuracy(model.transform(digits[1])) >= 0.95
    model.write().save(str(tmp_path / "model"))
    with pytest.raises(PlanError, match=r"names 'tests.spark.models:Layers', which is not one of torch's layers"):
        PipelineModel.load(str(tmp_path / "model"))
    digits[0].sparkSession.conf.set("spark.counterpoint.trustedModules", "tests.spark.models")
    again = PipelineModel.load(str(tmp_path / "model"))
    digits[0].sparkSession.conf.unset("spark.counterpoint.trustedModules")
    assert again.stages[-1].losses == model.stages[-1].losses
    assert rows(again, digits[1]) == rows(model, digits[1])


def rows(model, frame):
    return sorted(model.transform(frame).select("prediction", "rawPrediction", "label").collect())


@pytest.mark.slow
def test_in_two_jobs_a_step_the_model_itself_stays_as_it_was(digits):
    model = fitted(digits, batchSize=500, epochs=1, maxSteps=2, learningRate=0.1)
    trained = model.stages[-1]
    assert (trained.plan, len(trained.losses)) == ("zero(2, level=1)", 2)
    torch.manual_seed(0)
    fresh = Layers(64)
    assert not torch.equal(first_weight(trained), first_weight(fresh))
    assert torch.equal(first_weight(estimator()), first_weight(fresh))


def first_weight(one):
    return next(getattr(one, "model", one).parameters())


def test_a_model_of_two_columns_is_applied_and_other_columns_stay(spark):
    from counterpoint.spark.estimator import TorchModel

    frame = spark.createDataFrame(
        [("a", [1.0, 2.0], 3.0), ("b", [4.0, 5.0], 6.0)], "id string, x array<double>, y double"
    )
    model = TorchModel(Sum()).setParams(featuresCols=["x", "y"], rawPredictionCol="")
    result = model.transform(frame)
    assert result.columns == ["id", "x", "y", "prediction"]
    assert [(row.id, row.prediction) for row in result.collect()] == [("a", 6.0), ("b", 15.0)]


def test_params_are_sparks(spark):
    one = estimator(batchSize=32, featuresCols=["x", "y"])
    other = one.copy({one.batchSize: 16, one.strategy: "data"})
    assert (one.getOrDefault("batchSize"), other.getOrDefault("batchSize")) == (32, 16)
    assert other.getOrDefault("featuresCols") == ["x", "y"]
    assert other.getOrDefault("strategy") == "data"


def test_an_optimizer_of_the_estimators_own_model_is_refused(spark):
    from counterpoint.spark.estimator import TorchEstimator

    model = Layers(4)
    with pytest.raises(PlanError, match="give an optimizer factory such as"):
        TorchEstimator(model=model, loss=F.cross_entropy, optimizer=Adam(model.parameters()))


def test_what_another_stage_has_saved_is_no_model(spark, tmp_path):
    from pyspark.ml.feature import VectorAssembler

    from counterpoint.spark.estimator import TorchModel

    VectorAssembler(inputCols=["x"], outputCol="y").write().save(str(tmp_path / "stage"))
    with pytest.raises(CheckpointError, match="VectorAssembler, not a TorchModel"):
        TorchModel.load(str(tmp_path / "stage"))
