"""Tool specification T of a world: names, JSON schemas, argument checks and declared state transitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from occamy.contracts.task import FieldSpec, WorldSpec

SERVICE_VERBS = ("get", "search", "update", "create")
FILE_TOOLS = ("file_read", "file_write", "file_list")
PAGE_SIZE = 3
"""Ids per page of a search (our choice)."""
INT_MAX = 99
"""Largest whole number an int field takes; the smallest is 0."""


@dataclass(frozen=True)
class ToolEffects:
    """The declared state transition of a tool."""

    reads: tuple[str, ...]
    """Resources it reads: ``<service>`` or ``files``."""
    writes: tuple[str, ...]
    """Resources it changes."""
    preconditions: tuple[str, ...]
    """What must hold, in words, or a typed error comes back."""
    errors: tuple[str, ...]
    """Typed errors it may answer."""


_RECORD_EXISTS = "a record with this id exists"
_VALUES_FIT = "every value fits its field; a referenced record exists"


def tool_names(spec: WorldSpec) -> tuple[str, ...]:
    """Names of every tool of a world, in display order: services as declared, then files."""
    return tuple(f"{service}_{verb}" for service in spec.services for verb in SERVICE_VERBS) + FILE_TOOLS


def is_write(name: str) -> bool:
    """Whether a tool of this name changes state."""
    return name.endswith(("_update", "_create", "_write"))


def tool_effects(spec: WorldSpec, name: str) -> ToolEffects:
    """Declared reads, writes, preconditions and errors of one tool. Raises KeyError naming an unknown tool."""
    service, verb = _split(spec, name)
    transient = ("invalid_argument", "unavailable")
    refs = tuple(dict.fromkeys(f.target for f in spec.services.get(service, {}).values() if f.target is not None))
    match verb:
        case "get":
            return ToolEffects((service,), (), (_RECORD_EXISTS,), ("not_found", *transient))
        case "search":
            return ToolEffects((service,), (), (), transient)
        case "update":
            return ToolEffects(refs, (service,), (_RECORD_EXISTS, _VALUES_FIT), ("not_found", *transient))
        case "create":
            once = "no record holds exactly these fields; an id is left"
            return ToolEffects(refs, (service,), (_VALUES_FIT, once), ("conflict", *transient))
        case "read":
            return ToolEffects(("files",), (), ("the file exists",), ("not_found", *transient))
        case "write":
            return ToolEffects((), ("files",), ("the path is relative and plain",), transient)
        case _:
            return ToolEffects(("files",), (), (), transient)


def tool_schemas(spec: WorldSpec, names: Sequence[str]) -> list[dict[str, Any]]:
    """OpenAI ``tools`` array for the named tools, in the order given. Raises KeyError naming an unknown tool."""
    return [_schema(spec, name) for name in names]


def _split(spec: WorldSpec, name: str) -> tuple[str, str]:
    service, _, verb = name.rpartition("_")
    if name in FILE_TOOLS or (service in spec.services and verb in SERVICE_VERBS):
        return service, verb
    raise KeyError(f"tool {name!r} is not in this world; it has {', '.join(tool_names(spec))}")


def _schema(spec: WorldSpec, name: str) -> dict[str, Any]:
    service, verb = _split(spec, name)
    word: dict[str, Any] = {"type": "string"}
    fields = {f: _field_schema(s) for f, s in spec.services.get(service, {}).items()}
    page = {"type": "integer", "minimum": 1}
    forms: dict[str, tuple[str, dict[str, Any], list[str]]] = {
        "get": (f"Read one {service} record.", {"id": word}, ["id"]),
        "search": (
            f"Ids of {service} records whose field holds a value, {PAGE_SIZE} a page.",
            {"field": {"type": "string", "enum": list(fields)}, "value": {"type": ["string", "integer"]}, "page": page},
            ["field", "value"],
        ),
        "update": (f"Change fields of one {service} record.", {"id": word, **fields}, ["id"]),
        "create": (f"Make a new {service} record.", fields, []),
        "read": ("Read a text file of the workspace.", {"path": word}, ["path"]),
        "write": ("Write a text file of the workspace.", {"path": word, "text": word}, ["path", "text"]),
        "list": ("List the files of the workspace.", {}, []),
    }
    description, properties, required = forms[verb]
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        parameters["required"] = required
    if verb in ("update", "create"):
        parameters["minProperties"] = len(required) + 1
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _field_schema(field: FieldSpec) -> dict[str, Any]:
    if field.kind == "enum":
        return {"type": "string", "enum": list(field.values)}
    if field.kind == "int":
        return {"type": "integer", "minimum": 0, "maximum": INT_MAX}
    return {"type": "string", "x-ref": field.target}


def fits(field: FieldSpec, value: object) -> bool:
    """Whether a value has the type of a field. The existence of a referenced record is for the caller to check."""
    if field.kind == "enum":
        return value in field.values
    if field.kind == "int":
        return type(value) is int and 0 <= value <= INT_MAX
    return type(value) is str


def arguments_fit(spec: WorldSpec, name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether arguments have the shape and types that a known tool's schema asks for."""
    service, _, verb = name.rpartition("_")
    given = arguments.keys()
    fields = spec.services.get(service, {})
    if verb == "get":
        return given == {"id"} and type(arguments["id"]) is str
    if verb == "search":
        page = arguments.get("page", 1)
        known = given - {"page"} == {"field", "value"} and arguments["field"] in tuple(fields)
        return known and type(page) is int and page >= 1 and fits(fields[arguments["field"]], arguments["value"])
    if verb in ("update", "create"):
        values = {f: v for f, v in arguments.items() if verb == "create" or f != "id"}
        has_id = verb == "create" or type(arguments.get("id")) is str
        return has_id and bool(values) and all(f in fields and fits(fields[f], v) for f, v in values.items())
    want = {"read": {"path"}, "write": {"path", "text"}}.get(verb, set())
    return given == want and all(type(v) is str for v in arguments.values())
