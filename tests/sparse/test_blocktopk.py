"""Block top-k attention against its definition, and what the theory of dropped mass says of it."""

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from numattn import padding_mask
from numattn.core.cost import Shape, count_flops
from numattn.sparse import blocktopk
from numattn.sparse.blocktopk import BlockTopK, blocktopk_attention
from numattn.testing import Subject, make_qkv, reference, reference_weights

N = 27  # with blocks of 4, the last one is short

OPTIONS = [
    {"num_keys": 12},
    {"num_keys": 11, "keep_first": False},
    {"num_keys": 3},
    {"num_keys": 20, "tau": 0.6},
    {"num_keys": 28, "tau": 0.9, "keep_first": False},
    {"num_keys": 27},
]


def cut(tokens, width):
    return [tokens[a : a + width] for a in range(0, len(tokens), width)]


def filled(x, cell, width):
    """The tokens of a cell, missing ones replaced by the mean of the others."""
    return torch.stack([*x[cell], *[x[cell].mean(0)] * (width - len(cell))])


def votes(rule, q, k, rows, blocks, scale, stride, is_causal):
    """What each row of a tile gives to each of the blocks, with the row's weight."""
    if rule == "antidiagonal":
        for cell in cut(rows, stride):
            turned = filled(q, cell, stride).flip(0)
            mass = [
                sum(
                    len(c) * math.exp(scale * (turned * filled(k, c, stride)).sum() / stride)
                    for c in cut(block, stride)
                )
                for block in blocks
            ]
            yield len(cell), torch.tensor(mass, dtype=q.dtype)
        return
    for i in rows:
        if rule == "centroid":
            mass = [len(b) * math.exp(scale * (q[i] @ k[b].mean(0))) for b in blocks]
        else:
            seen = [[j for j in b if j <= i or not is_causal] for b in blocks]
            mass = [sum(math.exp(scale * (q[i] @ k[j])) for j in b) for b in seen]
        yield 1, torch.tensor(mass, dtype=q.dtype)


