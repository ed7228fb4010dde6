"""What an episode looks like in a terminal: tokens coloured by origin, or marked where there are no colours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from occamy.capture.ledger import LedgerTurn
from occamy.capture.transcript import Message, Piece, Reader, read_messages
from occamy.contracts.episode import EpisodeRecord, Origin, Segment
from occamy.rollout.archive import Recorded

_LOOKS = {
    Origin.INHERITED: ("inherited", "dim", "", ""),
    Origin.SAMPLED: ("sampled", "bold green", "⟦", "⟧"),
    Origin.SUBAGENT: ("subagent", "magenta", "⟨", "⟩"),
    Origin.OBSERVED: ("observed", "cyan", "‹", "›"),
}
"""Origin -> name, style, and the marks around it where there are no colours."""
_TEXT = 400
"""Characters of one piece that are shown unless all is asked for."""
_MESSAGES = 40
"""Messages of one segment, likewise: the first and the last of them."""
_ROLE = 10
_PIPED = 160


def episode_view(episode: Recorded, reader: Reader, *, colours: bool, full: bool) -> RenderableType:
    """The whole episode: facts, segments with their messages, tool calls, and the sums of the mask."""
    parts: list[RenderableType] = [_facts(episode.record), _legend(colours)]
    turns = episode.turns or []
    segments = sorted(episode.segments, key=lambda s: (s.run != "root", s.run, s.index))
    for segment in segments:
        of_run = [s for s in segments if s.run == segment.run]
        parts += [Text(), _heading(segment, len(of_run), turns)]
        parts += _messages(read_messages(reader, segment), colours, full)
    parts += [Text(), *_calls(episode, full), Text(), *_masks(segments)]
    return Group(*parts)


def episode_table(records: Sequence[EpisodeRecord], segments: dict[str, list[Segment]]) -> Table:
    """One line for each episode."""
    table = Table(box=None, pad_edge=False)
    for name in ("episode", "pool", "outcome", "by"):
        table.add_column(name, no_wrap=True)
    for name in ("score", "turns", "calls", "segments", "sampled", "trains", "versions"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("quarantine", no_wrap=True)
    for r in records:
        trains = sum(int(s.mask.sum()) for s in segments.get(r.episode_id, [])) if r.quarantine is None else 0
        numbers = (r.steps, r.tool_calls, r.segments, r.output_tokens, trains, _versions(r.version_min, r.version_max))
        reason = "" if r.quarantine is None else r.quarantine.value
        table.add_row(r.episode_id, r.pool, r.outcome.value, r.sampled_by, f"{r.score:.2f}", *map(str, numbers), reason)
    return table


def _facts(r: EpisodeRecord) -> Text:
    solved = "solved" if r.success else "not solved"
    lines = [
        f"episode {r.episode_id}: {r.outcome.value.replace('_', ' ')}, {solved}, score {r.score:.2f}, "
        f"reward {r.reward:.2f}",
        f"task {r.task_id} ({r.pool}, {r.split}), trial {r.trial}, seed {r.seed}",
        f"sampled by {r.sampled_by} {r.model}, weight version {_versions(r.version_min, r.version_max)}, "
        f"harness {r.harness_digest[:15]}",
        f"{r.steps} turns, {r.tool_calls} tool calls ({r.failed_calls} failed), {r.input_tokens} prompt tokens "
        f"({r.cached_tokens} cached), {r.output_tokens} sampled, {r.wall_seconds:.1f} s",
    ]
    if r.quarantine is not None:
        lines.append(f"QUARANTINED: {r.quarantine.value}; nothing of it trains")
    if r.error:
        lines.append(f"error: {r.error}")
    return Text("\n".join(lines))


def _legend(colours: bool) -> Text:
    shown = Text("tokens: ")
    for name, style, before, after in _LOOKS.values():
        shown.append(name if colours else f"{before}{name}{after}", style=style if colours else "")
        shown.append("  ")
    return shown


def _heading(segment: Segment, count: int, turns: Sequence[LedgerTurn]) -> Text:
    opened = [t.opened_by for t in turns if t.run == segment.run and t.opened_by and t.attempt == 0]
    opener = f", opened by {_words(opened[segment.index])}" if segment.index < len(opened) else ""
    trains = int(segment.mask.sum())
    return Text(
        f"── run {segment.run}, segment {segment.index + 1} of {count}: {len(segment.tokens)} tokens, {trains} train"
        f"{opener}, closed by {_words(segment.closed_by)}",
        style="bold",
    )


def _messages(messages: Sequence[Message], colours: bool, full: bool) -> Iterator[RenderableType]:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_ROLE, no_wrap=True)
    table.add_column(overflow="fold")
    turn = 0
    half = _MESSAGES // 2
    hidden = range(half, len(messages) - half) if not full else range(0)
    for number, message in enumerate(messages):
        sampled = [p for p in message.pieces if p.origin in (Origin.SAMPLED, Origin.SUBAGENT)]
        if number not in hidden:
            text = Text()
            for piece in message.pieces:
                text.append_text(_piece(piece, colours, full))
            if sampled:
                text.append(f"  {_summary(turn, sampled)}", style="dim italic" if colours else "")
            table.add_row(Text(message.role or "…", style="bold" if colours else ""), text)
        elif number == hidden[0]:
            table.add_row("", Text(f"… {len(hidden)} messages more, shown by --full"))
        turn += bool(sampled)
    yield table


def _piece(piece: Piece, colours: bool, full: bool) -> Text:
    _, style, before, after = _LOOKS[piece.origin]
    words = piece.text
    if not full and len(words) > _TEXT:
        words = f"{words[:_TEXT]} … {len(words) - _TEXT} characters more"
    return Text(words, style=style) if colours else Text(f"{before}{words}{after}")


def _summary(turn: int, pieces: Sequence[Piece]) -> str:
    """(turn 2: 14 tokens, version 0, log-prob -0.12, least -1.50)."""
    tokens = sum(p.tokens for p in pieces)
    versions = sorted({v for p in pieces for v in p.versions})
    if not versions:
        return f"(turn {turn}: {tokens} tokens)"
    mean = sum(p.mean_logprob * p.tokens for p in pieces) / tokens
    least = min(p.min_logprob for p in pieces)
    served = _versions(versions[0], versions[-1])
    return f"(turn {turn}: {tokens} tokens, version {served}, log-prob {mean:.2f}, least {least:.2f})"


def _calls(episode: Recorded, full: bool) -> Iterator[RenderableType]:
    if episode.evidence is None:
        yield Text("tool calls: not kept in this folder")
        return
    events = episode.evidence.events
    yield Text(f"── {len(events)} tool calls", style="bold")
    table = Table.grid(padding=(0, 1))
    for column in ("right", "left", "left"):
        table.add_column(justify=column, overflow="fold")  # type: ignore[arg-type]
    for event in events if full else events[:_MESSAGES]:
        arguments = event.arguments if isinstance(event.arguments, str) else _arguments(event.arguments)
        answer = event.response if full or len(event.response) <= _TEXT else f"{event.response[:_TEXT]} …"
        table.add_row(
            str(event.ordinal), Text(f"{event.name}({arguments})"), Text(answer, style="" if event.ok else "red")
        )
    yield table
    if not full and len(events) > _MESSAGES:
        yield Text(f"… {len(events) - _MESSAGES} calls more, shown by --full")
    if episode.evidence.answer:
        yield Text(f"answer: {episode.evidence.answer}")


def _arguments(arguments: dict[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _masks(segments: Sequence[Segment]) -> Iterator[Text]:
    yield Text("── trainable tokens (sum of the mask)", style="bold")
    for run, own in groupby(segments, key=lambda s: s.run):
        sums = [(int(s.mask.sum()), len(s.tokens)) for s in own]
        each = " + ".join(str(m) for m, _ in sums)
        yield Text(f"run {run}: {each} = {sum(m for m, _ in sums)} of {sum(n for _, n in sums)}")
    yield Text(f"in all: {sum(int(s.mask.sum()) for s in segments)} of {sum(len(s.tokens) for s in segments)}")


def _versions(least: int, most: int) -> str:
    return "-" if most < 0 else str(most) if least == most else f"{least}–{most}"


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def screen() -> Console:
    """A console as wide as the terminal, or of a fixed width in a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPED)


def show(console: Console, what: RenderableType) -> None:
    """Print; in a pipe without the blanks that fill lines up."""
    if console.is_terminal:
        console.print(what)
        return
    with console.capture() as captured:
        console.print(what)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
