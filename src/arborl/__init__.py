"""ArboRL: reinforcement learning on denoising trees for diffusion and flow models."""

__version__ = "0.1.0"
