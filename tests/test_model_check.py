"""`arborl models check`: quiet about a pipeline that works, and it finds what is planted."""

import json
from pathlib import Path

import pytest

from arborl.cli import main
from arborl.models.stepping import Stepper
from bench import more_pipelines

from conftest import tiny_overrides

SMALL = ["sample.resolution=32", "sample.num_steps=6", "tree.w=2", "model.max_sequence_length=32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipelines") / "qwen_image"
    more_pipelines.build("qwen_image").save_pretrained(path)
    return path


def findings(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict]]:
    """The exit code, and the findings by what they are of."""
    with pytest.raises(SystemExit) as ending:
        main(["models", "check", *map(str, arguments), "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    return int(ending.value.code or 0), {row["what"]: row for row in rows}


def test_a_pipeline_that_works(folder: Path, capsys):
    code, found = findings(capsys, folder, *SMALL, "sample.guidance_scale=3")
    assert code == 0
    for what in ("noise levels", "picture", "first-update ratio", "noise in the log-density", "gradients", "memory"):
        assert found[what]["ok"] is True, found[what]
    assert "off by 0.0e+00" in found["picture"]["measured"]


def test_a_family_of_its_own(tiny_folder, capsys):
    path = tiny_folder("flux")
    own = [text for text in tiny_overrides("flux", path)[1:] if not text.startswith("eval")]
    code, found = findings(capsys, path, *own)
    assert code == 0
    assert found["picture"]["ok"] is True


def test_other_levels_are_not_compared(folder: Path, capsys):
    code, found = findings(capsys, folder, *SMALL, "sample.sigmas=shift", "sample.shift=5")
    assert code == 0
    assert found["noise levels"]["ok"] is None
    assert found["picture"]["ok"] is None


def test_a_step_that_is_wrong_shows_in_the_picture(folder: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    real = Stepper.velocity
    monkeypatch.setattr(Stepper, "velocity", lambda *given: 1.1 * real(*given))
    code, found = findings(capsys, folder, *SMALL)
    assert code == 1
    assert found["picture"]["ok"] is False


def test_what_cannot_be_driven_is_one_line(tmp_path: Path, capsys):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "OmniGenPipeline"}))
    with pytest.raises(SystemExit) as ending:
        main(["models", "check", str(tmp_path)])
    error = capsys.readouterr().err
    assert ending.value.code == 2
    assert len(error.splitlines()) == 1
    assert "encode_prompt" in error


def test_the_models_that_are_known(capsys):
    with pytest.raises(SystemExit) as ending:
        main(["models", "--json"])
    assert ending.value.code == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"qwen_image", "z_image_turbo", "flux2_klein"} <= {row["preset"] for row in rows}
    assert all(row["gib"]["full"] > row["gib"]["lora"] > 0 for row in rows)
    with pytest.raises(SystemExit):
        main(["models"])
    assert "Qwen/Qwen-Image" in "".join(capsys.readouterr().out.split())
