"""Commands around rewards: rewards, rewards check, serve."""

import json
import math
import os
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from ..config import DEFAULT, load_config
from . import completion
from .app import app, config_option, json_option, out, overrides_argument


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
    from ..rewards.catalog import BUILT_IN
    from ..rewards.inspect import availability

    found = availability(load_config(DEFAULT, ["rewards=none", *overrides]))
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
@click.argument("reward", metavar="REWARD", shell_complete=completion.reward_names)
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

    Then score it and darker ones again, the other way round and alone: a reward that gives them other scores is wrong.
    REWARD is a name in the list, or package.module:function. Its settings are rewards.<name>.KEY=VALUE.

    Example: arborl rewards check jpeg
    """
    from ..rewards.inspect import try_out

    config = load_config(config_name or DEFAULT, overrides)
    with Console(stderr=True).status("scoring"):
        found = try_out(reward, config, picture, prompt, device)
    scores = {name: number_or_null(score) for name, score in found.scores.items()}
    if as_json:
        click.echo(json.dumps({"scores": scores, "load_seconds": found.load, "score_seconds": found.again}))
    else:
        for name, score in scores.items():
            out.print(f"{name}: {'no score' if score is None else f'{score:.6g}'}")
        what = f"one picture of {found.size} on {found.device}"
        out.print(f"{what}: {found.load:.2f} s the first time, {found.again:.3f} s the next")
    if found.fault:
        raise found.fault
    if found.noise:
        click.echo(f"warning: {found.noise}", err=True)


@app.command()
@click.argument("reward", metavar="REWARD", shell_complete=completion.reward_names)
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
    from ..rewards.catalog import BUILT_IN
    from ..rewards.inspect import named, usable, warm_up
    from ..rewards.serve import serve as run_server

    config = load_config(config_name or DEFAULT, overrides)
    name, function = named(reward, config)
    place = usable(device)
    if reward in BUILT_IN:  # loaded now: what cannot work should not be served, and the first run should not wait
        warm_up(name, function, place)
    variable = config.rewards[name].token if name in config.rewards else "ARBORL_REWARD_TOKEN"
    run_server(function, name, host, port, os.environ.get(variable), device=place)


def number_or_null(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
