"""Commands that use weights: sample, eval, embed, export."""

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from ..config import DEFAULT, load_config
from ..core.errors import InputError
from . import completion
from .app import app, config_option, json_option, out, overrides_argument, run_option
from .rewards import number_or_null


@app.command()
@overrides_argument
@click.option(
    "--prompt",
    "-p",
    multiple=True,
    help="A prompt; may be given again. Without one: prompts.path, or else some of what eval draws.",
)
@click.option(
    "--count", "-n", type=click.IntRange(1), help="Pictures to make, the prompts in turn.  [default: one each]"
)
@click.option(
    "--out",
    "-o",
    "to",
    type=click.Path(path_type=Path),
    default="samples",
    show_default=True,
    help="Folder to write to.",
)
@run_option
@config_option
@json_option
def sample(
    overrides: tuple[str, ...],
    prompt: tuple[str, ...],
    count: int | None,
    to: Path,
    run: Path | None,
    config_name: str | None,
    as_json: bool,
) -> None:
    """Make pictures.

    From the configured model, or from a run's newest weights: one for each prompt, or 16 of those that eval draws.
    Picture i starts from the noise that diffusers draws with torch.Generator().manual_seed(seed + i). Pictures of an
    earlier call in the same folder are replaced, other files never.

    Example: arborl sample -p "a large red circle at the left on a blue background" -n 8 --run runs/tree-1
    """
    from ..run.resume import config_of
    from ..sample import sample as sample_pictures

    config = config_of(run, config_name, overrides)
    with Console(stderr=True).status("making pictures"):
        made = sample_pictures(config, run, prompt, count, to)
    if as_json:
        click.echo(json.dumps({"folder": str(to), "pictures": made.rows}, ensure_ascii=False))
        return
    out.print(made.message)


@app.command("eval")
@overrides_argument
@run_option
@config_option
@json_option
def evaluate_command(overrides: tuple[str, ...], run: Path | None, config_name: str | None, as_json: bool) -> None:
    """Score a model on eval.prompts: mean ± standard error per reward.

    The configured model, or a run's newest weights (their average, where one is kept).

    Example: arborl eval --run runs/tree-1 eval.num_prompts=512
    """
    from ..engine.evaluate import evaluate
    from ..models import model_class
    from ..rewards import rewards_of
    from ..run.inputs import evaluation_prompts
    from ..run.resume import config_of, load_for_inference

    config = config_of(run, config_name, overrides)
    rewards = rewards_of(config, trains=False)
    model_class(config).check(config, may_fetch=True)
    trained = config_of(run, None, []) if run else None
    prompts, called = evaluation_prompts(config, model_class(config), trained)
    policy = load_for_inference(config, run, prompts.take(range(min(len(prompts), config.eval.num_prompts))))
    with Console(stderr=True).status(f"scoring {config.eval.num_prompts} pictures"):
        found = evaluate(policy, rewards, prompts)
    for problem in found.problems:
        click.echo(f"warning: {problem}", err=True)
    if found.problems and all(count == found.prompts for count in found.failed.values()):
        raise InputError("rewards", None, f"none of the {found.prompts} pictures got a score")
    pictures = {name: mean for name, mean in found.mean.items() if name.startswith("pictures/")}
    if as_json:
        numbers = {
            name: {"mean": number_or_null(mean), "stderr": number_or_null(found.stderr[name])}
            for name, mean in found.mean.items()
        }
        output = {"prompts": found.prompts, "evaluated_on": called, "failed": max(found.failed.values())}
        output |= {"rewards": {name: values for name, values in numbers.items() if name not in pictures}}
        click.echo(json.dumps(output | {"pictures": {name.split("/")[1]: numbers[name] for name in pictures}}))
        return
    table = Table(
        "reward", "mean", "± standard error", "without a score", title=f"{found.prompts} pictures of {called}"
    )
    for name, mean in found.mean.items():
        table.add_row(name, f"{mean:.4f}", f"{found.stderr[name]:.4f}", str(found.failed.get(name) or ""))
    out.print(table)


@app.command("embed")
@click.argument("prompts", type=click.Path(path_type=Path), metavar="PROMPTS")
@overrides_argument
@config_option
def embed_command(prompts: Path, overrides: tuple[str, ...], config_name: str | None) -> None:
    """Encode a file of prompts ahead of training.

    With the text encoders of the configured model, into prompts.cache. Interrupt it at any time: the same command goes
    on where it stopped. Training does this too, for the prompts it needs.

    Example: arborl embed prompts.txt model=sd35_medium
    """
    from ..engine.precompute import precompute_embeddings
    from ..models import model_class
    from ..run.inputs import prompts_for
    from ..run.setup import start_accelerator

    config = load_config(config_name or DEFAULT, overrides)
    family = model_class(config)
    listed = prompts_for(config, family, str(prompts), "PROMPTS")
    family.check(config, may_fetch=True)
    accelerator = start_accelerator(config)
    try:
        found = precompute_embeddings(config, listed, accelerator, verify=False)
    except KeyboardInterrupt:
        click.echo("stopped; what was encoded is kept, and the same command goes on", err=True)
        sys.exit(130)
    if found is None:
        raise InputError(
            "prompts.cache", config.prompts.cache, "this model encodes its prompts on the spot", "a folder"
        )
    if accelerator.is_main_process:
        out.print(str(found), soft_wrap=True)


@app.command("export")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN", shell_complete=completion.run_folders)
@click.argument("to", type=click.Path(path_type=Path), metavar="OUT")
@overrides_argument
@click.option(
    "--ema/--no-ema", "average", default=None, help="Averaged weights or the last.  [default: averaged, if kept]"
)
@click.option("--merge", is_flag=True, help="Write a pipeline with the LoRA in its weights, not the LoRA.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Precision of what is written.",
)
@json_option
def export_command(
    run: Path, to: Path, overrides: tuple[str, ...], average: bool | None, merge: bool, dtype: str, as_json: bool
) -> None:
    """Write a run's weights for diffusers and ComfyUI.

    Of its newest checkpoint, or of the one RUN names: a LoRA, or after a full fine-tune the pipeline. Then loads it
    with plain diffusers and compares a picture with the trainer's own; nothing is written that does not pass.

    Example: arborl export runs/tree-1 my-lora
    """
    from ..export import export
    from ..run.resume import config_of

    config = config_of(run, None, overrides)
    messages = list(export(config, run, to, average, merge, dtype))
    if as_json:
        files = sorted(str(path.relative_to(to)) for path in to.rglob("*") if path.is_file())
        click.echo(json.dumps({"folder": str(to), "files": files, "told": messages}))
        return
    for line in messages:
        out.print(line, soft_wrap=True, markup=False)
