"""Spark as an interpreter of programs, as BigDL uses it, for data that are in Spark already."""
