"""How far from equal the softmax weights of a backup are, by latent size: `python -m bench.backup_weights`.

The log-density of a draw from its own Gaussian, averaged over D elements, has a standard deviation of 1/√(2D).
"""

import torch

from arborl.core.kernels import Gaussian


def main() -> None:
    torch.manual_seed(0)
    print("| latent elements | example | std of the log-density | mean weight of the likelier of two siblings |")
    print("|---|---|---|---|")
    for size, example in ((2, "the mixture"), (256, "4×8×8"), (3072, "3×32×32"), (65536, "SD3.5 at 512 px")):
        draws = torch.randn(max(1000, 1_000_000 // size) // 2 * 2, size)
        density = Gaussian(torch.zeros_like(draws), torch.ones(len(draws))).log_density(draws)
        weights = torch.softmax(density.view(-1, 2), 1).amax(1)
        print(f"| {size:,} | {example} | {float(density.std()):.4f} | {float(weights.mean()):.4f} |")


if __name__ == "__main__":
    main()
