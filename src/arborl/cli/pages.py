"""Commands for reading: report, completion."""

import json
from pathlib import Path

import click

from ..core.errors import InputError
from .app import app, json_option
from .completion import run_folders, script


@app.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="[RUN]", required=False, shell_complete=run_folders)
@click.option("--live", is_flag=True, help="Serve the page of a running job on this machine alone, and keep it new.")
@click.option(
    "--out",
    "-o",
    "to",
    type=click.Path(path_type=Path),
    help="File to write, new or an earlier report.  [default: RUN/report.html]",
)
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
    from ..report import read, write_report
    from ..report.live import app as live_page
    from ..tools.web import serve_at
    from .suggestions import newest_run

    folder = folder or newest_run()
    if folder is None:
        raise InputError(
            "RUN", None, "there is no run in runs/ yet", "a run's folder", cure="arborl train, which makes one"
        )
    if live and to:
        raise InputError("--out", to, "a page that is served is not written", cure="either --live or --out")
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

    read(folder)  # a folder that cannot be shown is an error now
    serve_at("127.0.0.1", port, live_page(folder), announce)


@app.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes a shell complete commands, settings and their values.

    Example: eval "$(arborl completion bash)", in ~/.bashrc
    """
    click.echo(script(app, shell))
