"""A plan as the terminal shows it."""

from arborl.cli.plan_table import sketch
from arborl.core.schedule import shifted
from arborl.core.tree import grow


def test_the_sketch_has_a_row_for_each_leaf():
    plan = grow(shifted(5, 3.0), "flow_sde", 1, [1, 2, 2, 1, 1], [0.0, 0.5, 0.5, 0.0, 0.0])
    rows = sketch(plan)
    assert rows == [
        "   ┌══┬══──────●",
        "●──┤  └══──────●",
        "   └══┬══──────●",
        "      └══──────●",
    ]
