"""Admits raw task packages into a sealed task release: gates 1 to 5 per task, gate 6 across tasks, receipts for all."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from occamy.admission.config import AdmissionConfig
from occamy.admission.crosscheck import crosscheck
from occamy.admission.judge import Judged, judge
from occamy.admission.receipts import Receipt
from occamy.contracts.manifest import NAME, Counts, Manifest, SealError, seal, verify
from occamy.contracts.record import canonical_json
from occamy.contracts.release import KIND

RAW_KIND = "tasks"
RECEIPTS = "receipts.jsonl"

Progress = Callable[[int, int, str], None]
"""Called as (done, total, figure)."""

_CHUNK = 32


def admit(raw: Path, out: Path, config: AdmissionConfig, on_progress: Progress | None = None) -> Manifest:
    """Run the six gates over the sealed raw packages under `raw` and seal the release under `out`.

    Writes ``tasks/<id>/contract.json``, ``quarantine/<id>/`` with the package and its receipt, ``receipts.jsonl`` and
    the manifest. A release already sealed from the same raw packages is verified and returned as it is. Raises
    SealError when `raw` is not sealed, or `out` was sealed from others.
    """
    source = verify(raw, RAW_KIND)
    parents = {"raw": source.digest()}
    if (out / NAME).is_file():
        manifest = verify(out, KIND)
        if manifest.parents != parents:
            raise SealError(f"{out}: sealed from other raw tasks; choose another folder or remove this one")
        return manifest
    names = sorted({Path(name).parts[1] for name in source.files if name.startswith("tasks/")})
    judged: list[Judged] = []
    refused = 0
    with ExitStack() as stack:
        for one in _judge_all(raw, names, config.processes, stack):
            judged.append(one)
            refused += one[0].reason is not None
            if on_progress:
                on_progress(len(judged), len(names), f"{refused} quarantined")
    receipts = crosscheck(judged)
    _write(raw, out, receipts)
    reasons = Counter(str(receipt.reason) for receipt in receipts if receipt.reason)
    pools = Counter(f"{c.meta.split} {c.meta.pool}" for r, (_, c) in zip(receipts, judged) if c and r.reason is None)
    counts = Counts(
        raw=len(names),
        validated=len(names) - refused,
        admitted=len(names) - reasons.total(),
        quarantined=reasons.total(),
    )
    facts = {"reasons": dict(sorted(reasons.items())), "admitted": dict(sorted(pools.items()))}
    return seal(out, KIND, counts={"task_packages": counts}, parents=parents, facts=facts)


def _judge_all(raw: Path, names: Sequence[str], processes: int, stack: ExitStack) -> Iterator[Judged]:
    """Judge every package, results in the order of names."""
    one = partial(judge, raw)
    if processes == 1:
        return map(one, names)
    pool = stack.enter_context(ProcessPoolExecutor(processes, mp_context=get_context("spawn")))
    return pool.map(one, names, chunksize=_CHUNK)


def _write(raw: Path, out: Path, receipts: Sequence[Receipt]) -> None:
    """Lay out the release. What an unfinished run left behind goes first."""
    for leftover in ("tasks", "quarantine"):
        shutil.rmtree(out / leftover, ignore_errors=True)
    for receipt in receipts:
        place = "tasks" if receipt.reason is None else "quarantine"
        target = out / place / receipt.task_id
        shutil.copytree(raw / "tasks" / receipt.task_id, target)
        if receipt.reason is not None:
            (target / "receipt.json").write_bytes(canonical_json(receipt))
    out.mkdir(parents=True, exist_ok=True)
    (out / RECEIPTS).write_bytes(b"".join(canonical_json(receipt) + b"\n" for receipt in receipts))
