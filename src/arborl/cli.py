"""The command line. Errors a user can mend are one line and exit code 2."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from . import __version__
from .config import load_config, presets, read_config
from .config.schema import Config
from .core.errors import InputError

app = typer.Typer(
    name="arborl",
    help="Reinforcement learning on denoising trees, for diffusion and flow models.",
    epilog="Every setting is a KEY=VALUE; docs/config.md lists them. Begin with: arborl plan, then arborl train",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console(highlight=False)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings, such as tree.w=4 or model=sd3.", show_default=False),
]
ConfigName = Annotated[
    str, typer.Option("--config-name", "-c", help=f"Preset ({', '.join(presets())}) or a yaml file of your own.")
]
RunFolder = Annotated[
    Path | None, typer.Option("--run", help="Use this run's settings and its newest weights.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


def _version(show: bool) -> None:
    if show:
        typer.echo(f"arborl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    overrides: Overrides = None,
    config_name: ConfigName = "tree",
    resume: Annotated[
        Path | None, typer.Option(help="Go on with this run from its newest checkpoint.", show_default=False)
    ] = None,
) -> None:
    """Post-train a model. Writes metrics, pictures, trees and checkpoints to runs/<run_name>.

    Example: arborl train tree.w=3 tree.k=3 train.epochs=200 run_name=wide
    """
    from .train import train as run_training

    try:
        run_training(_config_of(resume, config_name, overrides, fixed=FIXED_ON_RESUME), resume)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def plan(overrides: Overrides = None, config_name: ConfigName = "tree", as_json: AsJson = False) -> None:
    """Show the tree at every place of its window, and what an epoch costs, before anything is loaded.

    Example: arborl plan tree.w=4 tree.k=2 sample.num_prompts=2 sample.num_steps=10
    """
    from .plan import forecast, warnings_about

    config = load_config(config_name, overrides or [])
    found = forecast(config)
    if as_json:
        typer.echo(json.dumps(found))
        return
    _print_plan(config, found)
    for text in warnings_about(config):
        typer.echo(f"warning: {text}", err=True)


@app.command()
def sample(
    overrides: Overrides = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be given again.", show_default=False)
    ] = None,
    to: Annotated[Path, typer.Option("--out", "-o", help="Folder for the pictures.")] = Path("samples"),
    run: RunFolder = None,
    config_name: ConfigName = "tree",
) -> None:
    """Make one picture a prompt, from a model or from a run's newest weights; seed=N chooses the noise.

    Example: arborl sample -p "a dot at the top left" --run runs/tree-1 --out pictures
    """
    import torch
    from PIL import Image

    from .draw import sheet
    from .evaluate import generate
    from .prompts import Prompts, load_prompts
    from .record import as_bytes

    config = _config_of(run, config_name, overrides)
    model = _load(config, run)
    prompts = Prompts(prompt, {}) if prompt else load_prompts(config.prompts.path, model.default_prompts)
    size, pictures = config.sample.decode_batch_size, []
    with out.status(f"{len(prompts)} pictures"):
        leaves = generate(model, prompts, torch.arange(len(prompts)), config)[:, 0]
        pictures = torch.cat([as_bytes(model.decode(part)) for part in leaves.split(size)])
    to.mkdir(parents=True, exist_ok=True)
    for i, picture in enumerate(pictures):
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(to / f"{i:05d}.png")
    sheet(pictures[:64], prompts.texts[:64], to / "sheet.png")
    out.print(f"{len(pictures)} pictures and sheet.png in {to}")


@app.command("eval")
def evaluate_command(
    overrides: Overrides = None, run: RunFolder = None, config_name: ConfigName = "tree", as_json: AsJson = False
) -> None:
    """Score a model, or a run's newest weights, on eval.prompts: mean ± standard error per reward.

    Example: arborl eval --run runs/tree-1 eval.num_prompts=512
    """
    from .evaluate import evaluate
    from .prompts import load_prompts
    from .rewards import load_rewards

    config = _config_of(run, config_name, overrides)
    rewards = load_rewards(config.rewards, config.advantage.combine)
    model = _load(config, run)
    training = load_prompts(config.prompts.path, model.default_prompts)
    prompts = load_prompts(config.eval.prompts, key="eval.prompts") if config.eval.prompts else training
    with Console(stderr=True).status(f"scoring {config.eval.num_prompts} pictures"):
        found = evaluate(model, rewards, prompts, config)
    if as_json:
        scores = {name: {"mean": found.mean[name], "stderr": found.stderr[name]} for name in found.mean}
        typer.echo(json.dumps({"prompts": found.prompts, "failed": found.failed, "rewards": scores}))
        return
    table = Table(
        "reward", "mean", "± standard error", title=f"{found.prompts} prompts, {found.failed} without a score"
    )
    for name, mean in found.mean.items():
        table.add_row(name, f"{mean:.4f}", f"{found.stderr[name]:.4f}")
    out.print(table)


FIXED_ON_RESUME = ("model.", "seed", "run_name", "log.dir", "prompts.")


def _config_of(run: Path | None, name: str, overrides: list[str] | None, fixed: tuple[str, ...] = ()) -> Config:
    """The configuration of a run, or of a preset, with overrides."""
    if run is None:
        return load_config(name, overrides or [])
    from .checkpoint import latest

    latest(run)  # says what is wrong with the folder, if anything is
    for text in overrides or []:
        if text.lstrip("+~").startswith(fixed or ("\0",)):
            key, _, value = text.partition("=")
            raise InputError(key, value, "cannot change when a run goes on", "the value it was started with")
    return read_config(run / "config.yaml", overrides or [])


def _load(config: Config, run: Path | None) -> Any:
    """A model for looking at: the configured one, with a run's averaged or newest weights where one is named."""
    from accelerate import Accelerator

    from .checkpoint import latest, load_weights, trainable, weights_of
    from .job import precision
    from .models import load_model

    accelerator = Accelerator(mixed_precision=precision(config))
    model = load_model(config, accelerator.device)
    if run is not None:
        load_weights(trainable(model.module), weights_of(latest(run)))
    model.module = accelerator.prepare(model.module)
    return model