def chosen(mass, t, own, num_keys, block, total_keys, tau, keep_first):
    """Numbers of the blocks that tile t reads; `own` is its own block when causal."""
    first = [own] if own is not None else []
    if keep_first and 0 not in first:
        first.append(0)
    rest = sorted((b for b in range(len(mass)) if b not in first), key=lambda b: -mass[b])
    most = math.inf if total_keys <= num_keys else max(num_keys // block, 1)
    kept, reached = [], 0.0
    for b in first + rest:
        if len(kept) < most and (b in first or tau is None or reached < tau * sum(mass)):
            kept.append(b)
            reached += mass[b]
    return kept


def by_loop(
    q, k, v, *, num_keys, block_size, rule="centroid", tau=None, stride=8, keep_first=True,
    padding=None, is_causal=False,
):  # fmt: skip
    """The definition, one head and one tile at a time; zeros where a query does not exist."""
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for b, h in itertools.product(*map(range, q.shape[:2])):
        own_q, own_k, own_v = q[b, h], k[b, h // group], v[b, h // group]
        exists = range(k.shape[2])
        if padding is not None:
            exists = [j for j in exists if padding[b, 0, 0, j]]
        queries = exists if q.shape[2] == k.shape[2] else range(q.shape[2])
        # Tokens keep their numbers, which rise as their places do, so j <= i is the causal mask.
        blocks, tiles = cut(list(exists), block_size), cut(list(queries), block_size)
        for t, tile in enumerate(tiles):
            past = blocks[: t + 1] if is_causal else blocks
            voters, seen = tile, past
            if is_causal and rule != "oracle":
                voters, seen = tiles[t - 1] if t else [], blocks[:t]
            mass = torch.zeros(len(past), dtype=q.dtype)
            for weight, each in votes(rule, own_q, own_k, voters, seen, scale, stride, is_causal):
                mass[: len(seen)] += weight * each / each.sum() / len(voters)
            kept = chosen(
                mass.tolist(), t, t if is_causal else None, num_keys, block_size, len(exists),
                tau, keep_first,
            )  # fmt: skip
            for i in tile:
                keys = [j for u in kept for j in blocks[u] if j <= i or not is_causal]
                out[b, h, i] = (scale * own_k[keys] @ own_q[i]).softmax(0) @ own_v[keys]
    return out


RULES = [
    {"rule": "centroid"},
    {"rule": "antidiagonal", "stride": 2},
    {"rule": "antidiagonal", "stride": 4},
    {"rule": "oracle"},
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_equals_the_definition(rule, options, is_causal):
    q, k, v = make_qkv(N, batch=1, heads=2, group=2, seed=3)
    q = 2 * q
    call = {**rule, **options, "block_size": 4, "is_causal": is_causal}
    out = blocktopk_attention(q, k, v, **call, enable_gqa=True)
    torch.testing.assert_close(out, by_loop(q, k, v, **call))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["right", "left", "holes"])
def test_blocks_are_counted_among_the_tokens_that_exist(rule, is_causal, kind):
    q, k, v = make_qkv(N, heads=1)
    padding = padding_mask(torch.tensor([18, N]), side="left" if kind == "left" else "right")
    if kind == "holes":
        padding = torch.rand(2, 1, 1, N, generator=torch.Generator().manual_seed(0)) < 0.6
    call = {**rule, "num_keys": 8, "block_size": 4, "is_causal": is_causal}
    out = blocktopk_attention(2 * q, k, v, **call, attn_mask=padding)
    want = by_loop(2 * q, k, v, **call, padding=padding)
    exists = padding[:, 0, 0, :, None].expand(2, N, v.shape[3])[:, None]
    torch.testing.assert_close(out[exists], want[exists])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("queries", "keys"), [(13, 30), (30, 13), (1, 22)])
def test_other_lengths(rule, queries, keys):
    q, k, v = make_qkv(queries, keys=keys, batch=1, heads=2)
    padding = padding_mask(torch.tensor([keys - 3]), keys)
    for mask in (None, padding):
        call = {**rule, "num_keys": 8, "block_size": 4}
        out = blocktopk_attention(q, k, v, **call, attn_mask=mask)
        torch.testing.assert_close(out, by_loop(q, k, v, **call, padding=mask))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_strips_do_not_show(monkeypatch, rule, is_causal):
    q, k, v = make_qkv(70, group=2, batch=1, heads=2)
    call = {**rule, "num_keys": 16, "block_size": 4, "is_causal": is_causal, "enable_gqa": True}
    monkeypatch.setattr(blocktopk, "_STRIPS", 1)
    whole = blocktopk_attention(q, k, v, **call)
    monkeypatch.setattr(blocktopk, "tile_elements", lambda device: 1)
    torch.testing.assert_close(blocktopk_attention(q, k, v, **call), whole)


# --- what a causal tile may see ---------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_keys", [1, 4, 8, 16])
def test_own_block_always_and_nothing_past_it(rule, num_keys):
    q, k, _ = make_qkv(N)
    # Keys that every query loves, and first of all those at the end.
    k = q.mean(dim=(1, 2), keepdim=True) + torch.linspace(0, 40, N)[:, None] * q[:, :, -1:].sign()
    method = BlockTopK(num_keys, 4, **rule)
    weights = Subject(method).weights(q / 40, k, is_causal=True)
    kept = (weights > 0).double()
    i, j = torch.meshgrid(torch.arange(N), torch.arange(N), indexing="ij")
    assert not kept[..., j > i].any()
    own = (i // 4 == j // 4) & (j <= i)
    assert kept[..., own].all()
    if num_keys >= 8:
        assert kept[..., 0].all()
    assert kept.sum(-1).max() <= max(num_keys, 4)


@pytest.mark.parametrize("rule", RULES[:3])
@pytest.mark.parametrize("tau", [None, 0.7])
def test_no_leak_through_the_choice(rule, tau):
    """Each later token in turn, several times its size: the earlier rows stay bit for bit."""
    q, k, v = make_qkv(24, batch=1, heads=2)
    method = BlockTopK(8, 4, tau=tau, **rule)
    before = method(q, k, v, is_causal=True)
    for at in range(1, 24):
        for factor in (-30.0, 30.0):
            moved = [x.clone() for x in (q, k, v)]
            for x in moved:
                x[:, :, at] *= factor
            after = method(*moved, is_causal=True)
            torch.testing.assert_close(after[:, :, :at], before[:, :, :at], rtol=0, atol=1e-12)


def test_votes_of_the_own_tile_would_leak():
    """The oracle does so by nature: later rows of a tile take part in what earlier ones see."""
    q, k, v = make_qkv(24, batch=1, heads=2)
    method = BlockTopK(8, 4, "oracle", keep_first=False)
    before = method(q, k, v, is_causal=True)
    q[:, :, 23] = -30 * q[:, :, 23]
    after = method(q, k, v, is_causal=True)
    assert (after - before)[:, :, 20:23].abs().max() > 1e-6
    torch.testing.assert_close(after[:, :, :20], before[:, :, :20])


# --- masses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_total_variation_is_the_dropped_mass(rule, is_causal):
    q, k, _ = make_qkv(40)
    exact = reference_weights(q, k, is_causal=is_causal)
    for num_keys in (4, 12, 40):
        method = BlockTopK(num_keys, 4, **rule)
        weights = Subject(method).weights(q, k, is_causal=is_causal)
        dropped = (exact * (weights == 0)).sum(-1)
        distance = (weights - exact).abs().sum(-1) / 2
        torch.testing.assert_close(distance, dropped, atol=1e-12, rtol=0)


def dropped_by_tile(method, q, k, block, is_causal):
    """Mean softmax mass that the rows of each tile do not read, (B, H, T)."""
    exact = reference_weights(q, k, is_causal=is_causal)
    weights = Subject(method).weights(q, k, is_causal=is_causal)
    return (exact * (weights == 0)).sum(-1).unflatten(-1, (-1, block)).mean(-1)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_oracle_drops_the_least_of_all_lists(is_causal):
    """Against every list of as many blocks, with the own block on it when causal."""
    q, k, _ = make_qkv(24, batch=1)
    exact = reference_weights(q, k, is_causal=is_causal)
    masses = exact.unflatten(-1, (6, 4)).sum(-1).unflatten(2, (6, 4)).mean(3)  # (1, 3, T, U)
    for count in (1, 2, 3):
        dropped = dropped_by_tile(
            BlockTopK(4 * count, 4, "oracle", keep_first=False), q, k, 4, is_causal
        )
        for t in range(6):
            lists = [c for c in itertools.combinations(range(6), count) if t in c or not is_causal]
            best = torch.stack([1 - masses[:, :, t, list(c)].sum(-1) for c in lists]).amin(0)
            torch.testing.assert_close(dropped[:, :, t], best, atol=1e-12, rtol=0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rule", RULES[:3])
def test_no_rule_drops_less_than_the_oracle(rule, is_causal):
    q, k, _ = make_qkv(48)
    for num_keys in (12, 16, 24):
        cheap = dropped_by_tile(BlockTopK(num_keys, 4, **rule), q, k, 4, is_causal)
        best = dropped_by_tile(BlockTopK(num_keys, 4, "oracle"), q, k, 4, is_causal)
        assert (best <= cheap + 1e-12).all()
        assert best.mean() < cheap.mean()


def test_antidiagonals_of_one_token_are_the_true_masses():
    q, k, v = make_qkv(N)
    for num_keys, tau in ((8, None), (24, 0.5), (4, 0.9)):
        call = {"num_keys": num_keys, "block_size": 4, "tau": tau}
        out = blocktopk_attention(q, k, v, rule="antidiagonal", stride=1, **call)
        torch.testing.assert_close(out, blocktopk_attention(q, k, v, rule="oracle", **call))


def test_blocks_of_equal_keys_are_estimated_exactly():
    """Where the keys of a block are equal, every rule finds the true masses."""
    q, k, v = make_qkv(32)
    k = k.unflatten(2, (8, 4))[:, :, :, :1].expand(-1, -1, -1, 4, -1).flatten(2, 3)
    want = blocktopk_attention(q, k, v, num_keys=12, block_size=4, rule="oracle")
    out = blocktopk_attention(q, k, v, num_keys=12, block_size=4)
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("keep_first", [False, True])
def test_tau_keeps_the_fewest_blocks_that_reach_it(keep_first):
    q, k, _ = make_qkv(32, batch=1)
    masses = reference_weights(q, k).unflatten(-1, (8, 4)).sum(-1).unflatten(2, (8, 4)).mean(3)

    def listed(num_keys, tau):
        method = BlockTopK(num_keys, 4, "oracle", tau, keep_first=keep_first)
        weights = Subject(method).weights(q, k)
        return (weights > 0).unflatten(-1, (8, 4)).any(-1)[:, :, ::4]  # (1, 3, T, U)

    subsets = torch.tensor(list(itertools.product((0.0, 1.0), repeat=8)), dtype=masses.dtype)
    if keep_first:
        subsets = subsets[subsets[:, 0] > 0]
    reached = masses @ subsets.T
    before = torch.zeros(1, 3, 8)
    for tau in (1e-6, 0.2, 0.5, 0.8, 0.95, 0.9999):
        kept = listed(32, tau)
        assert ((masses * kept).sum(-1) >= tau).all()
        sizes = subsets.sum(-1).expand_as(reached).where(reached >= tau, torch.inf).amin(-1)
        assert torch.equal(kept.sum(-1).double(), sizes)
        assert torch.equal(listed(12, tau).sum(-1), kept.sum(-1).clamp(max=3))
        assert (kept.sum(-1) >= before).all()
        before = kept.sum(-1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_tau_of_one_is_no_limit(rule, is_causal):
    q, k, v = make_qkv(N)
    q = 40 * q  # some masses are below rounding
    call = {**rule, "block_size": 4, "is_causal": is_causal}
    whole = blocktopk_attention(q, k, v, num_keys=N, tau=1.0, **call)
    torch.testing.assert_close(whole, reference(q, k, v, is_causal=is_causal))
    few = blocktopk_attention(q, k, v, num_keys=12, tau=1, **call)
    assert torch.equal(few, blocktopk_attention(q, k, v, num_keys=12, **call))


# --- budget -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
def test_units_bound_the_keys_of_a_row(is_causal):
    for n, num_keys, block in itertools.product((1, 5, 23, 48), (1, 7, 16, 100), (None, 1, 5, 30)):
        q, k, v = make_qkv(n, batch=1, heads=1)
        method = BlockTopK(num_keys, block)
        weights = Subject(method).weights(q, k, is_causal=is_causal)
        units = method.cost(Shape(1, 1, 1, n, n, 8, n, is_causal)).units
        assert (weights > 0).sum(-1).max() <= units
        assert units <= max(num_keys, block or 1)
        if n <= num_keys:
            torch.testing.assert_close(
                method(q, k, v, is_causal=is_causal), reference(q, k, v, is_causal=is_causal)
            )


def test_of_equal_blocks_the_lower_is_read():
    q = torch.zeros(1, 1, 32, 4)
    half = Subject(BlockTopK(32, 4, tau=0.5)).weights(q, q)  # eight masses of 1/8
    assert torch.equal(half > 0, (torch.arange(32) < 16).expand(1, 1, 32, 32))
    for keep_first in (False, True):
        weights = Subject(BlockTopK(12, 4, keep_first=keep_first)).weights(q, q)
        assert torch.equal(weights > 0, (torch.arange(32) < 12).expand(1, 1, 32, 32))


def test_the_first_block_is_read_however_light():
    q, k, _ = make_qkv(32, batch=1, heads=1)
    k[:, :, :4] = -10 * q.sum(2, keepdim=True)
    q = q + q.sum(2, keepdim=True)
    for rule in RULES:
        with_first = Subject(BlockTopK(12, 4, **rule)).weights(q / 20, k)
        without = Subject(BlockTopK(12, 4, **rule, keep_first=False)).weights(q / 20, k)
        assert (with_first[..., :4] > 0).all()
        assert not without[..., :4].any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_lists_hold_only_blocks_that_may_be_read(monkeypatch, rule, is_causal):
    """What the engine is given: no room is spent on blocks that a mask would hide."""
    found = []

    def engine(q, k, v, lists, **call):
        found.append(lists)
        return q.new_zeros(*q.shape[:3], v.shape[3]), None

    monkeypatch.setattr(blocktopk, "attend_lists", engine)
    monkeypatch.setattr(blocktopk, "_STRIPS", 2)  # of several tiles each
    q, k, v = make_qkv(N, heads=1)
    mask = padding_mask(torch.tensor([18, N]))
    blocktopk_attention(
        q, k, v, num_keys=20, block_size=4, **rule, attn_mask=mask, is_causal=is_causal
    )
    (lists,) = found
    assert lists.shape == (2, 1, 7, 5)
    for b, exist in enumerate((5, 7)):
        for t, row in enumerate(lists[b, 0].tolist()):
            real = [u for u in row if u >= 0]
            assert len(set(real)) == len(real)
            assert row == real + [-1] * (5 - len(real))
            assert len(real) == min(5, t + 1 if is_causal else 5, exist)
            assert max(real) < (min(exist, t + 1) if is_causal else exist)


def test_a_causal_choice_takes_half_the_work():
    q, k, v = make_qkv(1024, batch=1, heads=1)
    method = BlockTopK(8, 8)  # the lists hold one block
    both = [count_flops(lambda c=c: method(q, k, v, is_causal=c)) for c in (False, True)]
    assert both[1] < 0.6 * both[0]


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in (out if isinstance(out, (tuple, list)) else [out])]
        self.elements = max(self.elements, *sizes)
        return out


@pytest.mark.parametrize("rule", RULES[:3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_choice_takes_linear_memory(monkeypatch, rule, is_causal):
    monkeypatch.setattr(blocktopk, "tile_elements", lambda device: 1)
    q, k, v = make_qkv(2048, batch=1, heads=1, head_dim=4, value_dim=4)
    with Largest() as largest:
        blocktopk_attention(q, k, v, num_keys=32, block_size=8, **rule, is_causal=is_causal)
    assert largest.elements <= 2 * 4 * 2048 * (16 if rule["rule"] == "antidiagonal" else 8)


# --- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_keys": 1.5}, "num_keys must be a positive integer"),
        ({"block_size": 0}, "block_size must be a positive integer"),
        ({"rule": "mean"}, "rule must be one of"),
        ({"tau": 0}, "tau must be"),
        ({"tau": 1.5}, "tau must be"),
        ({"tau": True}, "tau must be"),
        ({"tau": math.nan}, "tau must be"),
        ({"stride": 8}, "stride is for rule='antidiagonal'"),
        ({"rule": "antidiagonal", "stride": 0}, "stride must be a positive integer"),
        ({"rule": "antidiagonal", "block_size": 60}, "block_size must be a multiple of stride"),
        ({"rule": "antidiagonal", "num_keys": 40}, "block_size must be a multiple of stride"),
        ({"keep_first": 1}, "keep_first must be True or False"),
    ],
)
def test_bad_options_are_refused(options, message):
    q, k, v = make_qkv(4)
    for call in (lambda: BlockTopK(**options), lambda: blocktopk_attention(q, k, v, **options)):
        with pytest.raises(ValueError, match=f"blocktopk: {message}"):
            call()
