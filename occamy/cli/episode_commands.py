"""`occamy episode` shows what was recorded of episodes; `occamy replay` checks that it comes out again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from occamy.rollout.archive import Archive

_RUNS = Path("runs")
_EPISODES = (
    "a folder of episodes (sealed, or of a session) and ids in it (default: all); or ids alone, looked up in runs/"
)


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register episode list, episode show, replay tokens, replay state and replay admit."""
    episode = commands.add_parser("episode", help="read recorded episodes")
    actions = episode.add_subparsers(dest="action", metavar="ACTION", required=True)
    list_ = actions.add_parser(
        "list",
        help="one line for each episode of a folder",
        description="One line for each episode of a sealed folder, or of the finished ones of a session: how it ended, "
        "its turns, tokens, weight versions, and why it is quarantined if it is.",
        epilog="example: occamy episode list runs/laptop-1/stages/demonstrations",
    )
    list_.add_argument("folder", type=Path, metavar="FOLDER")
    list_.set_defaults(handler=list_command)
    show = actions.add_parser(
        "show",
        help="a transcript with tokens coloured by origin, tool calls, and the sums of the mask",
        description="Print everything recorded of episodes: segments and what closed them, each message with its "
        "tokens coloured (or, in a pipe, marked) by origin, log-probs and weight versions, tool calls, mask.",
        epilog="example: occamy episode show runs/laptop-1/stages/demonstrations task-0007.0 --full",
    )
    _add_episodes(show)
    show.add_argument("--full", action="store_true", help="cut nothing short")
    show.add_argument("--model", type=Path, metavar="DIR", help="checkpoint whose tokenizer reads the ids")
    show.set_defaults(handler=show_command)

    replay = commands.add_parser("replay", help="check recorded episodes by doing them again; exit code 1 on findings")
    kinds = replay.add_subparsers(dest="kind", metavar="KIND", required=True)
    tokens = kinds.add_parser(
        "tokens",
        help="feed the recorded tokens to an engine and compare log-probs",
        description="Compare segments with the turns they were made of, and their log-probs with those that an engine "
        "with the recorded weight version gives to the same tokens.",
        epilog="example: occamy replay tokens runs/x/episodes --weights 0=runs/x/base --weights 1=runs/x/weights/1",
    )
    _add_episodes(tokens)
    _add_engine(tokens)
    tokens.set_defaults(handler=tokens_command)
    state = kinds.add_parser(
        "state",
        help="make the recorded tool calls again from the initial world and compare results and state",
        description="Make the recorded tool calls again in a fresh world, call by call.",
    )
    _add_episodes(state)
    state.add_argument("--release", type=Path, metavar="DIR", help="take the tasks from this task release")
    state.set_defaults(handler=state_command)
    admit = kinds.add_parser(
        "admit",
        help="seal a folder again with what fails quarantined, and a receipt for each episode",
        description="Check capture and state of every episode, and the log-probs of a share of them.",
    )
    admit.add_argument("folder", type=Path, metavar="FOLDER", help="a sealed folder of episodes")
    admit.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    admit.add_argument("--share", type=float, default=0.0, metavar="X", help="episodes to replay the tokens of, 0 to 1")
    admit.add_argument("--seed", type=int, default=0, metavar="N", help="draws them")
    _add_engine(admit)
    admit.set_defaults(handler=admit_command)


