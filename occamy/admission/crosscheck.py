"""Gate 6, across tasks: complete lineage, no duplicates, nothing shared between splits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from occamy.admission.judge import Judged
from occamy.admission.receipts import GateReceipt, Reason, Receipt, Refused
from occamy.contracts.likeness import changed_elements, clause_skeletons, duplicate_key
from occamy.contracts.task import Split, TaskContract

_PRECEDENCE: dict[Split, int] = {"test": 2, "validation": 1, "train": 0}
"""Who owns a literal that two splits use equally often."""
_SHOWN = 3


def crosscheck(judged: Sequence[Judged]) -> list[Receipt]:
    """Add the receipt of gate 6 to every task that passed gates 1 to 5. Order is kept.

    A literal or clause skeleton belongs to the split that uses it in most tasks; a task that uses one of another
    split's is contaminated. So the admitted splits share none, and one stray task cannot evict a whole split.
    """
    known = {r.task_id: c for r, c in judged if c is not None and c.meta.task_id == r.task_id}
    seen: dict[str, str] = {}
    verdicts: dict[str, Refused | None] = {}
    for receipt, contract in judged:
        if receipt.reason is None and contract is not None:
            verdicts[receipt.task_id] = _lineage(contract, known) or _duplicate(contract, seen)
    clean = [known[task_id] for task_id, verdict in verdicts.items() if verdict is None]
    verdicts |= _contaminated(clean)
    return [_extended(r, verdicts[r.task_id]) if r.task_id in verdicts else r for r, _ in judged]


def _extended(receipt: Receipt, verdict: Refused | None) -> Receipt:
    gates = (*receipt.gates, GateReceipt(gate="release", passed=verdict is None))
    if verdict is None:
        return receipt.model_copy(update={"gates": gates})
    return receipt.model_copy(update={"gates": gates, "reason": verdict.reason, "detail": verdict.detail})


def _lineage(contract: TaskContract, known: dict[str, TaskContract]) -> Refused | None:
    meta = contract.meta
    if meta.variation == "seed":
        clean = meta.parent is None and not meta.changed
        return None if clean else Refused(Reason.broken_lineage, f"a seed task with parent {meta.parent!r}")
    parent = known.get(meta.parent or "")
    if parent is None or parent.meta.split != meta.split or parent is contract:
        return Refused(Reason.broken_lineage, f"parent {meta.parent!r} is no other task of split {meta.split}")
    changed = changed_elements(parent, contract)
    if not changed or changed != meta.changed:
        return Refused(Reason.broken_lineage, f"claims to change {list(meta.changed)}, changes {list(changed)}")
    return None


def _duplicate(contract: TaskContract, seen: dict[str, str]) -> Refused | None:
    first = seen.setdefault(duplicate_key(contract), contract.meta.task_id)
    return None if first == contract.meta.task_id else Refused(Reason.duplicate, f"of {first}")


def _marks(contract: TaskContract) -> list[str]:
    literals = [f"literal {value}" for value in contract.meta.literals]
    return literals + [f"wording {skeleton!r}" for skeleton in sorted(set(clause_skeletons(contract)))]


def _contaminated(contracts: Sequence[TaskContract]) -> dict[str, Refused]:
    """Tasks to put aside so that no two splits share a mark.

    Clear cases first: a stray that uses marks of a larger party goes before ties are settled, so that it cannot drag
    along the tasks it copies.
    """
    found: dict[str, Refused] = {}
    for lead in (1, 0):
        rest = [contract for contract in contracts if contract.meta.task_id not in found]
        uses: dict[str, Counter[Split]] = defaultdict(Counter)
        for contract in rest:
            for mark in _marks(contract):
                uses[mark][contract.meta.split] += 1
        owners = {mark: max(n, key=lambda split: (n[split], _PRECEDENCE[split])) for mark, n in uses.items()}
        for contract in rest:
            split = contract.meta.split
            foreign = [
                f"{mark} of {owners[mark]}"
                for mark in _marks(contract)
                if owners[mark] != split and uses[mark][owners[mark]] >= uses[mark][split] + lead
            ]
            if foreign:
                more = f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
                detail = ", ".join(foreign[:_SHOWN]) + more
                found[contract.meta.task_id] = Refused(Reason.contaminated, detail)
    return found
