"""A JSON schema validator, as far as the schemas of Kubernetes need one."""

import json
from pathlib import Path

SCHEMAS = Path(__file__).parent / "schemas"
KINDS = {"string": str, "integer": int, "number": int | float, "boolean": bool, "object": dict, "array": list}
FILES = {
    "Job": "job-batch-v1", "Service": "service-v1", "JobSet": "jobset-v1alpha2", "TrainJob": "trainjob-v1alpha1",
    "TrainingRuntime": "trainingruntime-v1alpha1",
}  # fmt: skip


def faults_of(manifest):
    """What in a manifest breaks the published schema of its kind."""
    schema = json.loads((SCHEMAS / f"{FILES[manifest['kind']]}.json").read_text())
    return list(faults(manifest, schema, schema["$defs"], manifest["kind"]))


def faults(value, schema, named, place):
    schema = {**schema, **named[schema["$ref"].rpartition("/")[2]]} if "$ref" in schema else schema
    choices = schema.get("anyOf", schema.get("oneOf"))
    if choices is not None:
        result = [list(faults(value, choice, named, place)) for choice in choices]
        yield from min(result, key=len)
    wanted = schema.get("type", [])
    kinds = [KINDS[kind] for kind in ([wanted] if isinstance(wanted, str) else wanted) if kind != "null"]
    if kinds and not any(isinstance(value, kind) and not (kind is int and value is True) for kind in kinds):
        yield f"{place} is {value!r}, not {wanted}"
    if value not in schema.get("enum", [value]):
        yield f"{place} is {value!r}, not one of {schema['enum']}"
    if isinstance(value, dict):
        yield from faults_inside(value, schema, named, place)
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from faults(item, schema["items"], named, f"{place}[{index}]")


def faults_inside(value, schema, named, place):
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name in schema.get("required", []):
        if name not in value:
            yield f"{place}.{name} is not there"
    for name, inner in value.items():
        if name in known:
            yield from faults(inner, known[name], named, f"{place}.{name}")
        elif others is False:
            yield f"{place}.{name} is not known"
        elif isinstance(others, dict):
            yield from faults(inner, others, named, f"{place}.{name}")