def _add_episodes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("episodes", nargs="+", metavar="FOLDER|ID", help=_EPISODES)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    from occamy.capture.replay import TOLERANCE

    parser.add_argument(
        "--weights", action="append", default=[], metavar="VERSION=DIR", help="checkpoint of a weight version"
    )
    parser.add_argument("--url", help="a running engine, for versions without a checkpoint")
    parser.add_argument(
        "--tolerance",
        type=_positive,
        default=TOLERANCE,
        metavar="NATS",
        help=f"largest difference of a log-prob (default: {TOLERANCE:g}, for float32; bfloat16 needs about 0.05)",
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def list_command(args: argparse.Namespace) -> int:
    """Print a table."""
    from occamy.cli.episode_screen import episode_table, screen, show
    from occamy.rollout.archive import open_archive

    archive = open_archive(args.folder)
    segments = {e.record.episode_id: e.segments for e in archive}
    show(screen(), episode_table(list(archive.records.values()), segments))
    return 0


def show_command(args: argparse.Namespace) -> int:
    """Print transcripts."""
    from occamy.capture.transcript import Reader
    from occamy.cli.episode_screen import episode_view, screen, show

    archive, ids = _open(args.episodes)
    reader = Reader(_tokenizer(archive, args.model))
    console = screen()
    colours = console.is_terminal and not console.no_color
    for name in ids:
        show(console, episode_view(archive.episode(name), reader, colours=colours, full=args.full))
    return 0


def tokens_command(args: argparse.Namespace) -> int:
    """Print findings; 1 when there are some."""
    from occamy.capture.replay import check_capture
    from occamy.rollout.admit import replay_versions, replayable

    archive, ids = _open(args.episodes)
    episodes = [archive.episode(name) for name in ids]
    found = []
    for episode in episodes:
        if episode.turns is not None:
            found += check_capture(episode.record, episode.segments, episode.turns)
    segments = [s for e in episodes for s in replayable(e)]
    found += replay_versions(segments, weights=_weights(args.weights), url=args.url, tolerance=args.tolerance)
    compared = sum(int(s.mask.sum()) for s in segments)
    left = sum(int(s.mask.sum()) for e in episodes for s in e.segments if s.sampled_by == "policy") - compared
    hot = f" ({left} not: their temperature is not 1, or was not kept)" if left else ""
    return _report(found, f"{len(ids)} episodes, {compared} log-probs compared{hot}")


def state_command(args: argparse.Namespace) -> int:
    """Print findings; 1 when there are some."""
    from dataclasses import replace

    from occamy.contracts.release import load_release
    from occamy.rollout.admit import check_state

    archive, ids = _open(args.episodes)
    tasks = {} if args.release is None else {t.meta.task_id: t for t in load_release(args.release).tasks}
    found, calls = [], 0
    for name in ids:
        episode = archive.episode(name)
        if args.release is not None:
            episode = replace(episode, contract=tasks.get(episode.record.task_id))
        found += check_state(episode)
        calls += len(episode.evidence.events) if episode.evidence is not None else 0
    return _report(found, f"{len(ids)} episodes, {calls} tool calls made again")


def admit_command(args: argparse.Namespace) -> int:
    """Seal the folder again and print the counts."""
    from occamy.rollout.admit import admit_trajectories

    manifest, receipts = admit_trajectories(
        args.folder,
        args.out,
        weights=_weights(args.weights),
        url=args.url,
        share=args.share,
        seed=args.seed,
        tolerance=args.tolerance,
    )
    for one in receipts:
        for finding in one.findings:
            print(finding)
    admitted = sum(r.admitted for r in receipts)
    print(f"{admitted} of {len(receipts)} episodes admitted, quarantined: {manifest.facts['quarantine'] or 'none'}")
    print(args.out)
    return 0


def _report(found: Sequence[object], done: str) -> int:
    for finding in found:
        print(finding)
    print(f"{done}: {len(found)} findings")
    return 1 if found else 0


def _open(places: Sequence[str]) -> tuple[Archive, list[str]]:
    """The archive that a command names, and the episodes of it."""
    from occamy.rollout.archive import open_archive

    if Path(places[0]).is_dir():
        archive = open_archive(Path(places[0]))
        return archive, list(places[1:]) or list(archive.records)
    return open_archive(_holding(places[0])), list(places)


def _holding(episode_id: str) -> Path:
    """The one folder below runs/ that holds an episode. Raises ValueError when none or several do."""
    import pyarrow.parquet as pq

    from occamy.capture.sealed import EPISODES

    tables = sorted(_RUNS.rglob(EPISODES))
    found = [t.parent for t in tables if episode_id in pq.read_table(t, columns=["episode_id"])[0].to_pylist()]
    if len(found) != 1:
        where = ", ".join(map(str, found)) or f"none of the {len(tables)} folders of episodes in {_RUNS.absolute()}"
        raise ValueError(f"episode {episode_id}: held by {where}; name the folder before the id")
    return found[0]


def _tokenizer(archive: Archive, model: Path | None) -> Path:
    """The tokenizer.json that reads the ids of an archive. Raises ValueError for another one than it was made with."""
    from occamy.contracts.lineage import tokenizer_digest
    from occamy.nano.base import base_checkpoint

    folder = model if model is not None else base_checkpoint()
    if archive.tokenizer is not None and tokenizer_digest(folder) != archive.tokenizer:
        raise ValueError(
            f"{folder}: its tokenizer is not that of the episodes; --model names the checkpoint they are of"
        )
    return folder / "tokenizer.json"


def _weights(given: Sequence[str]) -> dict[int, Path]:
    """Raises ValueError for what is not VERSION=DIR."""
    weights: dict[int, Path] = {}
    for text in given:
        version, _, folder = text.partition("=")
        if not version.isdigit() or not Path(folder).is_dir():
            raise ValueError(f"--weights {text}: give VERSION=DIR, with the folder of a checkpoint")
        weights[int(version)] = Path(folder)
    return weights
