"""Presets and groups compose, every knob has its sentence, and settings survive their file."""

import copy
from pathlib import Path

import pytest

from arborl.config import groups, knobs, load_config, options, presets, read_config, save_config
from arborl.core.advantage import ADVANTAGES
from arborl.core.errors import InputError
from arborl.core.kernels import KERNELS
from arborl.core.plans import PLANS
from arborl.engine.method import plans_of_a_run

from conftest import ROOT

SOURCE = ROOT / "src" / "arborl"


class TestConfiguration:
    @pytest.mark.parametrize("name", presets())
    def test_every_preset_composes_and_plans(self, name: str):
        config = load_config(name)
        assert plans_of_a_run(config)

    def test_every_option_of_every_group_composes(self):
        for group in groups():
            for option in options(group):
                assert load_config("tree", [f"{group}={option}"]).tree.w >= 1

    def test_what_is_done_to_one_configuration_is_not_done_to_the_next(self):
        first = load_config("mix", ["rewards=brightness"])
        known = copy.deepcopy(first)
        first.rewards["brightness"].weight = 9.0
        first.tree.split_points.append(1)
        first.rewards["other"], first.log.trackers = first.rewards.pop("brightness"), []
        first.eval.rewards.append("jpeg")
        load_config("mix", ["rewards=brightness", "rewards.brightness.weight=3", "rewards.new.weight=1"])
        assert load_config("mix", ["rewards=brightness"]) == known

    def test_every_knob_has_a_sentence(self):
        for key, item in knobs():
            assert item.metadata["help"].endswith("."), key

    def test_the_choices_are_what_the_core_has(self):
        choices = {key: item.metadata["choices"] for key, item in knobs()}
        assert choices["tree.plan"] == tuple(PLANS)
        assert choices["advantage.name"] == tuple(ADVANTAGES)
        assert {*choices["kernel.name"]} == {"auto", *KERNELS} - {"ode"}

    def test_the_reference_page_lists_every_knob_as_it_is(self):
        from arborl.config.reference import reference

        page = (SOURCE.parent.parent / "docs" / "config.md").read_text()
        assert page == reference(), "run: python -m arborl.config.reference > docs/config.md"

    def test_a_configuration_survives_its_file(self, tmp_path: Path):
        config = load_config("tree", ["tree.w=3", "rewards.mine.fn=a.b:c", "train.learning_rate=1e-5"])
        save_config(config, tmp_path / "config.yaml")
        assert read_config(tmp_path / "config.yaml") == config
        changed = read_config(tmp_path / "config.yaml", ["train.epochs=7", "rewards.mine.weight=2"])
        assert (changed.train.epochs, changed.rewards["mine"].weight) == (7, 2.0)
        with pytest.raises(InputError, match=r"nearest: tree\.w"):
            read_config(tmp_path / "config.yaml", ["tree.v=1"])

    def test_a_preset_of_ones_own(self, tmp_path: Path):
        (tmp_path / "mine.yaml").write_text("defaults:\n  - tree\n  - _self_\ntree:\n  w: 2\n")
        assert load_config(str(tmp_path / "mine.yaml"), ["tree.k=3"]).tree.w == 2
        (tmp_path / "wrong.yaml").write_text("defaults:\n  - tree\n  - _self_\ntree:\n  ww: 2\n")
        with pytest.raises(InputError, match=r"ww"):
            load_config(str(tmp_path / "wrong.yaml"))


def test_yaml_takes_on_for_true(tmp_path):
    for written, meant in (("on", "on"), ("off", "off"), ("auto", "auto"), ("true", "on")):
        (tmp_path / "own.yaml").write_text(f"defaults: [tree, _self_]\ncompile: {written}\n")
        assert load_config(str(tmp_path / "own.yaml"), []).compile == meant
