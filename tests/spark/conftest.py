"""One Spark for all tests, with executors that import this tree; skipped where it cannot start."""

import importlib
from pathlib import Path

import pytest

from counterpoint.launchers.spark import missing_for_spark, start_spark

ROOT = Path(__file__).parents[2]
JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # what runs for a minute is not worth compiling well
QUICK = {"spark.driver.extraJavaOptions": JAVA, "spark.executor.extraJavaOptions": JAVA}


@pytest.fixture(scope="session")
def spark():
    missing = missing_for_spark()
    if missing:
        pytest.skip(missing)
    result = [str(ROOT), str(ROOT / "src")]
    pyspark = Path(str(importlib.import_module("pyspark").__file__)).parents[1]
    paths = ":".join([*result, str(pyspark)])
    settings = {"spark.executorEnv.PYTHONPATH": paths, "spark.task.maxFailures": "2"}
    session = start_spark(memory_mib=512, settings={**settings, **QUICK})
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()
