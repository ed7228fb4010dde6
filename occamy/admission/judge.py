"""Takes one raw package through gates 1 to 5."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from occamy.admission import gates
from occamy.admission.attempts import attempt
from occamy.admission.receipts import GATES, GateReceipt, Reason, Receipt, Refused
from occamy.contracts.record import digest_bytes
from occamy.contracts.release import contract_path
from occamy.contracts.task import TaskContract

Judged = tuple[Receipt, TaskContract | None]
"""A receipt, and the contract when the package holds one."""


def judge(raw: Path, name: str) -> Judged:
    """Run gates 1 to 5 on the package `name` under `raw`. A gate that breaks quarantines as `infra_failed`."""
    passed: list[GateReceipt] = []
    contract: TaskContract | None = None
    fingerprint = ""
    reason: Reason | None = None
    detail = ""
    try:
        data = contract_path(raw, name).read_bytes()
        fingerprint = digest_bytes(data)
        contract = _parse(data)
        fingerprint = _digest(contract)
        _run_gates(contract, name, passed)
    except Refused as refusal:
        reason, detail = refusal.reason, refusal.detail
        passed.append(GateReceipt(gate=GATES[len(passed)], passed=False, evidence=refusal.evidence))
    except Exception as e:  # a broken gate says nothing about the task, so the task is kept aside unjudged
        reason, detail = Reason.infra_failed, f"{type(e).__name__}: {e}"
        passed.append(GateReceipt(gate=GATES[len(passed)], passed=False))
    whole = Receipt(task_id=name, task_digest=fingerprint, gates=tuple(passed), reason=reason, detail=detail)
    return whole, contract


def _parse(data: bytes) -> TaskContract:
    try:
        return TaskContract.model_validate_json(data)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Refused(Reason.not_a_contract, f"{where}: {first['msg']}") from e


def _digest(contract: TaskContract) -> str:
    try:
        return contract.digest()
    except ValueError as e:
        raise Refused(Reason.not_canonical, f"a number is not finite ({e})") from e


def _run_gates(contract: TaskContract, name: str, passed: list[GateReceipt]) -> None:
    """Append a receipt per gate passed. Raises Refused at the first that refuses."""
    passed.append(GateReceipt(gate="canonical", passed=True, evidence=gates.canonical(contract, name)))
    passed.append(GateReceipt(gate="feasible", passed=True, evidence=gates.feasible(contract)))
    gold = attempt(contract, contract.grading.reference, contract.grading.answer)
    passed.append(GateReceipt(gate="discoverable", passed=True, evidence=gates.discoverable(contract, gold)))
    passed.append(GateReceipt(gate="reference", passed=True, evidence=gates.reference(contract, gold)))
    passed.append(GateReceipt(gate="negatives", passed=True, evidence=gates.refuses_negatives(contract, gold)))
