"""The scenes: the grammar, the renderer, a scorer that cannot be talked round, and the pipeline in the package."""

import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from arborl.cli import main
from arborl.config import load_config
from arborl.core.errors import InputError
from arborl.rewards import load_rewards
from arborl.run.inputs import load_inputs
from arborl.run.setup import start_accelerator
from arborl.trainer import train
from arborl.worlds.scenes import FOLDER
from arborl.worlds.scenes.grammar import (
    BACKGROUND,
    COLOUR,
    COLOURS,
    PLACE,
    PLACES,
    SHAPE,
    SIZE,
    WORDS,
    all_scenes,
    describe,
    parse,
    split,
)
from arborl.worlds.scenes.render import SIDE, masks, render
from arborl.worlds.scenes.score import parts, scene

PARTS = ("colour", "background", "place", "shape")


def total(images: Tensor, scenes: Tensor) -> Tensor:
    return torch.stack([*parts(images, scenes).values()]).mean(0)


def some(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return all_scenes()[torch.randperm(len(all_scenes()), generator=generator)[:count]]


def with_another(scenes: Tensor, column: int, seed: int = 0) -> Tensor:
    """The same scenes but for one word, and no object in its background's colour."""
    words = list(WORDS.values())[column]
    turn = torch.randint(1, len(words), (len(scenes),), generator=torch.Generator().manual_seed(seed))
    changed = scenes.clone()
    changed[:, column] = (changed[:, column] + turn) % len(words)
    clash = changed[:, COLOUR] == changed[:, BACKGROUND]
    changed[clash, column] = (changed[clash, column] + 1) % len(words)
    same = changed[:, column] == scenes[:, column]
    changed[same, column] = (changed[same, column] + 1) % len(words)
    return changed


def on_paper(scenes: Tensor, mask: Tensor) -> Tensor:
    """A mask of one's own in the scenes' colours."""
    palette = torch.tensor(list(COLOURS.values()))
    ink, paper = (palette[scenes[:, c]][:, :, None, None] for c in (COLOUR, BACKGROUND))
    return paper * (1 - mask[:, None]) + ink * mask[:, None]


class TestGrammar:
    @given(st.integers(0, len(all_scenes()) - 1))
    def test_a_caption_says_its_scene_and_nothing_else(self, index: int):
        wanted = tuple(all_scenes()[index].tolist())
        assert parse(describe(wanted)) == wanted
        assert parse("  " + describe(wanted).upper().replace(" ", "  ")) == wanted

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "a dog",
            "a red circle at the left on a blue background",
            "x " + split()[0][0],
            "a small red ring at the top on a red background",
        ],
    )
    def test_other_texts_are_not_of_the_grammar(self, text: str):
        assert parse(text) is None

    def test_the_split_shares_no_caption_and_leaves_none_out(self):
        train, held_out = split()
        assert len({*train, *held_out}) == len(train) + len(held_out) == len(all_scenes())
        assert len(held_out) >= 256

    @pytest.mark.parametrize("count", [64, 256])
    def test_any_run_of_either_side_has_every_word(self, count: int):
        for side in split():
            for name, words in WORDS.items():
                column = list(WORDS).index(name)
                assert {parse(text)[column] for text in side[:count]} == set(range(len(words)))

    def test_the_split_is_what_it_was(self):
        """Scores are compared over versions: a caption never changes sides."""
        train, held_out = split()
        assert train[0] == "a large green circle at the top on a cyan background"
        assert held_out[0] == "a large cyan ring at the left on a black background"


class TestRenderer:
    def test_every_scene_has_its_own_picture(self):
        pictures = render(all_scenes()[::7]).flatten(1)
        assert len(pictures.unique(dim=0)) == len(pictures)
        assert 0 <= float(pictures.min()) <= float(pictures.max()) <= 1

    @pytest.mark.parametrize("side", [32, 64, 128])
    def test_objects_are_where_and_as_large_as_they_should_be_at_any_resolution(self, side: int):
        scenes = all_scenes()
        scenes = scenes[(scenes[:, COLOUR] == 0) & (scenes[:, BACKGROUND] == 1)]
        centres = torch.tensor(list(PLACES.values()))[scenes[:, PLACE]]
        mask = masks(scenes, centres, side)
        axis = (torch.arange(side) + 0.5) / side
        area = mask.sum((1, 2))
        found = torch.stack([(mask.sum(1) * axis).sum(1) / area, (mask.sum(2) * axis).sum(1) / area], 1)
        torch.testing.assert_close(found, centres, rtol=0, atol=0.25 / side)
        fine = masks(scenes, centres, 256).sum((1, 2)) / 256**2
        torch.testing.assert_close(area / side**2, fine, rtol=0.04, atol=0)
        assert not mask[:, [0, -1]].any(), "objects keep off the edge"

    def test_many_at_a_time_is_one_at_a_time(self):
        scenes = some(16)
        assert torch.equal(render(scenes), torch.cat([render(one[None]) for one in scenes]))


