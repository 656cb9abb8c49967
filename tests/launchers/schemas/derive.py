"""Write the schemas of this folder anew, from the packages that publish them; see README.md here."""

import json
from pathlib import Path

import kubernetes_validate
from kubeflow_trainer_api import models

HERE = Path(__file__).parent
PUBLISHED = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / "v1.37.0-local-strict"
RULES = {"type", "required", "enum", "additionalProperties", "anyOf", "oneOf", "items", "properties", "$ref"}


def bare(schema):
    """A schema without its prose; references lead to definitions of the same file."""
    if not isinstance(schema, dict):
        return schema
    result = {key: value for key, value in schema.items() if key in RULES}
    if "properties" in result:
        result["properties"] = {name: bare(inner) for name, inner in result["properties"].items() if name != "status"}
    for key in ("items", "additionalProperties"):
        if key in result:
            result[key] = bare(result[key])
    for key in ("anyOf", "oneOf"):
        if key in result:
            result[key] = [bare(inner) for inner in result[key] if inner != {"type": "null"}]
    if "$ref" in result:
        result["$ref"] = result["$ref"].rpartition("/")[2]
    return result


def strict(schema):
    """What pydantic says of a model, where a name that it does not know is an error, as in the API server."""
    result = bare(schema)
    if "actual_instance" in result.get("properties", {}):  # how these models write a choice, as a number or a string
        return result["properties"]["actual_instance"]
    return {**result, "additionalProperties": False} if "properties" in result else result


def references(schema):
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"]
        for inner in schema.values():
            yield from references(inner)
    for inner in schema if isinstance(schema, list) else []:
        yield from references(inner)


def write(name, root, definitions):
    """The schema and all it leads to are in a file, a line for each definition."""
    needed, left = {}, list(references(root))
    while left:
        reference = left.pop()
        if reference not in needed:
            needed[reference] = definitions(reference)
            left += references(needed[reference])
    lines = [f"{json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in sorted(needed.items())]
    body = json.dumps(root, sort_keys=True)[:-1]
    (HERE / f"{name}.json").write_text(f'{body}, "$defs": {{\n' + ",\n".join(lines) + "\n}}\n")


def main():
    published = json.loads((PUBLISHED / "_definitions.json").read_text())["$defs"]
    for name in ("job-batch-v1", "service-v1"):
        root = bare(json.loads((PUBLISHED / f"{name}.json").read_text()))
        write(name, root, lambda reference: bare(published[reference]))
    for name, model in (
        ("jobset-v1alpha2", models.JobsetV1alpha2JobSet),
        ("trainjob-v1alpha1", models.TrainerV1alpha1TrainJob),
        ("trainingruntime-v1alpha1", models.TrainerV1alpha1TrainingRuntime),
    ):
        schema = model.model_json_schema(by_alias=True)
        write(name, strict(schema), lambda reference, schema=schema: strict(schema["$defs"][reference]))


if __name__ == "__main__":
    main()
