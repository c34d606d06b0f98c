"""The linear transformer against its definition, written out densely in float64."""

import pytest
import torch

from numattn import Unsupported, padding_mask
from numattn.engines.linear import CHUNK
from numattn.kernel import Linear, linear_attention
from numattn.testing import checks_for, make_qkv, run
from numattn.testing.inputs import TOLERANCE

PHI = {
    "elu": lambda x: torch.where(x > 0, x + 1, x.clamp(max=0).exp()),
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "squared_relu": lambda x: torch.where(x > 0, x * x, 0.0),
    "softmax": lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
    "identity": lambda x: x,
}


def matrix(phi, q, k, *, keep=None, is_causal=False):
    """Dense kernel matrix, heads expanded."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    weight = torch.einsum("bhid,bhjd->bhij", phi(q.double()), phi(k.double()))
    if keep is not None:
        weight = weight * keep
    return weight.tril() if is_causal else weight


def by_definition(q, k, v, *, feature_map="elu", keep=None, is_causal=False):
    """The rows of the dense kernel matrix, divided by their sums."""
    weight = matrix(PHI[feature_map], q, k, keep=keep, is_causal=is_causal)
    v = v.double().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    total = weight.sum(-1, keepdim=True)
    return weight @ v / total.where(total != 0, 1.0)


def assert_defined(out, q, k, v, feature_map, *, keep=None, is_causal=False):
    """Equal to 1e-12 times what rounding is magnified by where weights of both signs cancel."""
    want = by_definition(q, k, v, feature_map=feature_map, keep=keep, is_causal=is_causal)
    weight = matrix(PHI[feature_map], q, k, keep=keep, is_causal=is_causal)
    size = matrix(lambda x: PHI[feature_map](x).abs(), q, k, keep=keep, is_causal=is_causal)
    total = weight.sum(-1).abs()
    gain = size.sum(-1) / total.where(total > 0, 1.0)
    error = (out - want).abs().amax(-1) / v.abs().max()
    assert (error <= 1e-12 * gain.clamp(min=1).square()).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [1, 5, CHUNK, 2 * CHUNK + 37])
def test_whole_and_causal_forms_are_the_definition(length, is_causal):
    q, k, v = make_qkv(length, group=2)
    out = linear_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(out, by_definition(q, k, v, is_causal=is_causal), rtol=0, atol=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_is_a_weight_of_zero(is_causal, side):
    q, k, v = make_qkv(CHUNK + 20, group=2)
    keep = padding_mask(torch.tensor([11, CHUNK + 20]), side=side)
    out = linear_attention(q, k, v, attn_mask=keep, is_causal=is_causal, enable_gqa=True)
    want = by_definition(q, k, v, keep=keep, is_causal=is_causal)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


def test_one_step_at_a_time_is_the_causal_form():
    q, k, v = make_qkv(CHUNK + 9, group=2)
    want = by_definition(q, k, v, is_causal=True)
    state = Linear().state(k[:, :, :3], v[:, :, :3], enable_gqa=True)
    for t in range(3, CHUNK + 9):
        state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        out = state.attend(q[:, :, t : t + 1])
        torch.testing.assert_close(out, want[:, :, t : t + 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_are_those_of_the_definition(is_causal):
    q, k, v = make_qkv(CHUNK + 9, group=2)
    weight = torch.randn(v.repeat(1, 2, 1, 1).shape, dtype=v.dtype)
    ours, theirs = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    (linear_attention(*ours, is_causal=is_causal, enable_gqa=True) * weight).sum().backward()
    (by_definition(*theirs, is_causal=is_causal) * weight).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


def test_slope_of_the_feature_map_is_one_at_zero():
    """At x = 0 both branches meet; torch's own elu gives the slope."""
    q, k, v = make_qkv(6, batch=1, heads=1)
    grads = []
    for feature in (None, torch.nn.functional.elu):
        zero = torch.zeros_like(q).requires_grad_()
        if feature is None:
            out = linear_attention(zero, k, v)
        else:
            weight = (feature(zero) + 1) @ (feature(k) + 1).mT
            out = weight @ v / weight.sum(-1, keepdim=True)
        grads.append(torch.autograd.grad(out.square().sum(), zero)[0])
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_very_negative_inputs_keep_their_digits_in_float32(is_causal):
    """elu(x) + 1 is zero below x = -17 in float32; the features themselves are not."""
    q, k, v = make_qkv(20, dtype=torch.float32)
    q, k = q - 30, k - 30
    out = linear_attention(q, k, v, is_causal=is_causal)
    assert not (torch.nn.functional.elu(q) + 1).any()
    # exp carries the rounding of its argument, about 40 * 2**-24 here
    torch.testing.assert_close(
        out.double(), by_definition(q, k, v, is_causal=is_causal), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_denominator_has_no_epsilon(is_causal):
    q, k, v = make_qkv(20)
    ones = linear_attention(q - 40, k - 40, torch.ones_like(v), is_causal=is_causal)
    torch.testing.assert_close(ones, torch.ones_like(ones), rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_row_whose_products_all_underflow_is_zero(is_causal):
    q, k, v = make_qkv(20)
    q = q.clone()
    q[:, :, 7] = -1e4
    out = linear_attention(q, k, v, is_causal=is_causal)
    assert not out[:, :, 7].any()
    assert (out[:, :, 8:] != 0).all()


def test_rank_is_at_most_the_head_size_and_weights_are_positive():
    q, k, _ = make_qkv(40)
    eye = torch.eye(40, dtype=q.dtype).expand(2, 3, -1, -1)
    weights = linear_attention(q, k, eye)
    assert (weights > 0).all()
    assert (torch.linalg.matrix_rank(weights) <= 8).all()


def test_order_of_the_keys_does_not_matter():
    q, k, v = make_qkv(40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    shuffled = linear_attention(q, k[:, :, order], v[:, :, order])
    torch.testing.assert_close(shuffled, linear_attention(q, k, v), rtol=0, atol=1e-12)


def test_it_is_its_own_target_and_has_nothing_to_scale():
    q, k, v = make_qkv(4)
    assert Linear().exact_at(1000) is None
    with pytest.raises(Unsupported, match="scale=None"):
        Linear().state(k, v, scale=0.5)
    with pytest.raises(TypeError, match="linear takes no tensor named projection"):
        Linear().state(k, v, projection=q)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("feature_map", PHI)
class TestFeatureMaps:
    def test_it_is_the_definition(self, feature_map, is_causal):
        for length in (1, 5, 2 * CHUNK + 37):
            q, k, v = make_qkv(length, group=2)
            out = linear_attention(
                q, k, v, feature_map=feature_map, is_causal=is_causal, enable_gqa=True
            )
            assert_defined(out, q, k, v, feature_map, is_causal=is_causal)

    def test_padding_is_a_weight_of_zero(self, feature_map, is_causal):
        q, k, v = make_qkv(CHUNK + 20, group=2)
        for side in ("left", "right"):
            keep = padding_mask(torch.tensor([11, CHUNK + 20]), side=side)
            out = linear_attention(
                q,
                k,
                v,
                feature_map=feature_map,
                attn_mask=keep,
                is_causal=is_causal,
                enable_gqa=True,
            )
            assert_defined(out, q, k, v, feature_map, keep=keep, is_causal=is_causal)

    def test_gradients_are_those_of_the_definition(self, feature_map, is_causal):
        q, k, v = make_qkv(CHUNK + 9, group=2)
        q, k = q + 1, k + 1  # sums of q . k are then far from zero
        weight = torch.randn(v.repeat(1, 2, 1, 1).shape, dtype=v.dtype)
        found = []
        for form in (linear_attention, by_definition):
            known = {"enable_gqa": True} if form is linear_attention else {}
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = form(*leaves, feature_map=feature_map, is_causal=is_causal, **known)
            found.append(torch.autograd.grad((out * weight).sum(), leaves))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("feature_map", PHI)
def test_two_thousand_steps_are_the_causal_form(feature_map, dtype):
    length, method = 2000, Linear(feature_map)
    q, k, v = make_qkv(length, batch=1, heads=1, group=2)
    q, k = q + 1, k + 1  # sums of q . k are then far from zero
    q, k, v = (x.to(dtype) for x in (q, k, v))
    want = method(q, k, v, is_causal=True, enable_gqa=True)
    state = method.state(k[:, :, :0], v[:, :, :0], enable_gqa=True)
    kept = state.nbytes
    for t in range(length):
        state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        if t % 100 == 99:
            out = state.attend(q[:, :, t : t + 1])
            torch.testing.assert_close(
                out, want[:, :, t : t + 1], rtol=0, atol=TOLERANCE[dtype] * v.abs().max().item()
            )
    assert state.nbytes == kept


# What is in the contract and not in the nature of the map. Rows without weight do not sum to one
# and are not the mean of the values, and their first row is not the first value.
SUMS = {"normalised", "first_row_attends_to_itself", "equal_keys_give_the_mean"}
BY_NATURE = {
    "relu": SUMS,
    "squared_relu": SUMS,
    "softmax": set(),
    # where q . k of both signs cancel, rounding is magnified without bound
    "identity": {"single_precision", "half_precision"},
}


@pytest.mark.parametrize(
    ("feature_map", "name"),
    [(m, n) for m in BY_NATURE for n in checks_for(Linear(m)) if n not in BY_NATURE[m]],
)
def test_contract_with_other_feature_maps(feature_map, name):
    run(name, Linear(feature_map))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("feature_map", ["relu", "squared_relu"])
def test_a_rectified_row_without_weight_is_zero(feature_map, is_causal):
    q, k, v = make_qkv(20)
    q = q.clone()
    q[:, :, 7] = -q[:, :, 7].abs()  # has no positive entry
    k = k.clone()
    q[:, :, 9] = -torch.ones(8)
    q[:, :, 9, 2] = 1.0
    k[..., 2] = -1.0  # no key has an entry in common with row 9
    k[..., 0], q[:, :, 10:, 0] = 1.0, 1.0
    out = linear_attention(q, k, v, feature_map=feature_map, is_causal=is_causal)
    assert not out[:, :, 7].any()
    assert not out[:, :, 9].any()
    assert (out[:, :, 10:] != 0).all()


def test_signed_weights_leave_the_range_of_the_values():
    """Weights -1 and 2 sum to one; -2 and 1 sum to minus one; 1 and -1 to nothing."""
    q = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64).reshape(1, 1, 3, 1).expand(1, 1, 3, 2)
    k = torch.tensor([[-1.0, 0.0], [2.0, 0.0]], dtype=torch.float64)[None, None]
    v = torch.tensor([1.0, 4.0], dtype=torch.float64).reshape(1, 1, 2, 1)
    out = linear_attention(q, k, v, feature_map="identity").flatten()
    torch.testing.assert_close(out, torch.tensor([7.0, 7.0, 0.0], dtype=torch.float64))
    k = torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)[None, None]
    whole = linear_attention(q, k, v, feature_map="identity").flatten()
    torch.testing.assert_close(whole, torch.tensor([3.0, -3.0, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("is_causal", [False, True])
def test_softmax_features_do_not_underflow(is_causal):
    """Entries a thousand apart: products of the features are 0 in float64, the rows are not."""
    q, k, v = make_qkv(20)
    q[:, :, 5, 0] += 5
    k[..., 0] -= 5  # the largest feature of row 5 is the smallest of every key
    q, k = 1000 * q, 1000 * k
    logits = (q.log_softmax(-1)[..., :, None, :] + k.log_softmax(-1)[..., None, :, :]).logsumexp(-1)
    if is_causal:
        logits = logits.masked_fill(~torch.ones(20, 20, dtype=torch.bool).tril(), -torch.inf)
    assert not logits[:, :, 5].exp().any()
    out = linear_attention(q, k, v, feature_map="softmax", is_causal=is_causal)
    torch.testing.assert_close(out, logits.softmax(-1) @ v, rtol=0, atol=1e-12)


def test_a_feature_map_that_does_not_exist_is_refused():
    q, k, v = make_qkv(4)
    for call in (lambda: Linear("exp"), lambda: linear_attention(q, k, v, feature_map="exp")):
        with pytest.raises(ValueError, match=r"linear: feature_map must be one of .*'exp'"):
            call()
