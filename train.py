"""`accelerate launch train.py …` is `arborl train …`."""

import sys

from arborl.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
