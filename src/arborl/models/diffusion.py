"""What diffusion models (UNets that predict noise or v) share: their table of steps, by their own scheduler."""

from typing import Any

from ..core.errors import InputError
from ..core.schedule import Schedule


def ddim_grid(scheduler: Any, steps: int) -> Schedule:
    """The steps a diffusers DDIMScheduler takes: each ends where the next begins, the last where the scheduler says."""
    scheduler.set_timesteps(steps)
    timesteps = [int(t) for t in scheduler.timesteps]
    alphas = [float(scheduler.alphas_cumprod[t]) for t in timesteps] + [float(scheduler.final_alpha_cumprod)]
    if alphas[0] <= 0:
        problem = "its schedule begins at pure noise, of which no clean sample can be told"
        raise InputError("sample.num_steps", steps, problem, "a scheduler whose ᾱ is above 0 at every timestep")
    return Schedule.from_alphas(alphas, timesteps, scheduler.config.prediction_type)
