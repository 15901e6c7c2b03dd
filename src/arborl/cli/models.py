"""Commands around models: models, models check."""

import json

import click
from rich.console import Console
from rich.table import Column, Table

from ..config import DEFAULT, load_config
from .app import app, config_option, json_option, out, overrides_argument
from .exits import leave


@app.group("models", invoke_without_command=True)
@json_option
@click.pass_context
def models_group(context: click.Context, as_json: bool) -> None:
    """List the models with settings of their own, and what their weights take in memory.

    Any other diffusers pipeline of flow matching is trained by its path: arborl train model.path=FOLDER_OR_HUB_ID
    """
    if context.invoked_subcommand:
        return
    from ..models.known import KNOWN, memory_forecast

    if as_json:
        rows = [known._asdict() | {"gib": {how: memory_forecast(known, how) for how in HOWS}} for known in KNOWN]
        click.echo(json.dumps(rows))
        return
    table = Table(Column("model=", no_wrap=True), Column("weights", overflow="fold"), "trained", "GiB", "notes")
    for known in KNOWN:
        gib = " / ".join(f"{memory_forecast(known, how):.0f}" for how in HOWS)
        table.add_row(known.preset, known.hub, f"{known.parameters:.3g} B", gib, known.note)
    out.print(table)
    out.print("GiB of weights, gradients and optimizer by LoRA / in full; activations come on top.")
    out.print("Others: arborl models check PATH")


HOWS = ("lora", "full")


@models_group.command("check")
@click.argument("path", metavar="PATH")
@overrides_argument
@config_option
@json_option
def models_check(path: str, overrides: tuple[str, ...], config_name: str | None, as_json: bool) -> None:
    """Does this pipeline work? PATH is its folder, or a hub id.

    Compares noise levels and a picture with the pipeline's own call, looks where gradients come to and whether rollout
    and update are one policy, and says what memory that took. Exit code 1 if something is wrong.

    Example: arborl models check path/to/pipeline sample.resolution=512 sample.guidance_scale=4
    """
    from ..model_check import LIGHT, check_model
    from .plan_table import print_finding

    reward = [] if any(text.startswith("rewards") for text in overrides) else ["rewards=brightness"]
    given = {text.split("=", 1)[0] for text in overrides}
    light = [text for text in LIGHT if text.split("=", 1)[0] not in given]
    config = load_config(config_name or DEFAULT, [f"model.path={path}", *reward, *light, *overrides])
    wrong = False
    with Console(stderr=True).status("loading the model"):
        found = check_model(config)
        for finding in found:
            wrong = wrong or finding.ok is False
            if as_json:
                click.echo(json.dumps(finding._asdict()))
            else:
                print_finding(finding, out)
    leave(int(wrong))
