"""BigBird attention against dense attention under the mask that its definition spells out."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from numattn import padding_mask
from numattn.core.cost import Shape, count_flops
from numattn.sparse.bigbird import BigBird, BigBirdAttention, bigbird_attention
from numattn.testing import Subject, make_qkv, reference, reference_weights

N = 50
GOLDEN = (math.sqrt(5) - 1) / 2

OPTIONS = [
    {"block_size": 4, "num_window": 3, "num_global": 2, "num_random": 3},
    {"block_size": 5, "num_window": 1, "num_global": 0, "num_random": 2},
    {"block_size": 3, "num_window": 4, "num_global": 1, "num_random": 0},
    {"block_size": 1, "num_window": 2, "num_global": 3, "num_random": 4},
    {"block_size": 16, "num_window": 2, "num_global": 9, "num_random": 1},
    {"block_size": 90, "num_window": 1, "num_global": 0, "num_random": 1},
]


def numbers(heads, num_random, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.rand(heads, num_random, generator=source, dtype=torch.float64)


def blocks_of(t, total, u, is_causal, *, num_window, num_global, num_random, **_):
    """The definition: key blocks of query block t, for one head's numbers u."""
    left = num_window - 1 if is_causal else num_window // 2
    found = {b for b in range(t - left, t - left + num_window) if 0 <= b < total}
    found |= set(range(min(num_global, total)))
    low, high = (num_global, t - left) if is_causal else (0, total)
    for number in u[:num_random].tolist():
        if high > low:
            found.add(low + math.floor((number + t * GOLDEN) % 1 * (high - low)))
    return {b for b in found if b <= t} if is_causal else found


def pattern(tokens, length, uniform, is_causal, *, block_size, num_global, **options):
    """Pairs seen, bool (Hk, length, length); `tokens` are the positions that exist."""
    total = -(-len(tokens) // block_size)
    seen = torch.zeros(len(uniform), length, length, dtype=torch.bool)
    for h, u in enumerate(uniform):
        for a, i in enumerate(tokens):
            t = a // block_size
            found = blocks_of(t, total, u, is_causal, num_global=num_global, **options)
            if t < num_global and not is_causal:
                found = set(range(total))
            for b, j in enumerate(tokens):
                seen[h, i, j] = b // block_size in found and not (is_causal and b > a)
    return seen


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("group", [1, 2])
def test_equals_dense_attention_under_the_pattern(options, is_causal, group):
    q, k, v = make_qkv(N, heads=2, group=group)
    u = numbers(2, options["num_random"])
    out = bigbird_attention(
        q, k, v, **options, uniform=u, is_causal=is_causal, enable_gqa=True, scale=0.6
    )
    mask = pattern(range(N), N, u, is_causal, **options).repeat_interleave(group, 0)
    torch.testing.assert_close(out, reference(q, k, v, attn_mask=mask, scale=0.6))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["right", "left", "holes"])
def test_blocks_are_counted_among_the_tokens_that_exist(options, is_causal, kind):
    q, k, v = make_qkv(N, heads=2)
    padding = padding_mask(torch.tensor([29, N]), side="left" if kind == "left" else "right")
    if kind == "holes":
        padding = torch.rand(2, 1, 1, N, generator=torch.Generator().manual_seed(0)) < 0.5
    u = numbers(2, options["num_random"])
    out = bigbird_attention(q, k, v, **options, uniform=u, attn_mask=padding, is_causal=is_causal)
    for b in range(2):
        exists = padding[b, 0, 0]
        mask = pattern(exists.nonzero().flatten().tolist(), N, u, is_causal, **options)
        want = reference(q[b : b + 1], k[b : b + 1], v[b : b + 1], attn_mask=mask)
        torch.testing.assert_close(out[b, :, exists], want[0, :, exists])


