"""The JSON schemas of all answers, kept in ``schemas.json`` so that listing tools imports nothing.

Some answers are records of modules that import torch, which takes seconds; a test compares the file
with the records. After a change of one:

    python -m zeromismatch.agent_tools.server.schemas
"""

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ..jobs.operations import OPERATIONS
from ..jobs.results import Cut
from ..jobs.store import Job
from ..records import Record

ANYTHING = {"type": ["object", "array", "string", "number", "boolean", "null"]}
FILE = Path(__file__).with_name("schemas.json")


class Call(Record):
    """What is added to every document that a tool answers with."""

    job: str | None
    exit_code: int
    meaning: str
    folder: str | None
    cut: tuple[Cut, ...]


def schemas() -> dict[str, Any]:
    """Tool -> schema of its structured content, from the types themselves."""
    found = {name: _with_call(each.result_type()) for name, each in OPERATIONS.items()}
    job = _slim(TypeAdapter(Job).json_schema(mode="serialization"))
    found["job_result"]["$defs"]["JsonValue"] = ANYTHING
    return {**found, "job_start": job, "job_status": job}


def _with_call(kind: Any) -> dict[str, Any]:
    schema = _slim(TypeAdapter(kind).json_schema(mode="serialization"))
    call = _slim(TypeAdapter(Call).json_schema(mode="serialization"))
    definitions = {**schema.pop("$defs", {}), **call.pop("$defs", {}), "Call": call}
    added = {"call": {"$ref": "#/$defs/Call"}, "schema_version": {"type": "integer"}}
    names = [each["$ref"].rpartition("/")[2] for each in schema.pop("anyOf", [])]
    if names:
        variants = [definitions.pop(name) for name in names]
        merged = [{**each, "properties": {**added, **each["properties"]}} for each in variants]
        return {"type": "object", "anyOf": merged, "required": ["call"], "$defs": definitions}
    schema["properties"] = {**added, **schema["properties"]}
    schema["required"] = [*schema.get("required", []), "call"]
    return {**schema, "$defs": definitions}


def _slim(schema: Any) -> Any:
    """Without titles, descriptions and defaults: docstrings hold more than a client needs."""
    if isinstance(schema, list):
        return [_slim(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for name, value in schema.items():
        if name in ("properties", "$defs"):
            kept[name] = {key: _slim(each) for key, each in value.items()}
        elif name not in ("title", "description", "default", "examples"):
            kept[name] = _slim(value)
    return kept


if __name__ == "__main__":
    FILE.write_text(json.dumps(schemas(), indent=1, sort_keys=True) + "\n")
