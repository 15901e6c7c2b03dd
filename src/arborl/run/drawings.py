"""Drawings of trees, as text and as pictures, and sheets of samples."""

import math
import struct
import textwrap
import zlib
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngImageFile
from torch import Tensor

from ..core.tree import Plan
from ..tools.files import atomic
from .trees import TreeFile

BROKEN_SHEET = (
    *(OSError, EOFError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, SyntaxError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)
"""What Python and Pillow raise over a sheet's index and PNG that are not what was written."""


def leaf_order(plan: Plan) -> list[float]:
    """Each node's place from top to bottom: leaves as a depth-first walk meets them, parents midway over theirs."""
    paths: list[tuple[int, ...]] = [(root,) for root in range(plan.roots)]
    for edge, parent in enumerate(plan.parent.tolist()):
        paths.append((*paths[parent], plan.roots + edge))
    place = [0.0] * plan.nodes
    for position, leaf in enumerate(sorted(plan.leaves.tolist(), key=lambda n: paths[n])):
        place[leaf] = float(position)
    below: dict[int, list[float]] = {}
    for edge in reversed(range(plan.edges)):
        child, parent = plan.roots + edge, int(plan.parent[edge])
        if child in below:
            place[child] = (min(below[child]) + max(below[child])) / 2
        below.setdefault(parent, []).append(place[child])
    for root in range(plan.roots):
        if root in below:
            place[root] = (min(below[root]) + max(below[root])) / 2
    return place


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


def draw_tree(tree: TreeFile, path: Path) -> None:
    """A recorded tree as a PNG: pictures at the root, the splits and the leaves; edges coloured by advantage."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.collections import LineCollection
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.offsetbox import AnnotationBbox, OffsetImage

    plan = tree.plan
    place, leaves = leaf_order(plan), plan.leaves.tolist()
    noisy = [bool(plan.stochastic[level.edges].any()) for level in plan.levels]
    # Deterministic steps are where nothing is decided: they get less room.
    ticks = [0.0]
    for is_noisy in noisy:
        ticks.append(ticks[-1] + (1.0 if is_noisy else 0.45))
    across = [ticks[d] for d in plan.depth.tolist()]
    width, height = 2.4 + 1.3 * ticks[-1], 1.5 + max(0.55 * len(leaves), 2.2)
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    known = tree.advantage[~tree.advantage.isnan()].abs()
    limit = max(float(known.max()) if len(known) else 0.0, 1e-6)
    # A square-root scale, with grey in the middle: small advantages are the usual ones and must still show a side.
    colours = LinearSegmentedColormap.from_list("advantage", ["#a50f15", "#ef6548", "#b8b8b8", "#4292c6", "#08306b"])

    def colour(value: float) -> object:
        return (
            "#dddddd" if math.isnan(value) else colours(0.5 + 0.5 * math.copysign(math.sqrt(abs(value) / limit), value))
        )

    if any(noisy):
        start, stop = noisy.index(True), len(noisy) - noisy[::-1].index(True)
        axes.axvspan(ticks[start], ticks[stop], color="#f5f1e6", zorder=0, lw=0)
        middle = (ticks[start] + ticks[stop]) / 2
        axes.text(middle, -0.95, "stochastic window", ha="center", va="center", fontsize=8, color="#8a7f63")
    lines, line_colours, widths = [], [], []
    for edge, parent in enumerate(plan.parent.tolist()):
        child = plan.roots + edge
        lines.append([(across[parent], place[parent]), (across[child], place[child])])
        line_colours.append(colour(float(tree.advantage[edge])))
        widths.append(3.2 if tree.kept[edge] else 1.2)
    axes.add_collection(LineCollection(lines, colors=line_colours, linewidths=widths, zorder=2, capstyle="round"))
    _label_advantages(axes, tree, place, across)

    for node, pixels in zip(tree.shown.tolist(), tree.pictures, strict=True):
        picture = OffsetImage(pixels.permute(1, 2, 0).numpy(), zoom=32 / max(pixels.shape))
        frame = {"edgecolor": "#444444", "linewidth": 0.6}
        axes.add_artist(AnnotationBbox(picture, (across[node], place[node]), bboxprops=frame, pad=0.1))
    total = tree.scores["total"]
    several = len([name for name in tree.scores if "/" not in name]) > 2
    label = "combined\nscore" if several else "score"
    axes.text(ticks[-1] + 0.24, -0.95, label, va="center", ha="left", fontsize=8, color="#555555")
    for index, leaf in enumerate(leaves):
        score = float(total[index])
        text = "no score" if math.isnan(score) else f"{score:.3f}"
        axes.text(across[leaf] + 0.24, place[leaf], text, va="center", ha="left", fontsize=8)

    axes.set_xlim(-0.4, ticks[-1] + 0.75)
    axes.set_ylim(len(leaves) - 0.4, -1.3)
    axes.set_xticks(ticks, [f"{s:.2f}" for s in [*_level_sigmas(plan), 0.0]], fontsize=8)
    axes.set_xlabel("noise level σ", fontsize=9)
    axes.set_yticks([])
    axes.spines[["left", "right", "top"]].set_visible(False)
    title = textwrap.shorten(f"“{tree.prompt}”", 90, placeholder="…”")
    axes.set_title(
        f"{title}, epoch {tree.epoch}\nblue edges led to better pictures than the average, red to worse", fontsize=9
    )
    with atomic(path) as aside:
        figure.savefig(aside, facecolor="white", format="png")


def _label_advantages(axes, tree: TreeFile, place: list[float], across: list[float]) -> None:
    """The number on each trained edge, where there is room for it."""
    if int(tree.kept.sum()) > 64:
        return
    for edge in tree.kept.nonzero().squeeze(1).tolist():
        parent, child = int(tree.plan.parent[edge]), tree.plan.roots + edge
        x = across[parent] + 0.62 * (across[child] - across[parent])
        y = place[parent] + 0.62 * (place[child] - place[parent])
        box = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
        text = f"{float(tree.advantage[edge]):+.2f}"
        axes.text(x, y, text, fontsize=6.5, ha="center", va="center", bbox=box, zorder=4)


def _level_sigmas(plan: Plan) -> list[float]:
    return [float(plan.schedule.sigma[plan.step[level.edges][0]]) for level in plan.levels]


MARGIN, CAPTION, CELL = 6, 56, 128
"""A sheet's measures in pixels: between pictures, below them, and a picture's side."""

Box = tuple[int, int, int, int]
"""A picture's place: left, top, right, bottom."""


def cell_of(pictures: Tensor) -> int:
    """A picture's side on a sheet: large ones get twice the room."""
    return CELL if max(pictures.shape[-2:]) < 2 * CELL else 2 * CELL


def sheet(pictures: Tensor, captions: list[str], path: Path, columns: int = 8) -> list[Box]:
    """Pictures (uint8, n×3×H×W) in a grid, each with its caption below, as a PNG; where each of them lies."""
    columns, cell = max(1, min(columns, len(pictures))), cell_of(pictures)
    rows = -(-len(pictures) // columns)
    size = (columns * (cell + MARGIN) + MARGIN, rows * (cell + CAPTION + MARGIN) + MARGIN)
    canvas = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(11)
    boxes: list[Box] = []
    for i, (picture, text) in enumerate(zip(pictures, captions, strict=True)):
        x, y = MARGIN + i % columns * (cell + MARGIN), MARGIN + i // columns * (cell + CAPTION + MARGIN)
        image = Image.fromarray(picture.permute(1, 2, 0).numpy())
        longer = max(image.size)
        how = Image.Resampling.NEAREST if longer < cell else Image.Resampling.LANCZOS
        image = image.resize((cell * image.width // longer, cell * image.height // longer), how)
        boxes.append((x, y + cell - image.height, x + image.width, y + cell))  # at its caption
        canvas.paste(image, boxes[-1])
        for line, part in enumerate(textwrap.wrap(text, 20 * cell // CELL, max_lines=4, placeholder="…")):
            draw.text((x, y + cell + 2 + 13 * line), part, fill="black", font=font)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as aside:
        canvas.save(aside)
    return boxes


def check_png(path: Path) -> None:
    """Raise one of `BROKEN_SHEET` unless a picture is there to its last row."""
    with PngImageFile(path) as opened:  # Image.open refuses what is as large as a tree of a thousand leaves
        opened.load()


def interleave(sheets: list[Path], names: list[str], path: Path, cell: int = CELL) -> None:
    """Sheets of the same captions in one picture, row by row, each row under its sheet's name."""
    pages = [Image.open(sheet).convert("RGB") for sheet in sheets]
    row, title = cell + CAPTION + MARGIN, 18
    rows = min(page.height for page in pages) // row
    width = max(page.width for page in pages)
    canvas = Image.new("RGB", (width, rows * (len(pages) * (row + title) + 2 * MARGIN)), "white")
    draw, font, y = ImageDraw.Draw(canvas), ImageFont.load_default(12), 0
    for number in range(rows):
        for page, name in zip(pages, names, strict=True):
            draw.text((MARGIN, y + 3), name, fill="#555555", font=font)
            canvas.paste(page.crop((0, number * row, page.width, (number + 1) * row)), (0, y + title))
            y += row + title
        y += 2 * MARGIN
    with atomic(path) as aside:
        canvas.save(aside)


def save_picture(picture: Tensor, stem: Path, frames_a_second: int = 16) -> Path:
    """A picture (uint8, 3×H×W) as PNG; a video (F×3×H×W) as animated WebP, which browsers play."""
    frames = [Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in picture.view(-1, *picture.shape[-3:])]
    path = stem.with_suffix(".png" if picture.ndim == 3 else ".webp")
    with atomic(path) as aside:
        if picture.ndim == 3:
            frames[0].save(aside)
        else:
            pause = round(1000 / frames_a_second)
            frames[0].save(aside, save_all=True, append_images=frames[1:], duration=pause, loop=0, quality=90)
    return path