@pytest.mark.parametrize("is_causal", [False, True])
def test_total_variation_is_the_mass_outside(is_causal):
    q, k, _ = make_qkv(N)
    method = BigBird(4, 2, 1, 2)
    u = numbers(3, 2)
    exact = reference_weights(q, k, is_causal=is_causal)
    weights = Subject(method).weights(q, k, is_causal=is_causal, uniform=u)
    outside = ~pattern(range(N), N, u, is_causal, **method.options())
    distance = (weights - exact).abs().sum(-1) / 2
    torch.testing.assert_close(distance, (exact * outside).sum(-1), atol=1e-12, rtol=0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_sequences_shorter_than_the_pattern_are_dense(is_causal):
    for n in (1, 7, 23, 24):
        q, k, v = make_qkv(n)
        want = reference(q, k, v, is_causal=is_causal)
        for method in (BigBird(24), BigBird(8, 5, 0, 0), BigBird(8, 1, 3, 0), BigBird(8, 2, 2, 1)):
            torch.testing.assert_close(method(q, k, v, is_causal=is_causal), want)


# --- the draw -------------------------------------------------------------------------------


def lists(method, uniform, total, is_causal):
    """Lists of every query block, int (Hk, total, L)."""
    t = torch.arange(total)
    return method.pattern().lists(uniform, t, torch.tensor([[total]]), is_causal)[0]


def test_the_pattern_of_a_causal_block_does_not_depend_on_the_length():
    u = numbers(2, 3)
    long = lists(BigBird(), u, 90, True)
    for total in (1, 2, 7, 40):
        assert torch.equal(lists(BigBird(), u, total, True), long[:, :total])


@pytest.mark.parametrize("is_causal", [False, True])
def test_lists_hold_each_block_once_and_nothing_after_the_end(is_causal):
    found = lists(BigBird(num_random=9), numbers(3, 9), 12, is_causal)
    for row in found.flatten(0, 1).tolist():
        real = [b for b in row if b >= 0]
        assert len(set(real)) == len(real)
        assert row == real + [-1] * (len(row) - len(real))


def test_far_blocks_are_drawn_in_full_precision():
    u, total = numbers(2, 3), 1 << 20
    t = torch.arange(total - 50, total)
    method = BigBird(8, 1, 0, 3)
    for is_causal in (False, True):
        found = method.pattern().lists(u, t, torch.tensor([[total]]), is_causal)[0]
        for h in range(2):
            for row, block in zip(found[h].tolist(), t.tolist(), strict=True):
                want = blocks_of(block, total, u[h], is_causal, **method.options())
                assert {b for b in row if b >= 0} == want


@pytest.mark.parametrize("is_causal", [False, True])
def test_each_block_is_equally_likely(is_causal):
    """Numbers that fill [0, 1) evenly hit every eligible block equally often, up to the ends."""
    heads, total, t = 3000, 17, 14
    u = ((torch.arange(heads, dtype=torch.float64) + 0.5) / heads)[:, None]
    method = BigBird(8, 2, 3, 1)
    found = lists(method, u, total, is_causal)[:, t]
    eligible = range(3, 13) if is_causal else range(total)
    fixed = {0, 1, 2, 13, 14}
    for b in range(total):
        hits = (found == b).any(-1).sum().item()
        if b in fixed:
            assert hits == heads
        elif b in eligible:
            assert abs(hits - heads / len(eligible)) <= 1
        else:
            assert hits == 0


@pytest.mark.parametrize("is_causal", [False, True])
def test_cost_counts_the_expected_list(is_causal):
    """The mean length over many draws, within four of its standard deviations."""
    method, heads = BigBird(8, 3, 2, 4), 4000
    for total in (3, 8, 30):
        count = (lists(method, numbers(heads, 4), total, is_causal) >= 0).sum(-1).double()
        for t in range(total):
            if t < 2 and not is_causal:
                continue  # global rows are computed apart
            deviation = count[:, t].std() / heads**0.5
            expected = method._listed(t, total, is_causal)
            assert abs(count[:, t].mean() - expected) <= 4 * deviation + 1e-9


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("group", [1, 2])
def test_cost_without_random_blocks_is_what_is_counted(is_causal, group):
    q, k, v = make_qkv(64, batch=1, heads=2, group=group)
    for method in (BigBird(8, 3, 2, 0), BigBird(16, 2, 1, 0), BigBird(4, 5, 0, 0)):
        said = method.cost(Shape(1, 2 * group, 2, 64, 64, 8, 5, is_causal)).flops
        counted = count_flops(lambda m=method: m(q, k, v, is_causal=is_causal, enable_gqa=True))
        assert counted == said


def test_one_draw_serves_all_calls():
    q, k, v = make_qkv(200, heads=2)
    method = BigBird(4)
    tensors = method.fit(q, k, generator=torch.Generator().manual_seed(0))
    drawn = method(q, k, v, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(method(q, k, v, **tensors), drawn)
    module = BigBirdAttention(
        num_heads=2, head_dim=8, block_size=4, generator=torch.Generator().manual_seed(0)
    )
    torch.testing.assert_close(module(q, k, v), drawn)
    torch.testing.assert_close(module(q[:1], k[:1], v[:1]), drawn[:1])
    other = method(q, k, v, generator=torch.Generator().manual_seed(1))
    assert (other - drawn).abs().max() > 1e-3


def test_nothing_later_is_seen():
    q, k, v = make_qkv(40, batch=1, heads=1)
    method, u = BigBird(4, 2, 1, 3), numbers(1, 3)
    before = method(q, k, v, is_causal=True, uniform=u)
    for at in range(1, 40):
        moved = [x.clone() for x in (q, k, v)]
        for x in moved:
            x[:, :, at] = -50 * x[:, :, at]
        after = method(*moved, is_causal=True, uniform=u)
        torch.testing.assert_close(after[:, :, :at], before[:, :, :at], rtol=0, atol=1e-12)


# --- decoding -------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [0, 131])
def test_decoding_equals_prefill(prefix):
    q, k, v = make_qkv(300, batch=1, heads=2, group=2)
    method, u = BigBird(8), numbers(2, 3)
    want = method(q, k, v, is_causal=True, scale=0.4, enable_gqa=True, uniform=u)
    state = method.state(k[:, :, :prefix], v[:, :, :prefix], scale=0.4, enable_gqa=True, uniform=u)
    found = []
    for t in range(prefix, 300):
        state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        found.append(state.attend(q[:, :, t : t + 1]))
    torch.testing.assert_close(torch.cat(found, 2), want[:, :, prefix:])
    assert state.nbytes == method.cost(Shape(1, 4, 2, 300, 300, 8, 5, itemsize=8)).cache


class Largest(TorchDispatchMode):
    """Elements of the largest new tensor."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in given:
            self.elements = max(self.elements, out.numel())
        return out


def test_a_step_reads_no_more_than_its_list():
    for n in (1000, 4000):
        _, k, v = make_qkv(n, batch=1, heads=1)
        state = BigBird(8).state(k, v, uniform=numbers(1, 3))
        state.append(k[:, :, :1], v[:, :, :1])
        with Largest() as largest:
            state.attend(k[:, :, :1])
        assert largest.elements <= 8 * (3 + 2 + 3) * 8


# --- options --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("block_size", (0, -1, 1.5, True, None)),
        ("num_window", (0, -1, 1.5, True, None)),
        ("num_global", (-1, 1.5, True, None)),
        ("num_random", (-1, 1.5, True, None)),
    ],
)
def test_bad_options_are_refused(option, values):
    q, k, v = make_qkv(4)
    for value in values:
        options = {option: value}
        for call in (
            lambda o=options: BigBird(**o),
            lambda o=options: bigbird_attention(q, k, v, **o),
        ):
            with pytest.raises(ValueError, match=f"bigbird: {option} must be"):
                call()


def test_numbers_of_another_shape_are_refused():
    q, k, v = make_qkv(9)
    for shape in ((3, 2), (2, 3), (3,)):
        with pytest.raises(ValueError, match=r"bigbird: uniform must have shape \(3, 3\)"):
            bigbird_attention(q, k, v, uniform=torch.zeros(shape))
    with pytest.raises(TypeError, match="bigbird takes no tensor named center"):
        BigBird().state(k, v, center=k)
