"""`accelerate launch train.py …` is `arborl train …`."""

from arborl.cli import main

if __name__ == "__main__":
    main(["train"], pass_through=True)
