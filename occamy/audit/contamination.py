"""What held-out tasks share with training tasks: literals that both use, and clauses said in the same way.

Works on any two sets of contracts, so a new release can be checked against every earlier one. Operands and words that
belong to nobody are no literals, hence boilerplate alone never counts as contamination.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from occamy.contracts.likeness import clause_skeletons, duplicate_key, task_literals
from occamy.contracts.record import Record
from occamy.contracts.release import Release
from occamy.contracts.task import TaskContract


class Contamination(Record):
    """One held-out task that training has seen something of."""

    task_id: str
    literals: tuple[str, ...] = ()
    """Ids, values and file names that training tasks use too."""
    wordings: tuple[str, ...] = ()
    """Clause skeletons that training tasks use too."""
    copies: tuple[str, ...] = ()
    """Training tasks that ask the very same."""


class ContaminationReport(Record):
    """The outcome of one check."""

    train_tasks: int
    held_out_tasks: int
    findings: tuple[Contamination, ...]
    """Contaminated held-out tasks, in the order given."""

    @property
    def clean(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


def check_contamination(train: Iterable[TaskContract], held_out: Iterable[TaskContract]) -> ContaminationReport:
    """Compare every held-out task with all training tasks, recomputing literals from the contracts themselves."""
    literals: set[str] = set()
    wordings: set[str] = set()
    askers: dict[str, list[str]] = defaultdict(list)
    train_tasks = 0
    for contract in train:
        train_tasks += 1
        literals |= _literals(contract)
        wordings |= set(clause_skeletons(contract))
        askers[duplicate_key(contract)].append(contract.meta.task_id)
    findings: list[Contamination] = []
    held_out_tasks = 0
    for contract in held_out:
        held_out_tasks += 1
        finding = Contamination(
            task_id=contract.meta.task_id,
            literals=tuple(sorted(_literals(contract) & literals)),
            wordings=tuple(sorted(set(clause_skeletons(contract)) & wordings)),
            copies=tuple(askers.get(duplicate_key(contract), ())),
        )
        if finding.literals or finding.wordings or finding.copies:
            findings.append(finding)
    return ContaminationReport(train_tasks=train_tasks, held_out_tasks=held_out_tasks, findings=tuple(findings))


def audit_release(release: Release) -> ContaminationReport:
    """Check the validation and test tasks of one release against its training tasks."""
    held_out = release.select(split="validation") + release.select(split="test")
    return check_contamination(release.select(split="train"), held_out)


def _literals(contract: TaskContract) -> set[str]:
    return {str(value) for value in task_literals(contract)}
