"""Presets and groups compose, every knob has its sentence, and settings survive their file."""

import copy
import inspect
import os
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from arborl.compare.runs import Cell, Protocol, config_of_run
from arborl.config import groups, knobs, load_config, options, presets, read_config, save_config, with_settings
from arborl.config.interpolation import ENVIRONMENT
from arborl.core.advantage import ADVANTAGES
from arborl.core.errors import InputError
from arborl.core.kernels import KERNELS
from arborl.core.losses import LOSSES
from arborl.core.plans import PLANS
from arborl.engine.contracts import LOSS_SETTINGS
from arborl.engine.method import plans_of_a_run
from arborl.worlds.scenes import FOLDER

from conftest import ROOT

SOURCE = ROOT / "src" / "arborl"
TREE = load_config("tree")


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
        with pytest.raises(AttributeError, match=r"RewardConfig\.weight is a setting, and is not written to"):
            first.rewards["brightness"].weight = 9.0
        first.tree.split_points.append(1)
        first.rewards["other"] = first.rewards.pop("brightness")
        first.log.trackers.append("wandb")
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
        assert choices["loss.name"] == tuple(LOSSES)
        assert {*choices["kernel.name"]} == {"auto", *KERNELS}

    def test_settings_of_losses_say_which_of_the_built_in_ones_take_them(self):
        """The others ignore them."""
        sentence = {key.removeprefix("loss."): item.metadata["help"] for key, item in knobs()}
        for setting in LOSS_SETTINGS:
            takes = {name for name, loss in LOSSES.items() if setting in inspect.signature(loss).parameters}
            said = set(re.findall(r"\w+", sentence[setting])) & set(LOSSES)
            assert said == takes, setting
            assert takes == set(LOSSES) or "other losses ignore it" in sentence[setting]

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


SECRET = "not-for-the-page"
ASKS = {
    "the environment": "${oc.env:A_KEY}",
    "with spaces": "${ oc.env : A_KEY }",
    "quoted": "${oc.env:'A_KEY'}",
    "inside a text": "http://host/${oc.env:A_KEY}/x",
    "as a default": "${oc.env:NOT_THERE,${oc.env:A_KEY}}",
    "as the default of one that is allowed": "${oc.env:TMPDIR,${oc.env:A_KEY}}",
    "decoded": "${oc.decode:${oc.env:A_KEY}}",
    "decoded from a text": "${oc.decode:'${oc.env:A_KEY}'}",
    "by a name that another setting has": "${oc.env:${run_name}}",
    "by a function that another setting names": "${${run_name}.env:A_KEY}",
    "within another key": "${tree.${oc.env:A_KEY}}",
    "selected": "${oc.select:nowhere,${oc.env:A_KEY}}",
    "of Hydra": "${hydra:runtime.cwd}",
    "of the program's own": "${own:A_KEY}",
}
"""Ways to have something computed when settings are read."""


