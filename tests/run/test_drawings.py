"""Trees as text and as pictures, and sheets of samples."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from arborl.core.schedule import shifted
from arborl.core.tree import grow
from arborl.run.drawings import draw_tree, interleave, leaf_order, save_picture, sheet, sketch

from conftest import recorded_tree


def test_leaves_are_laid_out_without_crossings():
    plan = recorded_tree().plan
    place = leaf_order(plan)
    assert sorted(place[leaf] for leaf in plan.leaves.tolist()) == list(range(len(plan.leaves)))
    for depth in range(1, 5):
        edges = [
            (place[int(plan.parent[e])], place[plan.roots + e])
            for e in range(plan.edges)
            if plan.depth[plan.roots + e] == depth
        ]
        edges.sort()
        assert [child for _, child in edges] == sorted(child for _, child in edges)


def test_a_sheet_of_pictures(tmp_path: Path):
    sheet(torch.zeros(5, 3, 16, 16, dtype=torch.uint8), ["a very long caption " * 5] * 5, tmp_path / "s.png", columns=3)
    assert Image.open(tmp_path / "s.png").size == (3 * 134 + 6, 2 * 190 + 6)


def test_the_sketch_has_a_row_for_each_leaf():
    plan = grow(shifted(5, 3.0), "flow_sde", 1, [1, 2, 2, 1, 1], [0.0, 0.5, 0.5, 0.0, 0.0])
    rows = sketch(plan)
    assert rows == [
        "   ┌══┬══──────●",
        "●──┤  └══──────●",
        "   └══┬══──────●",
        "      └══──────●",
    ]


@pytest.mark.parametrize("name", ["tree", "sheet", "both", "picture", "video"])
def test_a_picture_is_written_through_no_link_and_is_whole_or_not_there(tmp_path: Path, name: str, monkeypatch):
    pictures = torch.randint(0, 255, (2, 3, 8, 8), dtype=torch.uint8)
    sheet(pictures, ["a", "b"], tmp_path / "before" / "one.png")
    place = tmp_path / "here" / ("00000.webp" if name == "video" else "00000.png")
    place.parent.mkdir()
    draw = {
        "tree": lambda: draw_tree(recorded_tree(), place),
        "sheet": lambda: sheet(pictures, ["a", "b"], place),
        "both": lambda: interleave([tmp_path / "before" / "one.png"], ["before"], place),
        "picture": lambda: save_picture(pictures[0], place.with_suffix("")),
        "video": lambda: save_picture(pictures, place.with_suffix("")),
    }[name]
    (tmp_path / "theirs.png").write_text("theirs")
    place.symlink_to(tmp_path / "theirs.png")
    with pytest.raises(FileExistsError):
        draw()
    assert (tmp_path / "theirs.png").read_text() == "theirs"
    place.unlink()
    draw()
    whole = place.read_bytes()

    def cut_short(image: Image.Image, to: Path, *_: object, **__: object) -> None:
        Path(to).write_bytes(b"half of")
        raise KeyboardInterrupt

    monkeypatch.setattr(Image.Image, "save", cut_short)
    with pytest.raises(KeyboardInterrupt):
        draw()
    assert place.read_bytes() == whole
    assert [path.name for path in place.parent.iterdir()] == [place.name]
