"""Names of a run's files."""

from pathlib import Path

from arborl.run.paths import epoch_files, epoch_name, epoch_of


def test_files_of_epochs_are_in_the_order_of_their_numbers(tmp_path: Path):
    """A name longer than the others sorts before them as a text; what is not an epoch's is left out."""
    epochs = [3, 999_999, 1_000_000, 20]
    for name in (*(f"{epoch_name(epoch)}.json" for epoch in epochs), "damaged_epoch_000004.json", ".epoch_000005.json"):
        (tmp_path / name).touch()
    (tmp_path / f"{epoch_name(3)}.png").touch()
    assert [epoch_of(path.name) for path in epoch_files(tmp_path, ".json")] == sorted(epochs)
