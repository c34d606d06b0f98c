"""Methods that exist for tests only; they are not registered."""

from dataclasses import dataclass, replace

import numattn
from numattn import Info, Method, Unsupported
from numattn.core.cost import Cost, visible_pairs

INFO = Info(
    name="fake",
    family="sparse",
    summary="exact attention, made wrong by one part in `parts`",
    paper="",
    complexity="",
    budget="parts",
    approximates="softmax",
    causal="native",
    mask="full",
)


def fake_attention(query, key, value, *, parts=4, generator=None, **call):
    out = numattn.exact_attention(query, key, value, **call)
    noise = 0 if generator is None else 1e-3 * float(generator.initial_seed())
    return out * (1 + 1 / parts + noise)


@dataclass(frozen=True)
class Fake(Method):
    parts: int = 4
    info = INFO
    function = staticmethod(fake_attention)

    def cost(self, shape):
        return Cost(2 * visible_pairs(shape) * 2 * shape.head_dim, 0, None, units=self.parts)


@dataclass(frozen=True)
class FakeRandom(Fake):
    info = replace(INFO, name="fake-random", random=True)


@dataclass(frozen=True)
class FakeTrained(Fake):
    info = replace(INFO, name="fake-trained", needs="training")


def _refuses(query, key, value, *, parts=4, **call):
    raise Unsupported("fake-refusing takes no such input; pass another.")


def _fails(query, key, value, *, parts=4, **call):
    raise RuntimeError("the roof is on fire")


@dataclass(frozen=True)
class FakeRefusing(Fake):
    info = replace(INFO, name="fake-refusing")
    function = staticmethod(_refuses)


@dataclass(frozen=True)
class FakeFailing(Fake):
    info = replace(INFO, name="fake-failing")
    function = staticmethod(_fails)
