"""The command line. Errors a user can mend are one line and exit code 2."""

import ctypes
import json
import math
import os
import re
import signal
import sys
import traceback
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from . import __version__, complete
from .config import load_config, presets
from .core.errors import InputError

out = Console(highlight=False)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Every setting is a KEY=VALUE; docs/config.md lists them. Begin with `arborl plan`, then `arborl train`.",
    invoke_without_command=True,
)
@click.version_option(__version__, prog_name="arborl")
@click.pass_context
def app(context: click.Context) -> None:
    """Reinforcement learning on denoising trees, for diffusion and flow models."""
    if context.invoked_subcommand is None:
        from .next import print_next

        print_next(out)


overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete.settings)
config_option = click.option(
    "--config-name",
    "-c",
    metavar="NAME",
    help=f"Preset ({', '.join(presets())}) or a yaml file of your own.  [default: tree]",
    shell_complete=complete.preset_names,
)
run_option = click.option(
    "--run",
    type=click.Path(path_type=Path),
    shell_complete=complete.run_folders,
    help="Use this run's settings and newest weights; or name a checkpoint in it.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for machines.")


@app.command()
@overrides_argument
@config_option
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    shell_complete=complete.run_folders,
    help="Go on with this run from its newest checkpoint. auto: with the one that run_name names if it is there, else "
    "start it.",
)
@json_option
def train(overrides: tuple[str, ...], config_name: str | None, resume: Path | None, as_json: bool) -> None:
    """Post-train a model.

    Writes metrics, pictures, trees and checkpoints to runs/<run_name>. Interrupt it at any time: it says how to go on.

    Example: arborl train tree.k=3 train.learning_rate=5e-5 run_name=wide
    """
    from .runs import start_of
    from .train import train as run_training

    config, going_on, over = start_of(resume, config_name, overrides)
    if over:
        if os.environ.get("RANK", "0") == "0":
            click.echo(f"{going_on} has come to its end already", err=True)
        return
    code = 0
    try:
        folder = run_training(config, going_on)
        if as_json and os.environ.get("RANK", "0") == "0":
            click.echo(json.dumps({"run": str(folder)} | json.loads((folder / "summary.json").read_bytes())))
    except KeyboardInterrupt:
        code = 130
    _leave(code)


