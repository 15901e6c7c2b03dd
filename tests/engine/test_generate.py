"""Pictures by the ODE, for commands that check no plan beforehand."""

import pytest
import torch

from arborl.config import with_settings
from arborl.core.errors import InputError
from arborl.data.prompts import Prompts
from arborl.engine.generate import generate

from conftest import make_policy


def test_what_is_wrong_with_the_steps_is_said_by_the_settings_name():
    policy = make_policy(["model=mixture"])
    # No setting may be that; a pipeline's own scheduler could.
    policy.config = policy.model.config = with_settings(policy.config, {"sample.shift": 0.0})
    with pytest.raises(InputError, match=r"^sample\.shift=0\.0"):
        generate(policy, Prompts(["a dot"], {}), torch.arange(1))
