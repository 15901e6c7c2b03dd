"""Commands around a run: train, plan, doctor."""

import json
import os
from pathlib import Path

import click

from ..config import DEFAULT, load_config
from ..run.paths import SUMMARY
from . import completion
from .app import app, config_option, json_option, out, overrides_argument, run_option
from .exits import leave


@app.command()
@overrides_argument
@config_option
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    shell_complete=completion.run_folders,
    help="Go on with this run from its newest checkpoint. auto: with the one that run_name names if it is there, else "
    "start it.",
)
@json_option
def train(overrides: tuple[str, ...], config_name: str | None, resume: Path | None, as_json: bool) -> None:
    """Post-train a model.

    Writes metrics, pictures, trees and checkpoints to runs/<run_name>. Interrupt it at any time: it says how to go on.

    Example: arborl train tree.k=3 train.learning_rate=5e-5 run_name=wide
    """
    from ..run.resume import resolve_start
    from ..trainer import train as run_training

    config, going_on, over = resolve_start(resume, config_name, overrides)
    if over:
        if os.environ.get("RANK", "0") == "0":
            click.echo(f"{going_on} is finished already", err=True)
        return
    code = 0
    try:
        folder = run_training(config, going_on)
        if as_json and os.environ.get("RANK", "0") == "0":
            click.echo(json.dumps({"run": str(folder)} | json.loads((folder / SUMMARY).read_bytes())))
    except KeyboardInterrupt:
        code = 130
    leave(code)


@app.command()
@overrides_argument
@config_option
@json_option
def plan(overrides: tuple[str, ...], config_name: str | None, as_json: bool) -> None:
    """Show a plan's trees and what an epoch costs.

    Draws the tree at every place of its window and counts model calls, beside flat GRPO with as many images. Loads no
    weights.

    Example: arborl plan tree.w=3 tree.k=3 sample.num_steps=20
    """
    from ..engine.cost import forecast
    from ..engine.method import warnings_about
    from .plan_table import print_plan

    config = load_config(config_name or DEFAULT, overrides)
    found = forecast(config)
    if as_json:
        click.echo(json.dumps(found))
        return
    print_plan(config, found, out)
    for text in warnings_about(config):
        click.echo(f"warning: {text}", err=True)


@app.command()
@overrides_argument
@run_option
@config_option
@click.option(
    "--canary",
    "seconds",
    type=click.FloatRange(0),
    default=120,
    show_default=True,
    help="Seconds for a run on brightness alone, which must rise; 0 leaves it out.",
)
@json_option
def doctor(
    overrides: tuple[str, ...], run: Path | None, config_name: str | None, seconds: float, as_json: bool
) -> None:
    """Look for what is wrong before a long run, or after a flat one.

    Measures on the model itself whether rollout and update are one policy, gradients reach what is trained, processes
    agree, pictures are finite, rewards answer and tell leaves apart; what fits into memory and what an epoch takes.
    Works under a launcher too. Exit code 1 if something is wrong.

    Example: arborl doctor -c tree train.learning_rate=5e-5
    """
    from ..doctor import examine
    from ..run.resume import config_of
    from .plan_table import print_finding

    shows, wrong = os.environ.get("RANK", "0") == "0", False
    found = examine(config_of(run, config_name, overrides), run, seconds)
    for finding in found:
        wrong = wrong or finding.ok is False
        if shows and as_json:
            click.echo(json.dumps(finding._asdict()))
        elif shows:
            print_finding(finding, out)
    leave(int(wrong))
