"""Pictures by the ODE, for commands that check no plan beforehand."""

import pytest
import torch

from arborl.core.errors import InputError
from arborl.data.prompts import Prompts
from arborl.engine.generate import generate

from conftest import make


def test_what_is_wrong_with_the_steps_is_said_by_the_settings_name():
    config, model = make(["model=mixture"])
    config.sample.shift = 0.0  # no setting may be that; a pipeline's own scheduler could
    with pytest.raises(InputError, match=r"^sample\.shift=0\.0"):
        generate(model, Prompts(["a dot"], {}), torch.arange(1), config)
