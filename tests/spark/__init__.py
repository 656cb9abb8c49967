"""Spark as an interpreter of programs: places in this process, and real executors where Spark is installed."""
