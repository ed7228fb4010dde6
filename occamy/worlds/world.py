"""One world: SQLite behind each service, a workspace, a clock of one second per call, and the dispatcher with its log.

Never raises for an agent's mistake: every fault of a call is a typed error in the result.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from occamy.contracts.record import canonical_json, digest
from occamy.contracts.task import FieldSpec, Scalar, WorldSpec
from occamy.worlds.tools import PAGE_SIZE, arguments_fit, fits, tool_names
from occamy.worlds.workspace import Workspace

WORLD_VERSION = 1
"""Raise it whenever the same call, in the same world, could answer or change anything else than before."""
_NAME = re.compile(r"[a-z]+")
_HORIZON = timedelta(days=365)
_TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class ToolResult:
    """What the agent sees of a call."""

    content: str
    """Compact JSON, ``ok``, or the text of a file."""
    ok: bool
    error: str | None
    """not_found, invalid_argument, unknown_tool, conflict or unavailable; None when ok."""


@dataclass(frozen=True)
class Event:
    """One dispatched call in full, as the dispatcher logged it."""

    ordinal: int
    """Position among dispatched calls, from 0."""
    clock: str
    """World time at dispatch, UTC."""
    name: str
    arguments: dict[str, Any] | str
    """Decoded arguments, or the raw string when it was no JSON object."""
    response: str
    ok: bool
    error: str | None
    fingerprint: str = ""
    """`World.change_print` after the call; "" in logs from before it was kept."""


class WorldError(ValueError):
    """A world specification that cannot be built: names the service, record and field, and the fix."""


class _Fault(Exception):
    """A typed error on its way to the agent."""


class World:
    """A live world. Not thread-safe: one episode, one world."""

    def __init__(self, spec: WorldSpec, workspace: Workspace) -> None:
        """Build databases and write the initial files into `workspace`.

        Raises WorldError when the specification contradicts itself (unknown field, value of the wrong type,
        dangling reference, id used twice).
        """
        check_spec(spec)
        self.events: list[Event] = []
        self._spec = spec
        self._workspace = workspace
        self._names = frozenset(tool_names(spec))
        self._faults = frozenset(spec.faults)
        self._start = _parse_clock(spec.clock)
        self._created = 0
        self._change = 0
        self._written = dict(spec.files)
        self._db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        for service, fields in spec.services.items():
            columns = "".join(f', "{name}"' for name in fields)
            self._db.execute(f'CREATE TABLE "{service}" (id TEXT PRIMARY KEY{columns}) WITHOUT ROWID')
        self._fill(spec.records, spec.files)

    def call(self, name: str, arguments: str | dict[str, Any]) -> ToolResult:
        """Dispatch one call, log it and advance the clock by one second."""
        ordinal = len(self.events)
        decoded = decode_arguments(arguments)
        try:
            if ordinal in self._faults:
                raise _Fault("unavailable")
            if name not in self._names:
                raise _Fault("unknown_tool")
            if decoded is None or not arguments_fit(self._spec, name, decoded):
                raise _Fault("invalid_argument")
            result = ToolResult(self._dispatch(name, decoded), True, None)
        except _Fault as fault:
            error = str(fault)
            result = ToolResult(_dump({"error": error}), False, error)
        shown = _printable(arguments) if decoded is None else decoded
        said = (_printable(name), shown, result.content, result.ok, result.error)
        self.events.append(Event(ordinal, self.now(), *said, self.change_print()))
        return result

    def now(self) -> str:
        """World time of the next call, UTC."""
        return (self._start + timedelta(seconds=len(self.events))).strftime(_TIME)

    def state(self) -> dict[str, Any]:
        """Canonical state: ``{"services": {service: {id: {field: value}}}, "files": {path: text}}``."""
        services = {
            service: {
                row[0]: _record(fields, row) for row in self._db.execute(f'SELECT * FROM "{service}" ORDER BY id')
            }
            for service, fields in self._spec.services.items()
        }
        return {"services": services, "files": self._workspace.texts()}

    def fingerprint(self) -> str:
        """Digest of the canonical state."""
        return digest(self.state())

    def change_print(self) -> str:
        """What the dispatched calls have changed since the start, in 32 hex digits: zeros when that is nothing.

        The sum modulo 2^128 of the hashes of all records and files as they are, less that of all as they were, so a
        call costs what it changes, however large the world. Files written past the dispatcher are not seen. It guards
        against drift, not against forgery.
        """
        return f"{self._change:032x}"

    def snapshot(self) -> bytes:
        """State, log and position of the clock as canonical JSON; `restore` continues exactly from here."""
        events = [asdict(event) for event in self.events]
        return canonical_json({"state": self.state(), "created": self._created, "events": events})

    def restore(self, data: bytes) -> None:
        """Go back to a snapshot of the same specification."""
        saved = json.loads(data)
        for service in self._spec.services:
            self._db.execute(f'DELETE FROM "{service}"')
        for path in self._workspace.list():
            self._workspace.remove(path)
        self._created = saved["created"]
        self.events = [Event(**event) for event in saved["events"]]
        self._change = int(self.events[-1].fingerprint or "0", 16) if self.events else 0
        self._written = dict(saved["state"]["files"])
        self._fill(saved["state"]["services"], saved["state"]["files"])

    def close(self) -> None:
        """Free the databases. The log stays readable."""
        self._db.close()

    def _fill(self, records: dict[str, dict[str, dict[str, Scalar]]], files: dict[str, str]) -> None:
        self._db.execute("BEGIN")
        for service, rows in records.items():
            fields = self._spec.services[service]
            marks = ",".join("?" * (len(fields) + 1))
            cells = [(key, *(row.get(f) for f in fields)) for key, row in rows.items()]
            self._db.executemany(f'INSERT INTO "{service}" VALUES ({marks})', cells)
        self._db.execute("COMMIT")
        for path, text in files.items():
            self._workspace.write(path, text)

    def _dispatch(self, name: str, arguments: dict[str, Any]) -> str:
        service, _, verb = name.rpartition("_")
        match verb:
            case "get":
                return _dump(self._get(service, arguments["id"]))
            case "search":
                return _dump(self._search(service, arguments["field"], arguments["value"], arguments.get("page", 1)))
            case "update":
                return self._update(service, arguments)
            case "create":
                return _dump({"id": self._create(service, arguments)})
        return self._file(verb, arguments)

    def _get(self, service: str, key: str) -> dict[str, Scalar]:
        row = self._db.execute(f'SELECT * FROM "{service}" WHERE id = ?', (key,)).fetchone()
        if row is None:
            raise _Fault("not_found")
        return _record(self._spec.services[service], row)

    def _search(self, service: str, field: str, value: Scalar, page: int) -> dict[str, Any]:
        offset = min((page - 1) * PAGE_SIZE, 2**62)
        query = f'SELECT id FROM "{service}" WHERE "{field}" = ? ORDER BY id LIMIT ? OFFSET ?'
        ids = [row[0] for row in self._db.execute(query, (value, PAGE_SIZE + 1, offset))]
        found: dict[str, Any] = {"ids": ids[:PAGE_SIZE]}
        return {**found, "next": page + 1} if len(ids) > PAGE_SIZE else found

    def _update(self, service: str, arguments: dict[str, Any]) -> str:
        values = {f: v for f, v in arguments.items() if f != "id"}
        before = self._get(service, arguments["id"])
        self._check_refs(service, values)
        assignments = ", ".join(f'"{f}" = ?' for f in values)
        self._db.execute(f'UPDATE "{service}" SET {assignments} WHERE id = ?', (*values.values(), arguments["id"]))
        self._note(service, arguments["id"], before, before | values)
        return "ok"

    def _create(self, service: str, values: dict[str, Any]) -> str:
        self._check_refs(service, values)
        fields = self._spec.services[service]
        same = " AND ".join(f'"{f}" IS ?' for f in fields)
        cells = tuple(values.get(f) for f in fields)
        taken = self._db.execute(f'SELECT 1 FROM "{service}" WHERE {same}', cells).fetchone()
        if taken or self._created == len(self._spec.fresh_ids):
            raise _Fault("conflict")
        key = self._spec.fresh_ids[self._created]
        self._created += 1
        marks = ",".join("?" * (len(fields) + 1))
        self._db.execute(f'INSERT INTO "{service}" VALUES ({marks})', (key, *cells))
        self._note(service, key, None, values)
        return key

    def _check_refs(self, service: str, values: dict[str, Any]) -> None:
        for name, value in values.items():
            target = self._spec.services[service][name].target
            if target and not self._db.execute(f'SELECT 1 FROM "{target}" WHERE id = ?', (value,)).fetchone():
                raise _Fault("invalid_argument")

    def _file(self, verb: str, arguments: dict[str, Any]) -> str:
        try:
            if verb == "read":
                return self._workspace.read(arguments["path"])
            if verb == "list":
                return _dump({"files": self._workspace.list()})
            path, text = arguments["path"], arguments["text"]
            self._workspace.write(path, text)
            self._note("file", path, self._written.get(path), text)
            self._written[path] = text
        except FileNotFoundError:
            raise _Fault("not_found") from None
        except ValueError:
            raise _Fault("invalid_argument") from None
        return "ok"

    def _note(self, resource: str, key: str, before: object, after: object) -> None:
        """Add a change of one record or file to the fingerprint; None stands for its absence."""
        self._change = (self._change + _hash(resource, key, after) - _hash(resource, key, before)) % 2**128


def check_spec(spec: WorldSpec) -> None:
    """Raise WorldError naming the first place where a specification contradicts itself."""
    _parse_clock(spec.clock)
    for service, fields in spec.services.items():
        if service == "file" or not fields or not all(_NAME.fullmatch(word) for word in (service, *fields)):
            raise WorldError(f"service {service!r} with fields {list(fields)}: use lower-case letters, 1 field or more")
        if "id" in fields:
            raise WorldError(f"service {service!r}: field name 'id' is taken by the record id; rename the field")
        for name, field in fields.items():
            if field.target is not None and field.target not in spec.services:
                raise WorldError(f"{service}.{name} points into {field.target!r}, which is no service of this world")
    unknown = spec.records.keys() - spec.services.keys()
    if unknown:
        raise WorldError(f"records of {sorted(unknown)}: no such service; declare its fields")
    ids = [key for rows in spec.records.values() for key in rows] + list(spec.fresh_ids)
    twice = sorted(key for key, n in Counter(ids).items() if n > 1)
    if twice:
        raise WorldError(f"record ids {twice} are used twice; ids are unique across services and fresh ids")
    for service, rows in spec.records.items():
        for key, row in rows.items():
            _check_row(spec, service, key, row)


def _check_row(spec: WorldSpec, service: str, key: str, row: dict[str, Scalar]) -> None:
    fields = spec.services[service]
    for name, value in row.items():
        if name not in fields:
            raise WorldError(f"{service} {key}: field {name!r} is not declared; it has {list(fields)}")
        target = fields[name].target
        if not fits(fields[name], value) or (target is not None and value not in spec.records.get(target, {})):
            raise WorldError(f"{service} {key}: value {value!r} does not fit field {name!r} ({fields[name].kind})")


def _parse_clock(text: str) -> datetime:
    """Read a time that says its zone (else it would mean another moment on another machine) and leaves days to run."""
    try:
        clock = datetime.fromisoformat(text)
        if clock.tzinfo is None:
            raise ValueError("no time zone")
        return clock.astimezone(UTC) + _HORIZON - _HORIZON
    except (ValueError, OverflowError) as e:
        raise WorldError(f"clock {text!r}: write a time such as 2026-01-05T09:00:00Z ({e})") from e


def decode_arguments(arguments: str | dict[str, Any]) -> dict[str, Any] | None:
    """The arguments as an object that has a canonical form (no NaN, no lone surrogates), or None."""
    try:
        decoded = json.loads(arguments) if isinstance(arguments, str) else arguments
        canonical_json(decoded)
    except (ValueError, TypeError, RecursionError):
        return None
    return dict(decoded) if isinstance(decoded, dict) else None


def _printable(value: object) -> str:
    """Any text or object as text that UTF-8 can carry, for the log."""
    text = value if isinstance(value, str) else repr(value)
    return text.encode("utf-8", errors="backslashreplace").decode()


def _hash(resource: str, key: str, value: object) -> int:
    """128 bits; 0 for what is not there."""
    if value is None:
        return 0
    return int.from_bytes(hashlib.blake2b(canonical_json([resource, key, value]), digest_size=16).digest())


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _record(fields: Mapping[str, FieldSpec], row: tuple[Any, ...]) -> dict[str, Scalar]:
    return {name: value for name, value in zip(fields, row[1:], strict=True) if value is not None}