def _leave(code: int) -> None:
    """End the process; under a launcher at once."""
    if "WORLD_SIZE" in os.environ:
        # Threads of gloo may outlive their process group and abort the process when its interpreter ends
        # (pytorch/pytorch#179291). All that matters is written and closed by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


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
    from .plan import forecast, warnings_about
    from .show import print_plan

    config = load_config(config_name or "tree", overrides)
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
    from .doctor import examine
    from .runs import config_of
    from .show import print_finding

    shows, wrong = os.environ.get("RANK", "0") == "0", False
    found = examine(config_of(run, config_name, overrides), run, seconds)
    for finding in found:
        wrong = wrong or finding.ok is False
        if shows and as_json:
            click.echo(json.dumps(finding._asdict()))
        elif shows:
            print_finding(finding, out)
    _leave(int(wrong))


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
    Picture i starts from the noise that diffusers draws with torch.Generator().manual_seed(seed + i).

    Example: arborl sample -p "a large red circle at the left on a blue background" -n 8 --run runs/tree-1
    """
    from .runs import config_of
    from .sample import sample as sample_pictures

    config = config_of(run, config_name, overrides)
    with Console(stderr=True).status("making pictures"):
        made = sample_pictures(config, run, prompt, count, to)
    if as_json:
        rows = [json.loads(line) for line in (to / "index.jsonl").read_text(encoding="utf-8").splitlines()]
        click.echo(json.dumps({"folder": str(to), "pictures": rows}, ensure_ascii=False))
        return
    out.print(made)


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
    from .evaluate import evaluate
    from .inputs import heldout_prompts
    from .models import model_class
    from .rewards import rewards_of
    from .runs import config_of, load

    config = config_of(run, config_name, overrides)
    rewards = rewards_of(config, trains=False)
    model_class(config).check(config, may_fetch=True)
    prompts = heldout_prompts(config, model_class(config))
    model = load(config, run, prompts.texts[: config.eval.num_prompts])
    with Console(stderr=True).status(f"scoring {config.eval.num_prompts} pictures"):
        found = evaluate(model, rewards, prompts, config)
    for problem in found.problems:
        click.echo(f"warning: {problem}", err=True)
    if found.problems and all(count == found.prompts for count in found.failed.values()):
        raise InputError("rewards", None, f"none of the {found.prompts} pictures got a score")
    pictures = {name: mean for name, mean in found.mean.items() if name.startswith("pictures/")}
    if as_json:
        numbers = {
            name: {"mean": _number(mean), "stderr": _number(found.stderr[name])} for name, mean in found.mean.items()
        }
        told = {"prompts": found.prompts, "failed": max(found.failed.values())}
        told |= {"rewards": {name: values for name, values in numbers.items() if name not in pictures}}
        click.echo(json.dumps(told | {"pictures": {name.split("/")[1]: numbers[name] for name in pictures}}))
        return
    table = Table("reward", "mean", "± standard error", "without a score", title=f"{found.prompts} pictures")
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
    from .embed import embed
    from .models import model_class
    from .prepare import start_accelerator
    from .prompts import load_prompts

    config = load_config(config_name or "tree", overrides)
    texts = load_prompts(str(prompts), key="PROMPTS").texts
    model_class(config).check(config, may_fetch=True)
    accelerator = start_accelerator(config)
    try:
        found = embed(config, texts, accelerator, verify=False)
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
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN", shell_complete=complete.run_folders)
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
    from .export import export
    from .runs import checkpoint_of, config_of

    config = config_of(run, None, overrides)
    told = list(export(config, checkpoint_of(run), to, average, merge, dtype))
    if as_json:
        files = sorted(str(path.relative_to(to)) for path in to.rglob("*") if path.is_file())
        click.echo(json.dumps({"folder": str(to), "files": files, "told": told}))
        return
    for line in told:
        out.print(line, soft_wrap=True, markup=False)


@app.command()
@click.argument(
    "folder", type=click.Path(path_type=Path), metavar="[RUN]", required=False, shell_complete=complete.run_folders
)
@click.option("--live", is_flag=True, help="Serve the page of a running job on this machine alone, and keep it new.")
@click.option("--out", "-o", "to", type=click.Path(path_type=Path), help="File to write.  [default: RUN/report.html]")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8050, show_default=True, help="Of --live; 0 takes a free one."
)
@click.option("--open", "opens", is_flag=True, help="Open it in the browser.")
@json_option
def report(folder: Path | None, live: bool, to: Path | None, port: int, opens: bool, as_json: bool) -> None:
    """Show a run, or a comparison, on one page.

    Curves with standard errors, trees with their pictures and advantages, pictures before and after, signs of reward
    hacking, where the time went, settings. One HTML file that needs nothing else. Without RUN: the newest in runs/.

    Example: arborl report runs/tree-1
    """
    from .next import newest_run
    from .report import read, write_report
    from .report.live import app as live_page
    from .serving import serve_at

    folder = folder or newest_run()
    if folder is None:
        raise InputError("RUN", None, "there is no run in runs/ yet", "a run's folder; a run is made by: arborl train")
    if live and to:
        raise InputError("--out", to, "a page that is served is not written", "--live, or --out")
    if not live:
        written = write_report(folder, to)
        click.echo(json.dumps({"report": str(written), "bytes": written.stat().st_size}) if as_json else str(written))
        if opens:
            click.launch(str(written))
        return

    def announce(at: str) -> None:
        click.echo(json.dumps({"serving": at, "run": str(folder)}) if as_json else f"{folder} at {at} (Ctrl-C ends it)")
        if opens:
            click.launch(at)

    read(folder)  # what cannot be shown is told now
    serve_at("127.0.0.1", port, live_page(folder), announce)


@app.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes a shell complete commands, settings and their values.

    Example: eval "$(arborl completion bash)", in ~/.bashrc
    """
    click.echo(complete.script(app, shell))


