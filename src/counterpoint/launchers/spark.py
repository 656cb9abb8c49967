"""Starting Spark from a script: what has to be installed, and a session of a few executors on this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from counterpoint.errors import LaunchError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LEAST_JAVA = 17
"""The oldest Java that Spark 4 runs on."""

REMEDY = "install one, on Debian with apt-get install openjdk-17-jre-headless, or set JAVA_HOME"


def why_no_spark() -> str:
    """Return what is missing for Spark to start, and how to get it; empty where nothing is."""
    if find_spec("pyspark") is None:
        return "there is no PySpark; pip install 'counterpoint[spark]'"
    java = java_path()
    if java is None:
        return f"there is no Java, which Spark runs on; {REMEDY}"
    found = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=60)
    major = java_major(found.stderr + found.stdout)
    if major is None:
        return f"{java} does not say its version: {(found.stderr + found.stdout).strip()[:200]!r}; {REMEDY}"
    if major < LEAST_JAVA:
        return f"{java} is Java {major}, but Spark 4 needs {LEAST_JAVA} or newer; {REMEDY}"
    return ""


def java_path() -> str | None:
    """Return the Java that Spark would take: that of JAVA_HOME, else the first on the path."""
    home = os.environ.get("JAVA_HOME")
    if home:
        path = Path(home) / "bin" / "java"
        return str(path) if path.is_file() else None
    return shutil.which("java")


def java_major(text: str) -> int | None:
    """Return the major version in what ``java -version`` prints.

    Example:
        >>> java_major('openjdk version "17.0.15" 2025-04-15'), java_major('java version "1.8.0_202"')
        (17, 8)
    """
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(found[1]) if found else None


def start_spark(
    *,
    executors: int = 2,
    cores: int = 1,
    memory_mib: int = 1024,
    name: str = "counterpoint",
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return a session with executors of their own on this machine; end it with ``stop()``.

    Args:
        executors: processes of Java, each of which starts Python workers.
        cores: tasks that each runs at once.
        memory_mib: of each.
        name: what Spark calls it.
        settings: of Spark, which count before those that are made here.

    Raises:
        LaunchError: PySpark or Java is missing, or too old.
    """
    missing = why_no_spark()
    if missing:
        raise LaunchError(f"Spark cannot start: {missing}")
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # nobody else can reach its ports
    chosen = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": f"{memory_mib}m",
        "spark.executor.memory": f"{memory_mib}m",
        # Too few slots for a stage that needs all at once are an error after a second, not after ten minutes.
        "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "1",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
        **(settings or {}),
    }
    builder = SparkSession.builder.master(f"local-cluster[{executors},{cores},{memory_mib}]").appName(name)
    for key, value in chosen.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
