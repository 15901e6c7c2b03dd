"""Laws of what a pipeline prepares: taken apart and put together again, for one prompt and for several."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from arborl.models.prepared import collate, find_rules, leaves, nested, restore, signature, to_tensors

ENDS = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from([0.5, "", "a text", "ä.b|c"])
VALUES = st.recursive(ENDS, lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner), max_leaves=6)
RESULTS = st.dictionaries(st.sampled_from(["encode_prompt", "_a", "b1"]), st.lists(VALUES, min_size=1, max_size=3))
MANY = {"m": [[*range(12)], *range(10)]}
"""Places are numbers, and 10 comes after 9."""


@example(MANY)
@given(RESULTS)
def test_nested_is_the_inverse_of_leaves(results: dict[str, list[Any]]):
    assert nested(leaves(results)) == results


@example(MANY)
@given(RESULTS)
def test_values_that_are_no_tensors_come_back_as_they_were(results: dict[str, list[Any]]):
    rules = find_rules(results, results, results)
    tensors, forms = collate([to_tensors(results, rules)] * 2)
    assert restore(tensors, forms[:1], torch.float32) == results
    assert signature(forms[0]) == signature(forms[1])


# A pipeline of every rule: what its methods return for some prompts, by the rules' own definitions.


class Prompt(NamedTuple):
    tokens: int
    seed: int


def drawn(prompt: Prompt, *shape: int, salt: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * prompt.seed + salt))


def filled(rows: list[Tensor], axis: int) -> Tensor:
    """Rows filled up with zeros to the longest."""
    most = max(row.shape[axis] for row in rows)

    def full(row: Tensor) -> Tensor:
        missing = list(row.shape)
        missing[axis] = most - row.shape[axis]
        return torch.cat([row, row.new_zeros(missing)], axis)

    return torch.stack([full(row) for row in rows])


def mask(prompts: list[Prompt], dtype: torch.dtype) -> Tensor | None:
    """Which places are no filling; none where all are."""
    lengths = [prompt.tokens for prompt in prompts]
    most = max(lengths)
    if min(lengths) == most:
        return None
    return torch.tensor([[place < length for place in range(most)] for length in lengths]).to(dtype)


def rows(prompts: list[Prompt]) -> Any:
    return torch.stack([drawn(prompt, 3) for prompt in prompts])


def whole_numbers(prompts: list[Prompt]) -> Any:
    return torch.stack([(drawn(prompt, 2) * 100).long() for prompt in prompts])


def padded(prompts: list[Prompt]) -> Any:
    return filled([drawn(prompt, prompt.tokens, 2) for prompt in prompts], 0)


def padded_at_the_end(prompts: list[Prompt]) -> Any:
    return filled([drawn(prompt, 2, prompt.tokens) for prompt in prompts], 1)


def padded_with_a_mask(prompts: list[Prompt]) -> Any:
    return padded(prompts), mask(prompts, torch.long)


def padded_with_two_masks(prompts: list[Prompt]) -> Any:
    return padded(prompts), mask(prompts, torch.bool), [mask(prompts, torch.int32)]


def listed(prompts: list[Prompt]) -> Any:
    return [drawn(prompt, prompt.tokens, 2) for prompt in prompts]


def same(prompts: list[Prompt]) -> Any:
    return torch.arange(6.0).view(2, 3)


def longest(prompts: list[Prompt]) -> Any:
    return torch.arange(max(prompt.tokens for prompt in prompts))[:, None].expand(-1, 3).float()


def plain(prompts: list[Prompt]) -> Any:
    return None, True, 3, "text", 0.5, [], ()


KINDS = (rows, whole_numbers, padded, padded_at_the_end, padded_with_a_mask, padded_with_two_masks, listed, same)
KINDS += (longest, plain)
Kind = Callable[[list[Prompt]], Any]


def results_of(kinds: list[Kind], prompts: list[Prompt]) -> dict[str, list[Any]]:
    """A method for each kind, called twice, as for a text and the one it is led away from."""
    return {f"method_{i}": [(kind(prompts), 7), kind(prompts)] for i, kind in enumerate(kinds)}


def rules_of(kinds: list[Kind]) -> dict[str, str]:
    short, long = Prompt(1, 1), Prompt(9, 2)
    return find_rules(*(results_of(kinds, prompts) for prompts in ([short], [long], [short, long])))


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_equal(found[name], value)
    else:
        assert found == expected


PROMPTS = st.lists(st.builds(Prompt, st.integers(1, 12), st.integers(0, 5)), min_size=1, max_size=4)


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4), PROMPTS)
def test_prompts_prepared_apart_are_the_pipelines_own_together(kinds: list[Kind], prompts: list[Prompt]):
    """Whatever their lengths: each alone as it was, and all of them as the pipeline would have prepared them."""
    rules = rules_of(kinds)
    apart = [to_tensors(results_of(kinds, [prompt]), rules) for prompt in prompts]
    for prompt, own in zip(prompts, apart, strict=True):
        tensors, forms = collate([own])
        assert_equal(restore(tensors, forms, torch.float32), results_of(kinds, [prompt]))
    tensors, forms = collate(apart)
    assert len({signature(form) for form in forms}) == 1
    assert_equal(restore(tensors, forms, torch.float32), results_of(kinds, prompts))


IN_ROWS = (rows, whole_numbers, padded, padded_at_the_end, padded_with_a_mask)


@given(st.sampled_from(IN_ROWS), PROMPTS, st.data())
def test_some_of_those_that_were_put_together(kind: Kind, prompts: list[Prompt], data: st.DataObject):
    """Rows that are picked are their prompts', in the shape of all of them."""
    rules = rules_of([kind])
    tensors, forms = collate([to_tensors(results_of([kind], [prompt]), rules) for prompt in prompts])
    chosen = data.draw(st.lists(st.sampled_from(range(len(prompts))), min_size=1, max_size=4))
    found = restore({name: t[chosen] for name, t in tensors.items()}, [forms[i] for i in chosen], torch.float32)
    for path, value in leaves(results_of([kind], prompts)).items():
        assert_equal(leaves(found)[path], value[chosen] if isinstance(value, Tensor) else value)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (rows, ["rows"]),
        (padded, ["padded:1"]),
        (padded_at_the_end, ["padded:2"]),
        (padded_with_a_mask, ["padded:1", "mask:m.0.t0:1:int64"]),
        (listed, ["listed"]),
        (same, ["same"]),
        (longest, ["longest"]),
        (plain, ["plain"] * 7),
    ],
)
def test_which_rule_holds(kind: Kind, expected: list[str]):
    short, long = Prompt(1, 1), Prompt(9, 2)
    found = find_rules(*({"m": [kind(prompts)]} for prompts in ([short], [long], [short, long])))
    assert list(found.values()) == expected