class TestScorer:
    def test_perfect_pictures_score_at_least_95_hundredths_each(self):
        for chunk in all_scenes().split(512):
            assert float(total(render(chunk), chunk).min()) >= 0.95

    @pytest.mark.parametrize("side", [48, 96, 128])
    def test_other_resolutions_are_read_as_well(self, side: int):
        scenes = some(256)
        assert float(total(render(scenes, side=side), scenes).mean()) >= 0.95

    @pytest.mark.parametrize(
        ("column", "part"),
        [(COLOUR, "colour"), (BACKGROUND, "background"), (PLACE, "place"), (SIZE, "shape"), (SHAPE, "shape")],
    )
    def test_a_wrong_word_moves_its_own_part_alone(self, column: int, part: str):
        scenes = some(512)
        right, wrong = parts(render(scenes), scenes), parts(render(with_another(scenes, column)), scenes)
        for name in PARTS:
            if name != part:
                torch.testing.assert_close(wrong[name], right[name], rtol=0, atol=0.1)
        assert float(wrong[part].max()) <= 0.35
        assert float(wrong[part].mean()) <= 0.1

    def test_a_picture_of_something_else_scores_low(self):
        scenes, others = some(1024, 0), some(1024, 1)
        for column in range(5):
            others = torch.where((others == scenes), with_another(others, column), others)
        alike = (others == scenes).any(1) | (others[:, COLOUR] == others[:, BACKGROUND])
        assert float(total(render(others[~alike]), scenes[~alike]).max()) <= 0.1

    @settings(max_examples=30)
    @given(st.floats(-0.03, 0.03), st.floats(-0.03, 0.03))
    def test_a_small_shift_costs_next_to_nothing_and_only_in_place(self, x: float, y: float):
        scenes = some(64)
        moved = parts(render(scenes, torch.tensor([[x, y]]).expand(64, 2)), scenes)
        assert float(moved["place"].min()) >= 0.85
        assert all(float(moved[name].min()) >= 0.75 for name in PARTS)

    def test_the_further_off_the_less_it_is_in_place(self):
        scenes, last = some(256), torch.ones(256)
        inwards = torch.where(torch.tensor(list(PLACES.values()))[scenes[:, PLACE]] > 0.5, -1.0, 1.0)
        inwards[:, 1] = 0
        for off in (0.02, 0.05, 0.08, 0.11, 0.14, 0.17):
            found = parts(render(scenes, off * inwards), scenes)
            assert bool((found["place"] <= last + 1e-6).all())
            assert float(found["colour"].min()) >= 0.97
            assert float(found["shape"].min()) >= 0.75
            last = found["place"]
        assert float(last.max()) <= 0.05

    @pytest.mark.parametrize("kind", ["uniform", "normal", "binary", "blocks"])
    def test_noise_scores_next_to_nothing(self, kind: str):
        generator = torch.Generator().manual_seed(0)
        shape = (512, 3, SIDE, SIDE)
        if kind == "uniform":
            noise = torch.rand(shape, generator=generator)
        elif kind == "normal":
            noise = (0.5 + 0.3 * torch.randn(shape, generator=generator)).clamp(0, 1)
        elif kind == "binary":
            noise = torch.randint(2, shape, generator=generator).float()
        else:
            noise = torch.rand(512, 3, 8, 8, generator=generator).repeat_interleave(8, 2).repeat_interleave(8, 3)
        assert float(total(noise, some(512)).mean()) <= 0.02
        assert float(total(noise, some(512)).max()) <= 0.15

    def test_a_blank_picture_gets_its_background_and_no_more(self):
        scenes = some(512)
        blank = parts(on_paper(scenes, torch.zeros(512, SIDE, SIDE)), scenes)
        assert float(blank["background"].min()) >= 0.99
        assert all(float(blank[name].max()) == 0 for name in PARTS if name != "background")
        full = parts(on_paper(scenes, torch.ones(512, SIDE, SIDE)), scenes)
        assert all(float(full[name].max()) == 0 for name in PARTS)

    def test_a_little_noise_is_forgiven(self):
        scenes = some(512)
        noisy = render(scenes) + 0.04 * torch.randn(512, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
        assert float(total(noisy.clamp(0, 1), scenes).mean()) >= 0.93

    def test_prompts_of_another_world_have_no_score(self):
        answer = scene(render(some(2)), [describe(some(2)[0].tolist()), "a dog"], {})
        assert all(not values[0].isnan() and values[1].isnan() for values in answer.values())

    def test_pictures_it_cannot_read(self):
        with pytest.raises(InputError, match=r"rewards.scene=3×32×32: .*at least 48"):
            scene(torch.zeros(1, 3, 32, 32), [split()[0][0]], {})

    def test_it_is_the_reward_called_scene(self):
        rewards = load_rewards(load_config("tree", []).rewards)
        scenes = some(4)
        found = rewards(render(scenes), [describe(one) for one in scenes.tolist()], {}).scores
        assert set(found) == {"scene", *(f"scene/{name}" for name in PARTS)}
        torch.testing.assert_close(found["scene"], total(render(scenes), scenes))


class TestHacks:
    """What an optimizer might try. None may pay: not against the honest picture, nor against an honest mistake."""

    scenes = some(512)
    honest = total(render(scenes), scenes)

    @pytest.mark.parametrize("strength", [1.3, 2.0, 4.0])
    def test_saturating_colours(self, strength: float):
        pictures = render(self.scenes)
        grey = pictures.mean(1, keepdim=True)
        for hacked in (
            (grey + strength * (pictures - grey)).clamp(0, 1),
            (0.5 + strength * (pictures - 0.5)).clamp(0, 1),
        ):
            assert bool((total(hacked, self.scenes) <= self.honest + 0.02).all())
        assert float(total(pictures.round(), self.scenes).mean()) < float(self.honest.mean()) - 0.2

    def test_two_objects(self):
        """One where it should be and one elsewhere: worse than the one, and no better than the wrong one alone."""
        elsewhere = with_another(self.scenes, PLACE)
        centres = torch.tensor(list(PLACES.values()))
        one, other = (masks(self.scenes, centres[s[:, PLACE]]) for s in (self.scenes, elsewhere))
        both = total(on_paper(self.scenes, torch.maximum(one, other)), self.scenes)
        alone = total(render(elsewhere), self.scenes)
        assert float((both - self.honest).max()) < -0.25
        assert float((both - alone).max()) <= 0.0

    @pytest.mark.parametrize("size", [0, 1])
    def test_a_second_object_of_any_colour(self, size: int):
        """Also one that is fainter than the first: it must not hide below the first one's contrast."""
        centres, palette = torch.tensor(list(PLACES.values())), torch.tensor(list(COLOURS.values()))
        second = with_another(self.scenes, PLACE)
        second[:, SIZE] = size
        mask = masks(second, centres[second[:, PLACE]])[:, None]
        shown = (second[:, PLACE] - self.scenes[:, PLACE]).abs() > 1  # those beside the first may touch it
        for colour in palette:
            clash = (colour - palette[self.scenes[:, BACKGROUND]]).norm(dim=1) < 0.1
            pictures = render(self.scenes) * (1 - mask) + colour[:, None, None] * mask
            lost = self.honest - total(pictures, self.scenes)
            assert float(lost[shown & ~clash].min()) >= 0.2
        paper = palette[self.scenes[:, BACKGROUND]]
        faint = paper + 0.35 * torch.nn.functional.normalize(0.5 - paper, dim=1)
        pictures = render(self.scenes) * (1 - mask) + faint[:, :, None, None] * mask
        assert float((self.honest - total(pictures, self.scenes))[shown].min()) >= 0.15

    def test_two_objects_on_both_sides_of_the_place(self):
        """Their centre of mass is where it should be; as long as they are two, it does not count."""
        at = torch.tensor(list(PLACES.values()))[self.scenes[:, PLACE]]
        for off in (0.15, 0.2, 0.24):
            pair = [masks(self.scenes, at + torch.tensor([[sign * off, 0.0]])) for sign in (1, -1)]
            found = parts(on_paper(self.scenes, torch.maximum(*pair)), self.scenes)
            apart = (self.scenes[:, SIZE] == 0) | (off >= 0.2)
            assert float((found["colour"] + found["place"])[apart].mean()) <= 0.8
            assert float((self.honest - torch.stack([*found.values()]).mean(0)).min()) >= 0.2

    def test_an_object_with_a_rim_of_another_colour(self):
        """A thin object is mostly edge: its edge may blend its colour and the background's, and no other."""
        centres, palette = torch.tensor(list(PLACES.values())), torch.tensor(list(COLOURS.values()))
        mask = masks(self.scenes, centres[self.scenes[:, PLACE]])
        inner = -torch.nn.functional.max_pool2d(-mask[:, None], 3, 1, 1)
        other = palette[with_another(self.scenes, COLOUR)[:, COLOUR]]
        rim = (mask[:, None] - inner).clamp(min=0)
        pictures = on_paper(self.scenes, mask) * (1 - rim) + other[:, :, None, None] * rim
        assert float(parts(pictures, self.scenes)["colour"].mean()) <= 0.45

    def test_an_object_everywhere(self):
        centres = torch.tensor(list(PLACES.values()))
        every = torch.stack([masks(self.scenes, centre.expand(512, 2)) for centre in centres]).amax(0)
        assert float(total(on_paper(self.scenes, every), self.scenes).max()) <= 0.3

    def test_between_two_colours(self):
        """A colour half way between the right one and another is worth less than half of each."""
        palette = torch.tensor(list(COLOURS.values()))
        other = with_another(self.scenes, COLOUR)
        mask = masks(self.scenes, torch.tensor(list(PLACES.values()))[self.scenes[:, PLACE]])[:, None]
        ink = (palette[self.scenes[:, COLOUR]] + palette[other[:, COLOUR]])[:, :, None, None] / 2
        paper = palette[self.scenes[:, BACKGROUND]][:, :, None, None]
        found = parts(paper * (1 - mask) + ink * mask, self.scenes)["colour"]
        assert float(found.max()) <= 0.3

    def test_an_object_of_many_colours(self):
        palette = torch.tensor(list(COLOURS.values()))
        stripes = palette[torch.arange(SIDE) // 2 % len(palette)].T[None, :, None, :].expand(512, 3, SIDE, SIDE)
        mask = masks(self.scenes, torch.tensor(list(PLACES.values()))[self.scenes[:, PLACE]])[:, None]
        pictures = on_paper(self.scenes, torch.zeros(512, SIDE, SIDE)) * (1 - mask) + stripes * mask
        assert float(parts(pictures, self.scenes)["colour"].mean()) <= 0.25

    def test_specks_are_no_object(self):
        at = (torch.tensor(list(PLACES.values()))[self.scenes[:, PLACE]] * SIDE).long()
        mask = torch.zeros(512, SIDE, SIDE)
        mask[torch.arange(512), at[:, 1], at[:, 0]] = 1
        found = parts(on_paper(self.scenes, mask), self.scenes)
        assert float((found["colour"] + found["place"] + found["shape"]).max()) <= 0.15

    def test_a_checkerboard_of_both_colours(self):
        x = torch.arange(SIDE)
        for size in (1, 2, 8):
            board = ((x[:, None] // size + x[None, :] // size) % 2).float().expand(512, SIDE, SIDE)
            assert float(total(on_paper(self.scenes, board), self.scenes).max()) <= 0.3


def plain_pipeline():
    from diffusers import StableDiffusion3Pipeline

    pipe = StableDiffusion3Pipeline.from_pretrained(FOLDER, text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    return pipe


CAPTIONS = split()[1][:3]


class TestPipeline:
    def test_its_own_call_gives_the_picture_of_arborl_sample(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        """Same words, same seeds, same pixels: the diffusers call has no argument that is not its own."""
        from PIL import Image

        monkeypatch.chdir(tmp_path)
        prompts = [word for caption in CAPTIONS for word in ("-p", caption)]
        with pytest.raises(SystemExit) as stopped:
            main(["sample", *prompts, "seed=5"])
        assert stopped.value.code == 0
        pipe = plain_pipeline()
        for i, caption in enumerate(CAPTIONS):
            row = json.loads((tmp_path / "samples" / "index.jsonl").read_text().splitlines()[i])
            assert (row["prompt"], row["seed"]) == (caption, 5 + i)
            generator = torch.Generator().manual_seed(row["seed"])
            options = {"num_inference_steps": 10, "guidance_scale": 1.0, "max_sequence_length": 0}
            theirs = pipe(caption, generator=generator, output_type="pt", **options).images[0]
            ours = torch.tensor(list(Image.open(tmp_path / "samples" / row["file"]).tobytes())).view(SIDE, SIDE, 3)
            torch.testing.assert_close(ours.permute(2, 0, 1) / 255, theirs, rtol=0, atol=0.51 / 255)

    def test_a_call_with_diffusers_own_defaults_draws_what_it_is_told(self):
        """28 steps, guidance 7, 256 zero tokens for the T5 that is not there."""
        captions = list(split()[1][:4])
        pictures = plain_pipeline()(captions, generator=torch.Generator().manual_seed(0), output_type="pt").images
        found = scene(pictures, captions, {})
        assert float(torch.stack([*found.values()]).mean()) >= 0.6

    def test_it_is_small_whole_and_loads_in_full_precision(self):
        files = [path for path in FOLDER.rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) <= 8_000_000
        assert not [path for path in files if path.suffix not in (".json", ".safetensors")]
        pipe = plain_pipeline()
        parameters = [
            p for m in (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2) for p in m.parameters()
        ]
        assert all(p.dtype == torch.float32 for p in parameters)
        assert 3e6 <= sum(p.numel() for p in parameters) <= 4e6

    def test_every_word_is_one_token(self):
        tokenizer = plain_pipeline().tokenizer
        for caption in split()[1][:64]:
            ids = tokenizer(caption).input_ids
            assert len(ids) == len(caption.split()) + 2 <= tokenizer.model_max_length

    def test_its_autoencoder_keeps_what_the_scorer_looks_at(self):
        vae, scenes = plain_pipeline().vae, some(64)
        with torch.no_grad():
            again = vae.decode(vae.encode(render(scenes) * 2 - 1).latent_dist.mean).sample / 2 + 0.5
        assert float(total(again.clamp(0, 1), scenes).mean()) >= 0.92

    def test_it_starts_half_right_on_held_out_captions(self, capsys):
        """Also in a process that has worked in another precision before."""
        start_accelerator(load_config("mixture", ["train.mixed_precision=bf16"]))
        with pytest.raises(SystemExit):
            main(["eval", "eval.num_prompts=256", "--json"])
        answer = json.loads(capsys.readouterr().out)
        assert 0.40 <= answer["rewards"]["scene"]["mean"] <= 0.60


@pytest.mark.parametrize(("faster", "epochs"), [(4, 2), pytest.param(1, 7, marks=pytest.mark.slow)])
def test_the_default_run_raises_the_score_of_captions_it_does_not_train_on(tmp_path: Path, faster: int, epochs: int):
    """A seventh of `make train`, or less of it at a higher rate: the score of held-out captions rises well beyond its
    standard error.
    """
    quiet = ["log.trackers=[]", "log.record_every=0", f"log.dir={tmp_path}"]
    rate = f"train.learning_rate={faster * load_config().train.learning_rate}"
    run = train(load_config(overrides=[*quiet, f"train.epochs={epochs}", rate, "eval.num_prompts=128"]))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval_after"] - summary["eval_before"] > 0.08


def test_training_never_sees_a_held_out_caption():
    _, (training, held_out) = load_inputs(load_config())
    assert not set(training.texts) & set(held_out.texts)
    assert set(held_out.texts) == set(split()[1])


def test_prompts_of_ones_own_are_also_what_is_evaluated(tmp_path: Path):
    (tmp_path / "own.txt").write_text("\n".join(split()[1][:2]))
    _, (training, held_out) = load_inputs(load_config(overrides=[f"prompts.path={tmp_path / 'own.txt'}"]))
    assert training.texts == held_out.texts == list(split()[1][:2])


def test_the_package_stays_small():
    """The package's files, packed as a wheel packs them."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in FOLDER.parent.parent.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path)
    assert len(buffer.getvalue()) < 12_000_000


@pytest.mark.slow
def test_pretraining_runs_and_what_it_saves_can_be_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The whole script, a few steps of it; the folder is then a model like any other."""
    small = ["--pictures", "64", "--vae-steps", "3", "--steps", "9", "--batch", "8", "--device", "cpu"]
    command = [sys.executable, "-m", "arborl.worlds.scenes.pretrain", "--out", str(tmp_path / "new"), *small]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "saved" in done.stdout
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(
            [
                "train",
                "model=scenes",
                "model.path=new",
                "train.epochs=1",
                "sample.num_prompts=1",
                "eval.num_prompts=2",
                "tree.w=2",
            ]
        )
    assert stopped.value.code == 0
