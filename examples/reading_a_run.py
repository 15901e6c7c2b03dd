"""Read a run's folder: the curve of its evaluations, and the decision of a tree that mattered most. A few seconds.

    python examples/reading_a_run.py [runs/tree-1]

Without an argument it takes the newest run in runs/. It prints both and draws them to <run>/reading.png.
"""

import sys
from pathlib import Path

from matplotlib.figure import Figure

from arborl import TreeFile, read_metrics


def evaluations(run):
    """The first reward's name in the metrics, and (epochs, mean, standard error) of every evaluation.

    Evaluations between the first and the last may have fewer pictures; then the numbers of these are in all of them.
    """
    rows = read_metrics(run)
    names = [name for prefix in ("eval_between/", "eval/") for name in rows[0] if name.startswith(prefix)]
    name = names[0]
    return name, [(row["epoch"], row[name], row[f"{name}_stderr"]) for row in rows if name in row]


def decision(tree):
    """The best and the worst edge out of the node whose edges differ most in advantage."""
    edges_of = [(tree.plan.parent == node).nonzero().flatten().tolist() for node in tree.plan.splits.tolist()]
    ranked = [sorted(edges, key=lambda edge: float(tree.advantage[edge])) for edges in edges_of]
    worst, *_, best = max(ranked, key=lambda edges: float(tree.advantage[edges[-1]] - tree.advantage[edges[0]]))
    return best, worst


def leaf_below(tree, edge):
    """The leaf with the best score that an edge leads to: its place among the leaves."""
    below = {int(tree.plan.child[edge])}
    for parent, child in zip(tree.plan.parent.tolist(), tree.plan.child.tolist(), strict=True):
        below |= {child} if parent in below else set()  # parents come before their children
    places = [place for place, leaf in enumerate(tree.plan.leaves.tolist()) if leaf in below]
    return max(places, key=lambda place: float(tree.scores["total"][place]))


if __name__ == "__main__":
    newest = sorted(Path("runs").glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)[-1:]
    run = Path(sys.argv[1]) if len(sys.argv) > 1 else newest[0].parent
    name, curve = evaluations(run)
    for epochs, mean, error in curve:
        print(f"{name} after {epochs} epochs: {mean:.4f} ± {error:.4f}")
    tree = TreeFile.load(sorted((run / "trees").glob("*.json"))[-1])
    edges, step = decision(tree), int(tree.plan.step[decision(tree)[0]])
    told = " against ".join(f"{tree.advantage[edge]:+.2f}" for edge in edges)
    print(f"epoch {tree.epoch}, {tree.prompt!r}: most was decided at step {step}, advantages {told}")

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    left, *others = figure.subplots(1, 3)
    epochs, means, errors = zip(*curve, strict=True)
    left.errorbar(epochs, means, errors, marker="o")
    left.set(xlabel="epochs", title=name)
    for axes, edge in zip(others, edges, strict=True):
        leaf = leaf_below(tree, edge)
        picture = tree.pictures[tree.shown.tolist().index(int(tree.plan.leaves[leaf]))]
        axes.imshow(picture.permute(1, 2, 0))
        axes.set(xticks=[], yticks=[], title=f"advantage {tree.advantage[edge]:+.2f}: {tree.scores['total'][leaf]:.3f}")
    figure.savefig(run / "reading.png", dpi=120)
    print(f"drawn: {run / 'reading.png'}")
