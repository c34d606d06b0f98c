"""The registry refuses records that disagree with their functions; lookups that miss advise."""

from dataclasses import dataclass, replace

import pytest
import torch

import numattn
from numattn import Info, Method, Unsupported, register
from numattn.core import registry

INFO = Info(
    name="throwaway",
    family="sparse",
    summary="for this test only",
    paper="",
    complexity="N",
    budget="size",
    approximates="softmax",
    causal="no",
    mask="none",
)


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))


def throwaway_attention(
    query,
    key,
    value,
    *,
    size=4,
    kind="a",
    attn_mask=None,
    is_causal=False,
    scale=None,
    enable_gqa=False,
):
    return value * size


def record(attention=throwaway_attention, described=INFO, default=4, extra=False):
    """A record of options (size, kind) for a function."""

    @dataclass(frozen=True)
    class Throwaway(Method):
        size: int = default
        kind: str = "a"
        if extra:
            depth: int = 1
        info = described
        function = staticmethod(attention)

    return Throwaway


def without(name):
    """The function without one of its keywords."""
    keywords = ["size=4", "kind='a'", "attn_mask=None", "is_causal=False", "scale=None"]
    kept = [k for k in [*keywords, "enable_gqa=False"] if not k.startswith(name)]
    scope = {}
    exec(f"def throwaway_attention(query, key, value, *, {', '.join(kept)}): ...", scope)
    return scope["throwaway_attention"]


def test_a_record_that_agrees_is_entered_and_usable():
    entered = register(record())
    assert entered in numattn.methods()
    method = numattn.get("throwaway", size=7)
    assert (method.size, method.kind) == (7, "a")
    assert method.to_dict() == {"name": "throwaway", "size": 7, "kind": "a"}
    assert numattn.get(**method.to_dict()) == method
    assert method.with_budget(2) == entered(size=2)
    x = torch.ones(1, 1, 2, 2)
    assert torch.equal(method(x, x, x), 7 * x)
    with pytest.raises(ValueError, match="throwaway draws nothing"):
        method(x, x, x, generator=torch.Generator())


def test_what_a_bare_record_lacks_says_so():
    method = register(record(described=replace(INFO, budget=None)))()
    x = torch.ones(1, 1, 2, 2)
    shape = numattn.core.cost.Shape(1, 1, 1, 2, 2, 2, 2)
    for missing, message in (
        (lambda: method.with_budget(3), "no budget"),
        (lambda: method.cost(shape), "does not say what it costs"),
        (lambda: method.module(num_heads=1, head_dim=2), "keeps no tensors"),
        (lambda: method.state(x, x), "cannot decode"),
    ):
        with pytest.raises(Unsupported, match=f"throwaway .*{message}"):
            missing()
    assert method.exact_at(5) is None
    assert method.fit(x, x, x) == {}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda: record(default=5), "throwaway: the record has .*'size': 5.*function .*'size': 4"),
        (lambda: record(extra=True), "the record has .*'depth': 1"),
        (lambda: record(without("kind")), "the record has .*'kind'"),
        (lambda: record(without("size")), "the record has .*'size'"),
        (lambda: record(without("scale")), "throwaway: the function lacks scale"),
        (lambda: record(without("attn_mask")), "throwaway: the function lacks attn_mask"),
        (lambda: record(without("enable_gqa")), "throwaway: the function lacks enable_gqa"),
        (lambda: record(described=replace(INFO, random=True)), "Info.random must say"),
        (
            lambda: record(described=replace(INFO, state_tensors=("basis",))),
            "state tensor basis must be a keyword, default None",
        ),
        (
            lambda: record(described=replace(INFO, state_tensors=("kind",))),
            "state tensor kind must be a keyword, default None",
        ),
        (
            lambda: record(described=replace(INFO, budget="width")),
            "budget 'width' is not an option",
        ),
        (lambda: record(described=replace(INFO, name="exact")), "'exact' is registered already"),
    ],
)
def test_drift_between_record_function_and_info_is_refused(broken, message):
    before = numattn.methods()
    with pytest.raises(ValueError, match=message):
        register(broken())
    assert numattn.methods() == before


def test_a_generator_without_random_is_refused():
    def throwaway_attention(
        query,
        key,
        value,
        *,
        size=4,
        kind="a",
        attn_mask=None,
        is_causal=False,
        scale=None,
        enable_gqa=False,
        generator=None,
    ): ...

    with pytest.raises(ValueError, match=r"Info.random must say"):
        register(record(throwaway_attention))
    register(record(throwaway_attention, replace(INFO, random=True)))


def test_names_are_taken_once():
    register(record())
    with pytest.raises(ValueError, match="'throwaway' is registered already"):
        register(record())


def test_unknown_names_and_options_suggest_the_nearest():
    register(record())
    with pytest.raises(KeyError, match=r"'thrownaway'. Did you mean 'throwaway'\?.*numattn list"):
        numattn.get("thrownaway")
    with pytest.raises(KeyError) as caught:
        numattn.get("qqqq")
    assert "Did you mean" not in str(caught.value)
    with pytest.raises(TypeError, match=r"no option 'sizes'. Did you mean 'size'\?.*size, kind"):
        numattn.get("throwaway", sizes=3)
    with pytest.raises(TypeError, match=r"exact has no option 'size'. It has: none"):
        numattn.get("exact", size=3)


def test_methods_are_ordered_by_family_and_name():
    register(record())
    families = list(registry.FAMILIES)
    keys = [(families.index(m.info.family), m.info.name) for m in numattn.methods()]
    assert keys == sorted(keys)
    assert keys[0][0] == families.index("exact")
