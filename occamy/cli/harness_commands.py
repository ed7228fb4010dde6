"""Harnesses: which there are, how their programs come to this machine, and rollouts with one on frozen tasks."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from occamy.cli.options import count, port
from occamy.contracts.episode import EpisodeRecord

_CONTEXT = 65536


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register harness list, install and serve."""
    harness = commands.add_parser("harness", help="agent harnesses: compositions and adapters of agent programs")
    actions = harness.add_subparsers(dest="action", metavar="ACTION", required=True)
    list_ = actions.add_parser(
        "list",
        help="shipped harnesses, and whether their programs are installed",
        description="List the shipped harnesses: compositions run in this process, adapters run a program of their "
        "own. `occamy rollout --harness NAME` runs one; docs/harnesses.md tells how to add another.",
    )
    list_.set_defaults(handler=list_command)
    install = actions.add_parser(
        "install",
        help="install an agent program in the version that its adapter is written for",
        description="Install the program of an adapter below .harness (or the folder that OCCAMY_HARNESSES names), "
        "with pinned dependencies. Does nothing when it is there.",
        epilog="example: occamy harness install hermes",
    )
    install.add_argument("harness", metavar="NAME|FILE", help="a shipped adapter, or an adapter file")
    install.set_defaults(handler=install_command)
    serve = actions.add_parser(
        "serve",
        help="serve a composition as an agent service, in place of a closed one",
        description="Serve what a service adapter drives: POST /runs plays one episode. For an adapter's name, its "
        "shipped stand-in is served; set the adapter's variable to the URL that is printed.",
        epilog="example: occamy harness serve accio_work --port 8200",
    )
    serve.add_argument("harness", metavar="NAME|FILE", help="an adapter with a stand-in, or any composition")
    serve.add_argument("--port", type=port, default=0, help="port on this machine (default: a free one)")
    serve.set_defaults(handler=serve_command)


def add_rollout_options(parser: argparse.ArgumentParser) -> None:
    """Options of `occamy rollout` that take it out of a run directory: any harness, on any sealed tasks."""
    own = parser.add_argument_group(
        "one harness on frozen tasks, outside a run directory",
        "--set then takes the keys of rollout, for example --set rollout.sandbox.backend=kubernetes",
    )
    own.add_argument(
        "--harness", metavar="NAME|FILE", help="harness to roll out with; --out is then the folder of the episodes"
    )
    own.add_argument("--tasks", type=Path, metavar="DIR", help="a sealed task release, such as RUN/stages/admission")
    own.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="tokenizer and chat template of the model (default: shipped base)",
    )
    own.add_argument("--engine", metavar="URL", help="engine that samples (default: the scripted oracle plays)")
    own.add_argument("--limit", type=count, metavar="N", help="the first N tasks only")
    own.add_argument("--trials", type=count, default=1, metavar="K", help="attempts at each task (default: 1)")
    own.add_argument(
        "--context-limit",
        type=count,
        metavar="N",
        help=f"tokens of prompt and answer (default: {_CONTEXT}, or the least that the harness takes)",
    )
    own.add_argument("--max-new-tokens", type=count, default=512, metavar="N", help="tokens of one turn (default: 512)")
    own.add_argument("--concurrency", type=count, default=2, metavar="N", help="episodes in flight (default: 2)")


def list_command(args: argparse.Namespace) -> int:
    """Print a table of harnesses."""
    from occamy.harness.adapters.program import ProgramMissing, installed_version
    from occamy.harness.compose import CompositionError
    from occamy.harness.loading import load_adapter, names

    table = Table("harness", "kind", "program")
    for name in names():
        try:
            adapter, _ = load_adapter(name)
        except CompositionError:
            table.add_row(name, "composition", "")
            continue
        try:
            found = f"version {installed_version(adapter)}"
        except ProgramMissing as e:
            found = str(e)
        table.add_row(name, "adapter", found)
    Console().print(table)
    return 0


def install_command(args: argparse.Namespace) -> int:
    """Install one program and print its folder."""
    from occamy.harness.adapters.program import install
    from occamy.harness.loading import load_adapter

    adapter, here = load_adapter(args.harness)
    print(install(adapter, here))
    return 0


def serve_command(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    import asyncio

    from occamy.harness.adapters.stand_in import serve
    from occamy.harness.loading import load_composition

    asyncio.run(serve(load_composition(args.harness), args.port, lambda url: print(url, flush=True)))
    return 0


def rollout_command(args: argparse.Namespace) -> int:
    """Play the tasks of a release with a harness and print how it went. Returns 1 when an episode is quarantined."""
    from occamy.contracts.release import load_release
    from occamy.harness.adapters.launch import AdapterHarness
    from occamy.harness.loading import load
    from occamy.nano.base import base_checkpoint
    from occamy.recipe import rollout_config
    from occamy.rollout.trial import Sampler, play

    if args.tasks is None or args.out is None:
        raise ValueError("--harness needs --tasks DIR (a sealed task release) and --out DIR (where episodes go)")
    if args.profile is not None:
        raise ValueError("--harness plays without a recipe; leave out --profile")
    harness = load(args.harness)
    least = harness.adapter.minimum_context if isinstance(harness, AdapterHarness) else 0
    config = rollout_config(
        args.set,
        harness=args.harness,
        concurrency=args.concurrency,
        context_limit=args.context_limit or max(_CONTEXT, least),
        max_new_tokens=args.max_new_tokens,
    )
    if config.harness != args.harness:
        raise ValueError(f"--set rollout.harness={config.harness} contradicts --harness {args.harness}; leave it out")
    checkpoint = args.checkpoint or base_checkpoint()
    sampler = Sampler(checkpoint, "oracle" if args.engine is None else checkpoint.name, args.engine)
    tasks = load_release(args.tasks).tasks[: args.limit]
    seed = 1 if args.seed is None else args.seed
    records = play(
        tasks,
        harness,
        sampler,
        args.out,
        config,
        trials=args.trials,
        seed=seed,
        on_record=lambda r: print(_line(r), flush=True),
    )
    outcomes = Counter(r.quarantine.value if r.quarantine else r.outcome.value for r in records)
    counted = ", ".join(f"{name} {n}" for name, n in sorted(outcomes.items()))
    print(
        f"{sum(r.success for r in records)} of {len(records)} episodes succeed ({counted}); sealed in {args.out}/sealed"
    )
    return 1 if any(r.quarantine for r in records) else 0


def _line(record: EpisodeRecord) -> str:
    state = f"quarantined: {record.quarantine.value}" if record.quarantine else f"score {record.score:.2f}"
    said = f"  {record.error}" if record.error else ""
    return (
        f"{record.episode_id}  {record.outcome.value}  {state}  {record.steps} turns, {record.tool_calls} tool calls, "
        f"{record.segments} segments, {record.output_tokens} sampled tokens, {record.wall_seconds:.1f} s{said}"
    )
