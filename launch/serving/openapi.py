"""The OpenAPI document of the server, from its routes and the schemas of their bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pydantic.json_schema import models_json_schema

from launch.client.request_fields import DONE, find_field
from launch.client.schema_base import Schema

KINDS = {"/metrics": "text/plain", "/": "text/html", "/page/{name}": "*/*"}  # routes whose responses are not JSON
REF = "#/components/schemas/{model}"
TEXT, TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}
ERROR_FIELDS = {"message": TEXT, "type": TEXT, "param": TEXT_OR_NULL, "code": TEXT_OR_NULL}
ERROR = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": ERROR_FIELDS}, "request_id": TEXT},
}


def document(
    version: str, routes: Iterable[tuple[str, str, str, type[Schema] | None, bool]], keyed: bool
) -> dict[str, Any]:
    """Creates the OpenAPI document.

    Args:
        routes: path, method, summary and body of each, and whether it needs no API key.
        keyed: whether the other routes need an API key.
    """
    routes = [*routes]
    bodies = {body for *_, body, _ in routes if body is not None}
    _, found = models_json_schema([(body, "validation") for body in sorted(bodies, key=str)], ref_template=REF)
    schemas = found.get("$defs", {})
    for schema in bodies:
        _describe(schemas[schema.__name__], schema.route)
    paths: dict[str, Any] = {}
    for path, method, summary, body, is_open in routes:
        path = re.sub(r"{(\w+):path}", r"{\1}", path)
        keyless: dict[str, Any] = {"security": []} if keyed and is_open else {}
        paths.setdefault(path, {})[method.lower()] = _operation(path, summary, body) | keyless
    about = {"title": "Helix", "version": version}
    parts = {"schemas": schemas | {"Error": ERROR}, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    return {"openapi": "3.1.0", "info": about, "paths": paths, "components": parts} | (
        {"security": [{"key": []}]} if keyed else {}
    )


def _describe(schema: dict[str, Any], route: str) -> None:
    for name, of in schema.get("properties", {}).items():
        if (field := find_field(name, route)) is not None and field.support == DONE:
            of["description"] = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", field.description)


def _operation(path: str, summary: str, body: type[Schema] | None) -> dict[str, Any]:
    content: dict[str, Any] = {KINDS.get(path, "application/json"): {}}
    if body is not None and "stream" in body.model_fields:
        content["text/event-stream"] = {}
    error = {"application/json": {"schema": {"$ref": REF.format(model="Error")}}}
    responses = {
        "200": {"description": "the answer", "content": content},
        "default": {"description": "an error", "content": error},
    }
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if names := re.findall(r"{(\w+)}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if body is not None:
        schema = {"$ref": REF.format(model=body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
