"""What a run looks like in a terminal: one line per stage with a bar and its figure; plain lines elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from occamy.storage.progress import ProgressEvent, ProgressReader
from occamy.storage.rundir import RunDirectory

_POLL_S = 0.2
_NAME = 14
"""Width of the longest stage name."""
_MARKS = {"finished": "[green]✓[/]", "reused": "[green]✓[/]", "failed": "[red]✗[/]"}


class RunScreen:
    """Context manager that follows the progress of a run's stages from a thread of its own."""

    def __init__(self, run: RunDirectory, stages: Sequence[str], console: Console) -> None:
        self.failures: list[ProgressEvent] = []
        """Stages that failed so far, in order."""
        self._stages = tuple(stages)
        self._console = console
        self._reader = ProgressReader(run.path, from_end=True)
        self._tasks: dict[str, TaskID] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="screen", daemon=True)
        self._bars = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}", table_column=Column(min_width=_NAME, no_wrap=True)),
            BarColumn(table_column=Column(min_width=16, max_width=24)),
            TimeElapsedColumn(table_column=Column(min_width=7, no_wrap=True)),
            TextColumn("{task.fields[figure]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> RunScreen:
        """Show one line per stage and begin to follow."""
        self._bars.start()
        for stage in self._stages:
            self._tasks[stage] = self._bars.add_task(stage, start=False, total=1, figure="")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show what came last and leave the lines on the screen."""
        self._over.set()
        self._thread.join()
        self._bars.stop()

    def _follow(self) -> None:
        over = False
        while not over:
            over = self._over.wait(_POLL_S)
            for event in self._reader.poll():
                if event.state == "failed":
                    self.failures.append(event)
                if event.stage in self._stages:
                    self._bar(event) if self._console.is_terminal else self._line(event)

    def _bar(self, event: ProgressEvent) -> None:
        task = self._tasks[event.stage]
        if event.state == "started":
            self._bars.reset(task, start=True, total=None, figure="")
        elif event.state == "running":
            self._bars.update(task, completed=event.done, total=event.total or None, figure=escape(event.figure))
        else:
            if event.state == "reused":
                self._bars.start_task(task)
            note = "done before: " if event.state == "reused" else ""
            completed = 0 if event.state == "failed" else 1
            figure = f"{_MARKS[event.state]} {note}{escape(event.figure)}"
            self._bars.update(task, total=1, completed=completed, figure=figure)
            self._bars.stop_task(task)

    def _line(self, event: ProgressEvent) -> None:
        """Without a terminal: one plain line when a stage changes state."""
        if event.state != "running":
            line = f"{event.stage:<{_NAME}} {event.state:<9} {event.figure}".rstrip()
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
