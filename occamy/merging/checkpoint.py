"""Reading a checkpoint one tensor at a time, verified by digest, and writing one without holding it in memory."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from occamy.contracts.lineage import LineageCard, read_card, tokenizer_digest, weights_digest
from occamy.merging.layout import Source, canonical, moe_shape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}


class CheckpointError(ValueError):
    """A checkpoint cannot be used as it lies on disk: names the folder, the file or tensor, and the fix."""


class Checkpoint:
    """An open checkpoint folder: config, card, and tensors by canonical name. A context manager.

    Raises CheckpointError for a missing, foreign, truncated or altered shard, each by name, and for a tokenizer
    that is not the one of the card.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.card: LineageCard = read_card(folder)
        self.config: dict[str, Any] = json.loads(_read(folder / "config.json"))
        self._stack = ExitStack()
        try:
            self._files = {name: self._open(name) for name in shard_names(folder)}
            self._check_digests()
            self._where = self._index()
            shapes = {name: tuple(self._slice(name).get_shape()) for name in self._where}
            self.sources: dict[str, Source] = canonical(shapes, moe_shape(self.config))
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str) -> torch.Tensor:
        """Load one canonical tensor. Raises CheckpointError when it holds NaN or infinity."""
        source = self.sources[name]
        view = self._slice(source.name)
        tensor: torch.Tensor
        if source.expert is None:
            tensor = self._files[self._where[source.name]].get_tensor(source.name)
        else:
            tensor = view[source.expert : source.expert + 1, source.start : source.stop][0]
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{self.folder}: {name} holds NaN or infinity; do not merge it, train that parent again"
            )
        return tensor

    def dtype(self, name: str) -> str:
        """Stored dtype of a canonical tensor, in safetensors words (F32, BF16 …)."""
        return str(self._slice(self.sources[name].name).get_dtype())

    def _slice(self, stored: str) -> Any:
        return self._files[self._where[stored]].get_slice(stored)

    def _open(self, shard: str) -> Any:
        try:
            return self._stack.enter_context(safe_open(self.folder / shard, framework="pt"))
        except (SafetensorError, OSError) as e:
            raise CheckpointError(
                f"{self.folder}: {shard} is missing or truncated ({e}); make the checkpoint again"
            ) from e

    def _check_digests(self) -> None:
        for what, found, want in (
            ("weights", weights_digest(self.folder), self.card.weights_digest),
            ("tokenizer.json", tokenizer_digest(self.folder), self.card.tokenizer_digest),
        ):
            if found != want:
                raise CheckpointError(
                    f"{self.folder}: {what} has digest {found}, its card says {want}; altered or foreign, make it again"
                )

    def _index(self) -> dict[str, str]:
        """Stored tensor name -> shard, checked against the index file when there is one."""
        where: dict[str, str] = {}
        for shard, file in self._files.items():
            names: list[str] = file.keys()
            for name in names:
                if name in where:
                    raise CheckpointError(f"{self.folder}: {name} lies in both {where[name]} and {shard}; remove one")
                where[name] = shard
        if (self.folder / INDEX).is_file():
            listed: dict[str, str] = json.loads((self.folder / INDEX).read_bytes())["weight_map"]
            for name in sorted(listed.keys() | where.keys()):
                if listed.get(name) != where.get(name):
                    raise CheckpointError(
                        f"{self.folder}: {name} lies in {where.get(name)}, {INDEX} says {listed.get(name)}; "
                        "a foreign shard or index, make the checkpoint again"
                    )
        return where


def shard_names(folder: Path) -> list[str]:
    """Names of the weight files. Raises CheckpointError when a file lies there that the index does not list."""
    present = sorted(p.name for p in folder.glob("*.safetensors"))
    if not (folder / INDEX).is_file():
        names = [SINGLE]
    else:
        names = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
    for name in present:
        if name not in names:
            raise CheckpointError(f"{folder}: {name} is a foreign shard, the checkpoint consists of {names}; remove it")
    return names


def write_tensors(
    path: Path, shapes: Mapping[str, tuple[str, tuple[int, ...]]], tensors: Iterator[torch.Tensor]
) -> None:
    """Write a safetensors file from tensors in the order of `shapes` (name -> dtype word, shape), one at a time.

    The header is written first and padded to 8 bytes, as the format asks; nothing else is kept in memory.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    sizes = {word: torch.empty((), dtype=dtype).element_size() for dtype, word in DTYPES.items()}
    for name, (word, shape) in shapes.items():
        size = sizes[word] * int(torch.Size(shape).numel())
        header[name] = {"dtype": word, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            f.write(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())


def chat_template(folder: Path) -> str:
    """Text of the chat template, from ``chat_template.jinja`` or the tokenizer's config; empty when it has none."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text()
    config = folder / "tokenizer_config.json"
    return str(json.loads(config.read_bytes()).get("chat_template", "")) if config.is_file() else ""


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise CheckpointError(f"{path.parent}: no {path.name}; not a checkpoint folder")
    return path.read_bytes()
