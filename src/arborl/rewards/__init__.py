"""Rewards: plain functions of pictures and prompts, by name or by `package.module:function`."""

from .base import Reward, Rewards, Scores, load_rewards, rewards_of

__all__ = ["Reward", "Rewards", "Scores", "load_rewards", "rewards_of"]
