"""The parts around the core: configuration, prompts, rewards, record files, drawings, and who imports whom."""

import ast
import copy
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from arborl.cli.plan_table import sketch
from arborl.config import groups, knobs, load_config, options, presets, read_config, save_config
from arborl.config.schema import RewardConfig
from arborl.core.advantage import ADVANTAGES
from arborl.core.errors import InputError
from arborl.core.kernels import KERNELS
from arborl.core.plans import PLANS
from arborl.core.schedule import shifted
from arborl.core.tree import grow
from arborl.data.prompts import Prompts, load_prompts, prompt_order
from arborl.engine.batches import batches
from arborl.engine.method import plans_of_a_run
from arborl.rewards import load_rewards
from arborl.rewards.simple import brightness, jpeg
from arborl.run.drawings import draw_tree, leaf_order, sheet
from arborl.run.trees import TreeFile

SOURCE = Path(__file__).parent.parent / "src" / "arborl"


def test_core_imports_nothing_of_the_project_outside_itself():
    for path in (SOURCE / "core").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level <= 1, f"{path.name} imports from outside core"
                assert node.level == 1 or not (node.module or "").startswith("arborl"), path.name
            if isinstance(node, ast.Import):
                assert all(not alias.name.startswith("arborl") for alias in node.names), path.name
            if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                allowed = {"torch", "jaxtyping", "math", "typing", "dataclasses", "functools", "collections"}
                assert {str(name).split(".")[0] for name in names} <= allowed, path.name


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


class TestPrompts:
    def test_lines_and_rows(self, tmp_path: Path):
        (tmp_path / "a.txt").write_text("one\n\n  two  \n")
        assert load_prompts(str(tmp_path / "a.txt")).texts == ["one", "two"]
        (tmp_path / "a.jsonl").write_text('{"prompt": "one", "n": 1}\n{"prompt": "two"}\n')
        rows = load_prompts(str(tmp_path / "a.jsonl"))
        assert rows.columns == {"n": [1, None]}
        assert rows.repeat(2).texts == ["one", "one", "two", "two"]
        assert rows.take([1, 0, 1]).columns["n"] == [None, 1, None]

    def test_not_text(self, tmp_path: Path):
        (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(InputError, match="not UTF-8"):
            load_prompts(str(tmp_path / "a.txt"))

    @given(total=st.integers(1, 40), per_epoch=st.integers(1, 30), seed=st.integers(0, 9))
    def test_every_pass_sees_every_prompt_once_whatever_the_batch(self, total: int, per_epoch: int, seed: int):
        epochs = -(-2 * total // per_epoch)
        seen = [i for epoch in range(epochs) for i in prompt_order(total, epoch * per_epoch, per_epoch, seed)]
        assert sorted(seen[:total]) == sorted(seen[total : 2 * total]) == list(range(total))
        one_by_one = [prompt_order(total, i, 1, seed)[0] for i in range(len(seen))]
        assert seen == one_by_one, "where an epoch ends must not change the order"

    def test_passes_and_seeds_differ(self):
        assert prompt_order(50, 0, 50, 0) != prompt_order(50, 50, 50, 0)
        assert prompt_order(50, 0, 50, 0) != prompt_order(50, 0, 50, 1)


@given(count=st.integers(0, 50), size=st.integers(1, 20), pad=st.booleans())
def test_batches_cover_everything_once(count: int, size: int, pad: bool):
    found = list(batches(count, size, pad))
    assert torch.cat([b.rows[: b.valid] for b in found] or [torch.empty(0)]).tolist() == list(range(count))
    assert all(len(b.rows) == size if pad else len(b.rows) == b.valid for b in found)


class TestRewards:
    def test_canaries(self):
        flat, noisy = torch.full((1, 3, 64, 64), 0.5), torch.rand(1, 3, 64, 64)
        assert float(brightness(flat, [""], {})) == 0.5
        sizes = jpeg(torch.cat([flat, noisy]), ["", ""], {})
        assert 0 > float(sizes[0]) > float(sizes[1]) > -0.1

    def test_named_parts_and_weights(self):
        rewards = load_rewards({"a": RewardConfig("brightness", 2.0), "b": RewardConfig("jpeg", 0.0)})
        parts = {name: v.view(1, 4) for name, v in rewards(torch.rand(4, 3, 8, 8), [""] * 4, {}).scores.items()}
        scores = rewards.combine(parts)
        torch.testing.assert_close(scores.total, 2 * parts["a"].double())


def recorded(leaves_without_score: bool = False) -> TreeFile:
    plan = grow(shifted(4, 3.0), "flow_sde", 2, [2, 3, 1, 1], [0.5, 0.5, 0.0, 0.0])
    scores = torch.rand(len(plan.leaves))
    if leaves_without_score:
        scores[0] = math.nan
    return TreeFile(
        epoch=3,
        prompt="a <b>dot</b> & „quotes“ at the top left",
        plan=plan,
        log_density=torch.randn(plan.edges),
        advantage=torch.randn(plan.edges).double(),
        kept=plan.stochastic,
        ratio=torch.where(plan.stochastic, 1.0, torch.nan),
        shown=plan.preview_nodes,
        scores={"place": scores, "total": scores.double()},
        pictures=torch.randint(0, 255, (len(plan.preview_nodes), 3, 8, 8), dtype=torch.uint8),
        latents=torch.randn(plan.nodes, 4, 2, 2),
    )


class TestTreeFiles:
    def test_the_file_form_gives_back_what_it_was_given(self, tmp_path: Path):
        tree = recorded(leaves_without_score=True)
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

    def test_a_damaged_or_newer_file_is_one_line(self, tmp_path: Path):
        stem = tmp_path / "t"
        recorded().save(stem)
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
        draw_tree(recorded(holes), tmp_path / "t.png")
        picture = Image.open(tmp_path / "t.png")
        assert picture.width > 400
        assert picture.height > 400
        assert [p.name for p in tmp_path.iterdir()] == ["t.png"]


def test_leaves_are_laid_out_without_crossings():
    plan = recorded().plan
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


def test_the_sketch_has_a_row_for_each_leaf():
    plan = grow(shifted(5, 3.0), "flow_sde", 1, [1, 2, 2, 1, 1], [0.0, 0.5, 0.5, 0.0, 0.0])
    rows = sketch(plan)
    assert rows == [
        "   ┌══┬══──────●",
        "●──┤  └══──────●",
        "   └══┬══──────●",
        "      └══──────●",
    ]


def test_a_sheet_of_pictures(tmp_path: Path):
    sheet(torch.zeros(5, 3, 16, 16, dtype=torch.uint8), ["a very long caption " * 5] * 5, tmp_path / "s.png", columns=3)
    assert Image.open(tmp_path / "s.png").size == (3 * 134 + 6, 2 * 190 + 6)


def test_prompts_without_a_default():
    with pytest.raises(InputError, match="no prompt list"):
        load_prompts("", Prompts([], {}).texts)
