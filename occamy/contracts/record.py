"""The base of every record: frozen, strict about unknown keys, with one canonical JSON form and digest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen pydantic model that refuses unknown keys, and numbers that have no canonical form."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def digest(self) -> str:
        """Return ``sha256:<hex>`` over the canonical JSON of this record."""
        return digest(self.model_dump(mode="json"))


def canonical_json(value: Any) -> bytes:
    """Serialise to canonical JSON: sorted keys, no spaces, UTF-8, no NaN or infinity.

    Raises ValueError when a number is not finite and TypeError when a value has no JSON form.
    """
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def digest(value: Any) -> str:
    """Return ``sha256:<hex>`` over the canonical JSON of any JSON value or record."""
    return digest_bytes(canonical_json(value))


def digest_bytes(data: bytes) -> str:
    """Return ``sha256:<hex>`` over raw bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """Return ``sha256:<hex>`` over a file's bytes, read in chunks of 1 MiB."""
    h = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(1 << 20):
            h.update(chunk)
    return "sha256:" + h.hexdigest()