def _print_plan(config: Config, found: dict[str, Any]) -> None:
    from .draw import profile, sketch
    from .plan import BACKWARD_COST, plans_of_a_run

    plans = plans_of_a_run(config)
    first, prompts = plans[0][1], config.sample.num_prompts
    if len(first.leaves) // first.roots <= 32:
        out.print(
            f"One of {first.roots} tree(s) a prompt; ═ stochastic, ─ ODE:", *sketch(first), sep="\n", markup=False
        )
    table = Table("window", "steps and leaves", box=None, title_justify="left")
    for name in ("forwards", "forward+backwards", "cost", "flat / this"):
        table.add_column(name, justify="right")
    flat_cost = found["flat"]["forwards"] + BACKWARD_COST * found["flat"]["forward_backwards"]
    for position, (start, shape) in zip(found["positions"], plans, strict=True):
        cost = position["forwards"] + BACKWARD_COST * position["forward_backwards"]
        cells = [position["forwards"], position["forward_backwards"], cost]
        table.add_row(str(start), profile(shape), *map(str, cells), f"{flat_cost / cost:.2f}")
    flat_profile = "●" + "~" * (config.sample.num_steps - 1) + f"- {len(first.leaves)}"
    cells = [found["flat"]["forwards"], found["flat"]["forward_backwards"], flat_cost]
    table.add_row("flat", flat_profile, *map(str, cells), "1.00")
    out.print(table)
    out.print("  < branches, ~ noise only, - ODE; flat: separate trajectories, trained at every step but the last\n")
    out.print(
        f"Per process and epoch: {found['images']} images, {found['training_samples']} training samples "
        f"({prompts} prompts). A forward costs 1, a forward+backward {BACKWARD_COST}.\n"
        f"Flat GRPO with as many images costs {found['ratio']:.2f} times as much, averaged over the window's places."
    )


def main(arguments: list[str] | None = None) -> None:
    """Entry point: runs a command and turns what a user can mend into one line."""
    # Under a launcher every rank finds the same mistake; one of them says so.
    speaks = os.environ.get("RANK", "0") == "0"
    try:
        app(args=arguments, prog_name="arborl")
    except InputError as error:
        if speaks:
            typer.echo(f"error: {error}", err=True)
        sys.exit(2)