class TestEnvironment:
    """A yaml file may be anyone's, and settings stand in config.yaml, on the page and in addresses."""

    @pytest.fixture(autouse=True)
    def key(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        monkeypatch.setenv("A_KEY", SECRET)
        monkeypatch.chdir(tmp_path)
        OmegaConf.register_new_resolver("own", lambda name: os.environ[name])
        yield
        OmegaConf.clear_resolver("own")

    def test_folders_of_it_are(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        """Also for the folder of a model, whose family decides other settings, and as a default of one another."""
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("SCRATCH", raising=False)
        (tmp_path / "m").symlink_to(FOLDER)
        config = load_config("tree", ["model.path=${oc.env:HOME}/m", "log.dir=${oc.env:HOME}/runs"])
        assert (config.model.path, config.log.dir) == (f"{tmp_path}/m", f"{tmp_path}/runs")
        assert config.model.family == load_config("tree", [f"model.path={tmp_path}/m"]).model.family
        mine = tmp_path / "mine.yaml"
        mine.write_text(
            yaml.safe_dump({"defaults": ["tree", "_self_"], "log": {"dir": "${oc.env:SCRATCH,${oc.env:HOME}}"}})
        )
        assert load_config(str(mine)).log.dir == str(tmp_path)
        mine.write_text(
            yaml.safe_dump({"defaults": ["tree", "_self_"], "log": {"dir": "${oc.env:SCRATCH,${oc.env:A_KEY}}"}})
        )
        with pytest.raises(InputError, match="settings may ask for"):
            load_config(str(mine))

    def test_nor_in_what_names_other_files(self, tmp_path: Path):
        """Hydra resolves it before there are settings, and says in its errors what came out."""
        file, other = tmp_path / "mine.yaml", tmp_path / "other.yaml"
        asks = "${oc.env:A_KEY}"
        for entry in ({"model": asks}, {"override model": asks}, {"optional model": asks}, asks):
            file.write_text(yaml.safe_dump({"defaults": ["mixture", "_self_", entry]}))
            other.write_text(yaml.safe_dump({"defaults": ["mixture", entry]}))
            self.refused(file)
            file.write_text(yaml.safe_dump({"defaults": ["other", "_self_"]}))
            self.refused(file)
        (tmp_path / "model").mkdir()
        inner = yaml.safe_dump({"defaults": [asks]})
        for entry, named in (({"/model": "mine"}, "mine"), ({"/model": "scenes"}, "scenes"), ("/model/mine", "mine")):
            (tmp_path / "model" / f"{named}.yaml").write_text(inner)
            file.write_text(yaml.safe_dump({"defaults": ["tree", "_self_", entry]}))
            self.refused(file)
        file.write_text(yaml.safe_dump({"defaults": ["tree", "_self_"]}))  # which names model/scenes, here another one
        self.refused(file)
        file.write_text(yaml.safe_dump({"defaults": ["tree", {" ": "x"}]}))
        with pytest.raises(InputError):
            load_config(str(file))
        assert OmegaConf.create({"a": asks}).a == SECRET, "who imports ArboRL resolves as before"
        (tmp_path / "model" / "scenes.yaml").unlink()
        file.write_text(yaml.safe_dump({"defaults": ["mixture"], "hydra": {"searchpath": [f"file:///tmp/{asks}"]}}))
        assert SECRET not in str(load_config(str(file)))  # the search path is ours
        file.write_text(yaml.safe_dump({"defaults": ["tree"], "prompts": {"path": asks}}))
        self.refused(file, "model.path=${prompts.path}")
        file.write_text(yaml.safe_dump({"eval": {"num_between": f"${{oc.decode:{asks}}}"}, "run_name": "x"}))
        with pytest.raises(InputError, match="settings may ask for") as refused:
            read_config(file)
        assert SECRET not in str(refused.value)

    def refused(self, file: Path, *overrides: str) -> None:
        with pytest.raises(InputError, match="settings may ask for") as refused:
            load_config(str(file), overrides)
        assert SECRET not in str(refused.value)

    def test_nor_for_the_model_whose_family_decides_others(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("arborl.config._family_at", lambda path: pytest.fail(f"asked for {path}"))
        with pytest.raises(InputError, match="settings may ask for"):
            load_config("tree", ["model.path=${oc.env:A_KEY}"])

    @pytest.mark.parametrize("how", ASKS)
    def test_nothing_of_it_is_read(self, how: str, tmp_path: Path):
        asks, file = ASKS[how], tmp_path / "mine.yaml"
        run = "A_KEY" if how == "by a name that another setting has" else "oc"
        rewards = {"mine": {"url": asks}, "others": {"url": ["http://a", asks]}}
        for own in ({"rewards": rewards}, {"sample": {"negative_prompt": asks}}, {"log": {"trackers": [asks]}}):
            file.write_text(yaml.safe_dump({"defaults": ["tree", "_self_"], "run_name": run, **own}))
            with pytest.raises(InputError) as refused:
                load_config(str(file))
            assert "settings may ask for" in str(refused.value)
            assert SECRET not in str(refused.value)
            file.write_text(yaml.safe_dump({"run_name": run, **own}))  # as a run's own
            with pytest.raises(InputError, match="settings may ask for"):
                read_config(file)

    @pytest.mark.parametrize(
        "asks", ["${oc.env:A_KEY}", "a${oc.env: A_KEY}", "[${oc.env:A_KEY}]", "{a:${oc.env:A_KEY}}"]
    )
    def test_nor_by_an_override(self, asks: str, tmp_path: Path):
        save_config(load_config("tree"), tmp_path / "config.yaml")
        for key in ("rewards.scene.url", "rewards.scene.fn", "prompts.path", "eval.rewards"):
            said: list[str] = []
            for read in (
                lambda own: load_config("tree", [own]),
                lambda own: read_config(tmp_path / "config.yaml", [own]),
                lambda own: config_of_run(Cell(f"tree '{own}'"), Protocol((0,), 1.0), 0, tmp_path),
                lambda own: config_of_run(Cell("tree"), Protocol((0,), 1.0, common=(own,)), 0, tmp_path),
            ):
                with pytest.raises(InputError) as refused:
                    read(f"{key}={asks}")
                said.append(str(refused.value))
            assert not [line for line in said if SECRET in line]

    def test_folders_and_jobs_are(self, monkeypatch: pytest.MonkeyPatch):
        for name in ENVIRONMENT:
            monkeypatch.setenv(name, f"its_{name}")
            assert load_config("tree", [f"run_name=a-${{oc.env:{name}}}"]).run_name == f"a-its_{name}"
            monkeypatch.delenv(name)
            assert load_config("tree", [f"log.dir=${{oc.env:{name},elsewhere}}"]).log.dir == "elsewhere"

    def test_the_time_is(self):
        assert load_config("tree", ["run_name=${now:%Y}"]).run_name.isdigit()

    def test_settings_name_each_other(self, tmp_path: Path):
        own = "log: {save_every: '${train.epochs}'}\nrun_name: w${tree.w}-${advantage.name}\ntree: {w: 2}\n"
        (tmp_path / "mine.yaml").write_text(f"defaults: [tree, _self_]\n{own}")
        config = load_config(str(tmp_path / "mine.yaml"), ["train.epochs=7", "eval.every=${train.epochs}"])
        assert (config.log.save_every, config.eval.every, config.run_name) == (7, 7, "w2-tree")

    def test_what_is_escaped_stays_a_text(self, tmp_path: Path):
        """Also when a run's settings are read again."""
        text = r"\${oc.env:A_KEY} \${seed}"
        config = load_config("tree", [f"rewards.scene.fn='{text}'"])
        assert config.rewards["scene"].fn == "${oc.env:A_KEY} ${seed}"
        save_config(config, tmp_path / "config.yaml")
        assert read_config(tmp_path / "config.yaml") == config

    @settings(max_examples=30)
    @given(
        text=st.lists(st.sampled_from(["\\", "${", "seed", "oc.env:A_KEY", "}", "'", " a"]), max_size=7).map("".join)
    )
    def test_any_text_survives_its_file(self, text: str):
        given = {"rewards.scene.fn": text, "eval.rewards": [text], "rewards.scene.url": [text]}
        config = with_settings(TREE, given)
        save_config(config, Path("config.yaml"))
        assert read_config(Path("config.yaml")) == config


class TestLists:
    """Brackets are a pattern to zsh, so that they may be left out."""

    SAME = (
        ("eval.rewards=[jpeg,scene]", "eval.rewards=jpeg,scene"),
        ("eval.rewards=[jpeg]", "eval.rewards=jpeg"),
        ("prune.depth=[1,2]", "prune.depth=1,2"),
        ("prune.depth=[3]", "prune.depth=3"),
        ("tree.split_points=[0,2]", "tree.split_points=0,2"),
        ("log.trackers=[tensorboard,wandb]", "log.trackers=tensorboard,wandb"),
        ("model.lora.targets=['to_out.0',to_q]", "model.lora.targets='to_out.0',to_q"),
        ("rewards.x.url=[http://a:1,http://b:2]", "rewards.x.url=http://a:1,http://b:2"),
        ("rewards=[brightness,jpeg]", "rewards=brightness,jpeg"),
        ("rewards=[jpeg]", "rewards=jpeg"),
    )

    @pytest.mark.parametrize(("with_brackets", "without"), SAME)
    def test_brackets_may_be_left_out(self, with_brackets: str, without: str, tmp_path: Path):
        assert load_config("tree", [without]) == load_config("tree", [with_brackets]) != load_config("tree")
        if not without.startswith("rewards="):
            save_config(load_config("tree"), tmp_path / "config.yaml")
            assert read_config(tmp_path / "config.yaml", [without]) == load_config("tree", [with_brackets])

    def test_every_list_takes_them(self):
        lists = [key for key, item in knobs() if "list[" in str(item.type)]
        assert len(lists) > 4
        for key in lists:
            assert load_config("tree", [f"{key}=1,2"]) == load_config("tree", [f"{key}=[1,2]"])

    def test_several_rewards_are_trained_on(self):
        assert [*load_config("tree", ["rewards=brightness,jpeg"]).rewards] == ["brightness", "jpeg"]
        with pytest.raises(InputError, match=r"nearest: jpeg"):
            load_config("tree", ["rewards=brightness,jpg"])

    @pytest.mark.parametrize("text", ["tree.w=1,2", "sample.negative_prompt=a,b", "run_name=a,b", "model.path=a,b"])
    def test_what_is_no_list_takes_one_value(self, text: str):
        with pytest.raises(InputError, match="more than one value"):
            load_config("tree", [text])

    @pytest.mark.parametrize("text", ["algo=tree,mix", "eval.rewards=shuffle(a,b)", "eval.rewards=", "prune.depth=a"])
    def test_nor_is_everything_a_list(self, text: str):
        with pytest.raises(InputError):
            load_config("tree", [text])
