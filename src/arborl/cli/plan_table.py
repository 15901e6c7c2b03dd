"""Plans and findings in the terminal."""

from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..config.schema import Config
from ..core.prune import Pruning, prune
from ..core.tree import Plan
from ..data.prompts import split_prompts
from ..engine.checks import Finding
from ..engine.cost import BACKWARD_COST
from ..engine.method import plans_of_a_run, pruning
from ..run.drawings import leaf_order


def profile(plan: Plan) -> str:
    """A tree in one line, a mark for each step: < where it branches, ~ where it is only noisy, - where it is ODE."""
    marks = ""
    for level in plan.levels:
        noisy, branching = bool(plan.stochastic[level.edges].any()), len(level.slot) > len(level.parents)
        marks += "<" if branching else "~" if noisy else "-"
    return f"●{marks} {len(plan.leaves)}"


def sketch(plan: Plan) -> list[str]:
    """The first tree as box drawing, root at the left, a row for each leaf; double lines are stochastic edges."""
    order = leaf_order(plan)
    members = [n for n in range(plan.nodes) if plan.tree[n] == 0]
    rows = sorted((n for n in plan.leaves.tolist() if plan.tree[n] == 0), key=lambda n: order[n])
    row_of = {leaf: i for i, leaf in enumerate(rows)}
    children: dict[int, list[int]] = {}
    for edge, parent in enumerate(plan.parent.tolist()):
        children.setdefault(parent, []).append(plan.roots + edge)
    for node in reversed(members):
        if node in children:
            spots = [row_of[c] for c in children[node]]
            row_of[node] = (spots[0] + spots[-1]) // 2
    canvas = [[" "] * (int(plan.depth.max()) * 3 + 1) for _ in rows]
    for parent in members:
        for position, child in enumerate(below := children.get(parent, [])):
            column = int(plan.depth[parent]) * 3
            line = "═" if plan.stochastic[child - plan.roots] else "─"
            canvas[row_of[child]][column + 1 : column + 3] = line * 2
            if len(below) > 1:
                top, bottom = row_of[below[0]], row_of[below[-1]]
                for row in range(top, bottom + 1):
                    canvas[row][column] = canvas[row][column] if canvas[row][column] != " " else "│"
                canvas[row_of[child]][column] = "┌" if position == 0 else "└" if child == below[-1] else "├"
    for node in members:
        if len(children.get(node, [])) != 1 or node < plan.roots:
            mark = canvas[row_of[node]][int(plan.depth[node]) * 3]
            canvas[row_of[node]][int(plan.depth[node]) * 3] = {" ": "●", "│": "┤", "┌": "┬", "└": "┴"}.get(mark, "●")
        else:
            spot = canvas[row_of[node]]
            spot[int(plan.depth[node]) * 3] = spot[int(plan.depth[node]) * 3 + 1]
    return ["".join(row).rstrip() for row in canvas]


def print_plan(config: Config, found: dict[str, Any], out: Console) -> None:
    """A plan's tree, its cost at every place of its window beside flat GRPO's, and what is counted."""
    plans = plans_of_a_run(config)
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
    pruned = pruning(config, first, 0)
    if pruned != Pruning():
        kept = prune(first, torch.arange(first.edges).double()[None], pruned)
        out.print(
            f"Pruned at the first epoch: {int(first.stochastic.sum() - kept.sum())} of {int(first.stochastic.sum())} "
            f"stochastic edges a prompt are not trained."
        )
    if config.train.kl > 0:
        out.print(
            f"train.kl={config.train.kl} adds {found['training_samples']} forwards of the reference, not counted here."
        )


def print_finding(finding: Finding, out: Console) -> None:
    """A line of `arborl doctor`: what was measured, and what to do where it is not right."""
    mark = {True: "[green]ok[/green]   ", False: "[red]wrong[/red]", None: "·    "}[finding.ok]
    out.print(f"{mark} [bold]{escape(finding.what)}[/bold]: {escape(finding.measured)}", soft_wrap=True)
    if finding.advice and finding.ok is not True:
        out.print(f"      → {escape(finding.advice)}", soft_wrap=True)