@app.command()
@click.argument("cells", nargs=-1, required=True, metavar="CELL...")
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True, help="Runs a cell, of seeds 0, 1, …")
@click.option(
    "--compute",
    type=float,
    help="Budget of a run in forwards; a forward+backward counts 3. [default: what the first cell's train.epochs cost]",
)
@click.option("--seconds", type=float, help="Budget of a run in seconds of training, in place of compute.")
@click.option(
    "--set", "common", multiple=True, metavar="KEY=VALUE", help="A setting of every cell; may be given again."
)
@click.option("--baseline", help="The cell whose final score others are to reach.  [default: the best flat one]")
@click.option(
    "--points",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Evaluations in a run; with --seconds every 10 epochs.",
)
@click.option("--workers", type=click.IntRange(1), help="Runs side by side.  [default: as the device has room]")
@click.option(
    "--out",
    "-o",
    "to",
    type=click.Path(path_type=Path),
    default="runs/compare",
    show_default=True,
    help="Folder for runs, table and plots.",
)
@click.option("--dry-run", is_flag=True, help="Show the runs and their cost, and stop.")
@json_option
def compare(
    cells: tuple[str, ...],
    seeds: int,
    compute: float | None,
    seconds: float | None,
    common: tuple[str, ...],
    baseline: str | None,
    points: int,
    workers: int | None,
    to: Path,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Compare presets at equal compute or equal seconds.

    A cell is a preset with any overrides, in quotes. All cells get the same model, prompts and seeds. Writes
    compare.md, compare.json, compare.png and report.html; the same command again goes on where it was cut off, and
    runs nothing twice.

    Example: arborl compare tree 'tree tree.w=4 sample.num_prompts=16' flow_grpo --seeds 5 --compute 4e5
    """
    from .compare import Cell, Protocol, cli

    protocol = Protocol(tuple(range(seeds)), compute or 0.0, seconds or 0.0, common, points)
    cli.compare([Cell(text) for text in cells], protocol, to, baseline, workers, dry_run, as_json, out)


@app.group("rewards", invoke_without_command=True)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="A setting, such as model.path; may be given again."
)
@json_option
@click.pass_context
def rewards_group(context: click.Context, overrides: tuple[str, ...], as_json: bool) -> None:
    """List the rewards: which are ready, what the others lack, where to get it.

    Weights are looked for from the current folder, and in the hub's cache; CLIP's tokenizer also in the model's
    pipeline: arborl rewards --set model.path=FOLDER
    """
    if context.invoked_subcommand:
        return
    from .rewards.catalog import BUILT_IN
    from .rewards.report import states

    found = states(load_config("tree", ["rewards=none", *overrides]))
    if as_json:
        facts = {name: BUILT_IN[name] for name, _ in found}
        listed = [
            {"name": name, "what": facts[name].what, "ready": not lacks, "lacks": lacks or None}
            for name, lacks in found
        ]
        click.echo(json.dumps(listed))
        return
    table = Table("reward", "says", "usual scores", "weights", "licence", "here")
    for name, lacks in found:
        known = BUILT_IN[name]
        extra = f"in arborl\\[{known.extra}]" if known.extra else "none"
        size = " + ".join(need.size for need in known.needs) or extra
        licence = ", ".join(dict.fromkeys(need.licence for need in known.needs))
        table.add_row(name, known.what, known.usual, size, licence, "no" if lacks else "[green]ready[/green]")
    out.print(table)
    for _, lacks in found:
        if lacks:
            out.print(lacks, soft_wrap=True, markup=False)


@rewards_group.command("check")
@click.argument("reward", metavar="REWARD", shell_complete=complete.reward_names)
@overrides_argument
@click.option("--picture", "-i", type=click.Path(path_type=Path), help="A picture to score, in place of a drawn one.")
@click.option("--prompt", "-p", help="Its prompt.")
@click.option("--device", help="Where to compute, such as cpu.  [default: a GPU, if there is one]")
@config_option
@json_option
def rewards_check(
    reward: str,
    overrides: tuple[str, ...],
    picture: Path | None,
    prompt: str | None,
    device: str | None,
    config_name: str | None,
    as_json: bool,
) -> None:
    """Score one picture and print score and time.

    REWARD is a name in the list, or package.module:function. Its settings are rewards.<name>.KEY=VALUE.

    Example: arborl rewards check jpeg
    """
    from .rewards.report import try_out

    config = load_config(config_name or "tree", overrides)
    with Console(stderr=True).status("scoring"):
        found = try_out(reward, config, picture, prompt, device)
    scores = {name: _number(score) for name, score in found.scores.items()}
    if as_json:
        click.echo(json.dumps({"scores": scores, "load_seconds": found.load, "score_seconds": found.again}))
        return
    for name, score in scores.items():
        out.print(f"{name}: {'no score' if score is None else f'{score:.6g}'}")
    what = f"one picture of {found.size} on {found.device}"
    out.print(f"{what}: {found.load:.2f} s the first time, {found.again:.3f} s the next")


@app.command()
@click.argument("reward", metavar="REWARD", shell_complete=complete.reward_names)
@overrides_argument
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen at; others than this machine's need a token.",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 takes a free one."
)
@click.option("--device", help="Where to compute, such as cpu.  [default: a GPU, if there is one]")
@config_option
def serve(
    reward: str, overrides: tuple[str, ...], host: str, port: int, device: str | None, config_name: str | None
) -> None:
    """Serve a reward to runs elsewhere.

    REWARD is a name in `arborl rewards`, or package.module:function. A run uses it with rewards.<name>.url=http://host:port;
    both take the token from $ARBORL_REWARD_TOKEN. The protocol is JSON and PNG (docs/rewards.md).

    Example: arborl serve jpeg --port 8000
    """
    from .rewards.catalog import BUILT_IN
    from .rewards.report import named, usable, warm_up
    from .rewards.serve import serve as run_server

    config = load_config(config_name or "tree", overrides)
    name, function = named(reward, config)
    place = usable(device)
    if reward in BUILT_IN:  # loaded now: what cannot work should not be served, and the first run should not wait
        warm_up(name, function, place)
    variable = config.rewards[name].token if name in config.rewards else "ARBORL_REWARD_TOKEN"
    run_server(function, name, host, port, os.environ.get(variable), device=place)


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def main(arguments: list[str] | None = None) -> None:
    """Entry point: runs a command and turns what a user can mend into one line."""
    rank, several = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")) > 1
    on = f" on rank {rank}" if rank else ""
    if several:
        _end_with_launcher()
    try:
        sys.exit(app.main(arguments, prog_name="arborl", standalone_mode=False) or 0)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "arborl"
        text = _one_line(error.format_message())
        click.echo(f"error: {text}{'' if text.endswith('?') else ';'} see: {command} -h", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        click.echo(f"error: {_one_line(error.format_message())}", err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        click.echo("stopped", err=True)
        sys.exit(130)
    except InputError as error:
        # Before the ranks meet every one finds what is wrong with the settings: one on each machine says so. Later only
        # those come here whose error nobody else has told.
        if _ranks_have_met() or os.environ.get("LOCAL_RANK", "0") == "0":
            click.echo(f"error{on}: {error}", err=True)
        _leave(2)
    except Exception as error:
        if not several:
            raise
        from .together import Elsewhere

        if isinstance(error, Elsewhere):
            click.echo(f"stopped{on}: {error}", err=True)
        elif _lost_contact(error):
            click.echo(f"stopped{on}: another process is gone ({str(error).splitlines()[0]})", err=True)
        else:
            traceback.print_exc()
        _leave(1)


def _one_line(text: str) -> str:
    """click's sentence as one of ours."""
    text = " ".join(text.split()).rstrip(".")
    return text[:1].lower() + text[1:]


def _end_with_launcher() -> None:
    """A launcher that is killed leaves its ranks at work, and a run that goes on meanwhile has two writers. On Linux a
    process may ask to be told: all of them then leave together, with a checkpoint.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _lost_contact(error: Exception) -> bool:
    """Whether an error only says that another process does not answer any more."""
    from torch.distributed import DistError

    gloo = type(error) is RuntimeError and re.search(
        r"gloo.*([Cc]onnection|[Pp]ipe|[Tt]imed? ?out)", str(error), re.DOTALL
    )
    return isinstance(error, DistError) or bool(gloo)


def _ranks_have_met() -> bool:
    from accelerate import PartialState

    return bool(PartialState._shared_state)
