"""A recorded tree as a file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from arborl.core.errors import InputError
from arborl.run.drawings import draw_tree
from arborl.run.trees import TreeFile

from conftest import recorded_tree


class TestTreeFiles:
    def test_the_file_form_gives_back_what_it_was_given(self, tmp_path: Path):
        tree = recorded_tree(leaves_without_score=True)
        tree.save(tmp_path / "trees" / "epoch_000003")
        back = TreeFile.load(tmp_path / "trees" / "epoch_000003.json")
        assert (back.epoch, back.prompt, back.plan.kernel, back.plan.roots) == (3, tree.prompt, "flow_sde", 2)
        for name in ("parent", "step", "eta", "kappa", "leaves", "stochastic"):
            assert torch.equal(getattr(back.plan, name), getattr(tree.plan, name))
        assert torch.equal(back.plan.schedule.sigma, tree.plan.schedule.sigma)
        for name in ("log_density", "advantage", "kept", "shown", "pictures", "latents"):
            assert torch.equal(getattr(back, name), getattr(tree, name))
        assert all(torch.equal(v.nan_to_num(), back.scores[k].nan_to_num()) for k, v in tree.scores.items())
        assert {p.suffix for p in (tmp_path / "trees").iterdir()} == {".json", ".safetensors"}

    def test_a_file_from_before_siblings_could_be_balanced_is_of_independent_ones(self, tmp_path: Path):
        tree = recorded_tree()
        replace(tree, plan=replace(tree.plan, balanced=True)).save(tmp_path / "t")
        assert TreeFile.load(tmp_path / "t").plan.balanced
        path = tmp_path / "t.json"
        head = json.loads(path.read_text())
        del head["balanced"]
        path.write_text(json.dumps(head))
        assert not TreeFile.load(tmp_path / "t").plan.balanced

    def test_a_damaged_or_newer_file_is_one_line(self, tmp_path: Path):
        stem = tmp_path / "t"
        recorded_tree().save(stem)
        json_text = stem.with_suffix(".json").read_text()
        stem.with_suffix(".json").write_text(json_text.replace('"version": 3', '"version": 4'))
        with pytest.raises(InputError, match=r"version 4.*version 3"):
            TreeFile.load(stem)
        stem.with_suffix(".json").write_text(json_text)
        stem.with_suffix(".safetensors").write_bytes(b"nothing")
        with pytest.raises(InputError, match="cannot be read"):
            TreeFile.load(stem)

    @pytest.mark.parametrize("holes", [False, True])
    def test_it_is_drawn(self, tmp_path: Path, holes: bool):
        draw_tree(recorded_tree(holes), tmp_path / "t.png")
        picture = Image.open(tmp_path / "t.png")
        assert picture.width > 400
        assert picture.height > 400
        assert [p.name for p in tmp_path.iterdir()] == ["t.png"]
