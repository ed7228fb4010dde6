"""How an agent program's ending becomes a typed outcome. Pure: what the command and its report say, nothing else."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from occamy.contracts.episode import Outcome
from occamy.harness.adapters.declaration import Ending
from occamy.sandboxes.protocol import ExecResult

_LAST = 400
"""Characters kept of what a program said before it failed (our choice)."""


class Ended(NamedTuple):
    """What an ending says."""

    outcome: Outcome
    answer: str = ""
    """Final text, "" unless completed."""
    error: str = ""
    """Why it did not complete."""


def read_ending(ending: Ending, result: ExecResult, report: bytes | None) -> Ended:
    """Read how a command ended. `report` is its report file, None when it wrote none.

    completed: a final text. agent_failed: the program says so, gave no text, or its tree broke a limit of the sandbox.
    timed_out: the wall deadline. infra_failed: it crashed, also with the status of a failure but without the
    JSON that tells of it, or left no report though it should have.
    """
    if result.limit:
        return Ended(Outcome.agent_failed, error=f"killed: too much of {result.limit}")
    if result.outcome is Outcome.timed_out:
        return Ended(Outcome.timed_out, error=f"wall time was used up after {result.seconds:.0f} s")
    if result.exit_code not in ending.codes:
        return Ended(Outcome.infra_failed, error=f"the program ended with status {result.exit_code}: {_last(result)}")
    if ending.report and report is None:
        return Ended(Outcome.infra_failed, error=f"the program left no {ending.report}: {_last(result)}")
    outcome = ending.codes[result.exit_code]
    said = _read_json(result.stdout) if ending.answer else result.stdout.decode(errors="replace")
    if outcome is not Outcome.completed:
        return Ended(Outcome.infra_failed if said is None else outcome, error=_last(result))
    if ending.failed and dig(_read_json(report or b""), ending.failed) is True:
        return Ended(Outcome.agent_failed, error=f"the program reports a failed run: {_last(result)}")
    answer = dig(said, ending.answer) if ending.answer else said
    if not isinstance(answer, str) or not answer.strip():
        return Ended(Outcome.agent_failed, error="the final answer is empty")
    if answer.startswith(ending.no_answer):
        return Ended(Outcome.agent_failed, error=answer.strip()[:_LAST])
    return Ended(Outcome.completed, answer.strip())


def dig(value: Any, path: str) -> Any:
    """Item of plain data at a dotted path (``payloads.0.text``), None when there is none."""
    for part in path.split("."):
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def _read_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def _last(result: ExecResult) -> str:
    said = (result.stderr or result.stdout).decode(errors="replace").strip()
    return said[-_LAST:] or "it said nothing"
