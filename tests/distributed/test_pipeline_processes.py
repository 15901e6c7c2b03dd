"""A pipeline by its own loop on several processes: two experts, called by the ranks in one order whatever is kept."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_processes import assert_close, trained

from bench import more_pipelines

from launching import last_checkpoint


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Wan2.2's two transformers, the second from a level in the middle of the window on."""
    folder = tmp_path_factory.mktemp("pipelines") / "wan22_a14b"
    more_pipelines.build("wan22_a14b").save_pretrained(folder)
    return [
        f"model.path={folder}",
        "model.lora.rank=4",
        "rewards=brightness",
        "sample.resolution=32",
        "sample.num_frames=5",
        "model.max_sequence_length=32",
        "sample.num_steps=8",
        "sample.shift=1",
        "sample.sigmas=shift",
        "sample.prompts_per_epoch=3",
        "sample.batch_size=4",
        "sample.decode_batch_size=4",
        "train.batch_size=2",
        "train.updates=2",
        "train.epochs=1",
        "train.learning_rate=3e-5",  # AdamW's first steps are as large where a gradient is all rounding
        "tree.w=4",
        "tree.s=0",
        "prune.step_fraction=0.6",  # drawn for each prompt, so that ranks train other steps, in another order
        "kernel.eta=0.4",
        "eval.num_prompts=2",
        "log.trackers=[]",
        "log.record_every=0",
    ]


def test_two_experts_on_two_processes(tmp_path: Path, experts: list[str]):
    """Copied or split, they come to what one process comes to; and both experts are trained."""
    one = trained(1, experts, tmp_path, "one")
    weights = load_file(last_checkpoint(one) / "weights.safetensors")
    for part in ("transformer.", "transformer_2."):
        assert any(bool(w.any()) for name, w in weights.items() if name.startswith(part) and ".lora_B." in name)
    assert_close(one, trained(2, experts, tmp_path, "copied"))
    assert_close(one, trained(2, [*experts, "train.shard=full"], tmp_path, "split"))
