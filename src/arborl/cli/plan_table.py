"""Plans and findings in the terminal."""

from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..config.schema import Config
from ..core.prune import Pruning, prune
from ..data.prompts import split_prompts
from ..engine.checks import Finding
from ..engine.contracts import loss_of
from ..engine.cost import BACKWARD_COST
from ..engine.method import plans_of_a_run, pruning
from ..engine.rate_advice import describe_advice, describe_sum
from ..engine.rates import describe_rates
from ..run.drawings import profile, sketch


def print_plan(config: Config, found: dict[str, Any], out: Console) -> None:
    """A plan's tree, its cost at every place of its window beside flat GRPO's, and what is counted."""
    plans, loss = plans_of_a_run(config), loss_of(config)
    first, prompts = plans[0][1], split_prompts(config.sample).per_process
    if len(first.leaves) // first.roots <= 32:
        out.print(
            f"One of {first.roots} tree(s) a prompt; ═ stochastic, ─ ODE:", *sketch(first), sep="\n", markup=False
        )
    table = Table("window", box=None, title_justify="left")
    table.add_column("steps and leaves", no_wrap=True)
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
        f"Flat GRPO as published, with as many images, costs {found['ratio']:.2f} times as much, averaged over the "
        "window's places."
    )
    for text in filter(None, (describe_rates(config), describe_sum(config), describe_advice(config))):
        out.print(f"{text[0].upper()}{text[1:]}.", markup=False)
    pruned = pruning(config, first, 0)
    if pruned != Pruning():
        among = loss.edges(first)
        kept = prune(first, torch.arange(first.edges).double()[None], pruned, among=among)
        kind = "stochastic edges" if loss.needs_densities else "leaves"
        out.print(
            f"Pruned at the first epoch: {int(among.sum() - kept.sum())} of {int(among.sum())} {kind} a prompt are not "
            "trained."
        )
    for who in loss.asks:
        setting = f"loss.kl={config.loss.kl}" if config.loss.name == "surrogate" else f"loss.name={config.loss.name}"
        out.print(f"{setting} adds {found['training_samples']} forwards of the {who} policy, not counted here.")


def print_finding(finding: Finding, out: Console) -> None:
    """A line of `arborl doctor`: what was measured, and what to do where it is not right."""
    mark = {True: "[green]ok[/green]   ", False: "[red]wrong[/red]", None: "·    "}[finding.ok]
    out.print(f"{mark} [bold]{escape(finding.what)}[/bold]: {escape(finding.measured)}", soft_wrap=True)
    if finding.advice and finding.ok is not True:
        out.print(f"      → {escape(finding.advice)}", soft_wrap=True)