def test_floating_point_numbers_come_in_the_models_precision_and_others_as_they_are():
    kinds = [rows, whole_numbers, padded_with_a_mask]
    prompts = [Prompt(2, 1), Prompt(5, 2)]
    tensors, forms = collate([to_tensors(results_of(kinds, [prompt]), rules_of(kinds)) for prompt in prompts])
    found = leaves(restore(tensors, forms, torch.bfloat16))
    assert {value.dtype for value in found.values() if isinstance(value, Tensor)} == {torch.bfloat16, torch.long}


@given(st.lists(st.sampled_from((rows, same, plain)), min_size=1, max_size=3), PROMPTS)
def test_a_pipeline_that_takes_one_prompt_at_a_time(kinds: list[Kind], prompts: list[Prompt]):
    """What the two together are cannot be seen, and prompts of one shape share a call."""
    one, other = (results_of(kinds, [Prompt(1, seed)]) for seed in (1, 2))
    rules = find_rules(one, other, None)
    tensors, forms = collate([to_tensors(results_of(kinds, [prompt]), rules) for prompt in prompts])
    assert len({signature(form) for form in forms}) == 1
    assert_equal(restore(tensors, forms, torch.float32), results_of(kinds, prompts))


def test_values_without_rows_of_which_each_prompt_has_its_own_share_no_call():
    """A table for a prompt cannot stand for another's."""

    def table(seed: int) -> dict[str, list[Any]]:
        return {"m": [(drawn(Prompt(1, seed), 1, 3), drawn(Prompt(1, seed), 4, 2))]}

    rules = find_rules(table(1), table(2), None)
    tensors, forms = collate([to_tensors(table(seed), rules) for seed in (3, 4)])
    if signature(forms[0]) == signature(forms[1]):
        both = leaves(restore(tensors, forms, torch.float32)).values()
        assert any(value.shape[:2] == (2, 4) for value in both), "the first prompt's table is taken for both"


def test_other_values_for_one_prompt_than_for_another_are_an_error():
    short, long = Prompt(1, 1), Prompt(9, 2)
    rules = find_rules(*({"m": [rows(prompts)]} for prompts in ([short], [long], [short, long])))
    with pytest.raises(RuntimeError, match=r"other values were prepared for one prompt than for another: m.0, m.0.t0"):
        to_tensors({"m": [(rows([short]),)]}, rules)
