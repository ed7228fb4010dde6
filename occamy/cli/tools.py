"""Commands around a run: compile the pipeline, open MLflow, pretrain the small base model."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from occamy.cli.options import existing_run
from occamy.preflight import port_free


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register compile, ui and nano."""
    compile_ = commands.add_parser(
        "compile",
        help="write the pipeline as YAML for a Kubeflow cluster",
        description="Compile the pipeline that `occamy run` runs here to IR YAML; upload it in the Kubeflow UI.",
        epilog="example: occamy compile -o post_training.yaml --image registry.example/occamy-python:0.1.0",
    )
    compile_.add_argument("-o", "--output", type=Path, default=Path("post_training.yaml"), metavar="FILE")
    compile_.add_argument("--image", metavar="NAME", help="image of every task (default: occamy-python:VERSION)")
    compile_.set_defaults(handler=compile_command)

    ui = commands.add_parser(
        "ui",
        help="open the MLflow UI on a run directory",
        description="Serve MLflow on the run's tracking database: one run per checkpoint, to be compared side by side.",
        epilog="example: occamy ui runs/laptop-1 --port 5050",
    )
    ui.add_argument("run_dir", type=Path, metavar="DIR", help="a run directory")
    ui.add_argument("--port", type=int, default=5000, help="port on this machine (default: 5000)")
    ui.set_defaults(handler=ui_command)

    nano = commands.add_parser("nano", help="the small base model of the laptop profile")
    actions = nano.add_subparsers(dest="action", metavar="ACTION", required=True)
    pretrain = actions.add_parser(
        "pretrain",
        help="pretrain it from scratch on one core; goes on where it stopped",
        description="Pretrain the small base model in two phases: drills and generic episodes, then harder episodes of "
        "uneven quality. The same seed gives the same weights on the same kind of machine.",
    )
    pretrain.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="work folder; the checkpoint is DIR/base"
    )
    pretrain.add_argument(
        "--tokens", type=int, metavar="N", help="tokens of the first phase (default: those of the shipped base)"
    )
    pretrain.add_argument("--seed", type=int, default=1, metavar="N")
    pretrain.set_defaults(handler=pretrain_command)


def compile_command(args: argparse.Namespace) -> int:
    """Write IR YAML."""
    if args.output.suffix not in (".yaml", ".yml"):
        raise ValueError(f"-o {args.output}: KFP reads YAML; give a name that ends in .yaml")
    if args.image:
        os.environ["OCCAMY_IMAGE"] = args.image
    from pipelines.compiled import write_ir

    write_ir(args.output)
    print(args.output)
    return 0


def ui_command(args: argparse.Namespace) -> int:
    """Serve MLflow in the foreground."""
    run, _ = existing_run(args.run_dir)
    database = run.path / "mlflow.db"
    if not database.is_file():
        raise FileNotFoundError(f"{database}: not there yet; the first stage of `occamy run` makes it")
    port_free(args.port)
    print(f"MLflow: http://127.0.0.1:{args.port}  (Ctrl-C ends it)", flush=True)
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", run.tracking_uri]
    command += ["--host", "127.0.0.1", "--port", str(args.port), "--workers", "1"]
    os.execv(sys.executable, command)


def pretrain_command(args: argparse.Namespace) -> int:
    """Pretrain the nano base and print where it lies."""
    from occamy.nano.pretrain import PretrainConfig, pretrain

    config = (
        PretrainConfig(seed=args.seed) if args.tokens is None else PretrainConfig(seed=args.seed, tokens=args.tokens)
    )

    def show(figures: dict[str, float]) -> None:
        print("  ".join(f"{name} {value:.4g}" for name, value in figures.items()), flush=True)

    print(pretrain(args.out, config, on_progress=show))
    return 0
