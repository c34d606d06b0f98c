"""Gradients of Gaussian-mixture attention: closed forms, in memory that no N x K tensor takes."""

import itertools

import pytest
import torch

from numattn import padding_mask
from numattn.latent import GMAAttention, gma_attention
from numattn.testing import make_qkv

NAMES = ("means", "log_var", "log_prior")


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixture(components=6, heads=3, dim=8, seed=5, prefix=""):
    shape = (heads, components)
    return {
        f"{prefix}means": draw(*shape, dim, seed=seed),
        f"{prefix}log_var": 0.5 * draw(*shape, dim, seed=seed + 1) + 1,
        f"{prefix}log_prior": draw(*shape, seed=seed + 2),
    }


def log_density(x, means, log_var, log_prior):
    """Logarithm of prior times Gaussian, without the constant: (B, H, N, D) -> (B, H, N, K)."""
    away = (x[..., None, :] - means[:, None]).square() / log_var.exp()[:, None]
    return log_prior[:, None] - (away + log_var[:, None]).sum(-1) / 2


def definition(q, k, v, tensors, causal=False, mask=None, temperature=1.0, epsilon=0.0):
    """The ratio of sums, dense."""
    group = q.shape[1] // k.shape[1]
    tau = temperature * tensors["log_temperature"].exp()[:, None, None]
    of_keys = [tensors[name] for name in NAMES]
    of_queries = [tensors.get(f"query_{name}", tensors[name]) for name in NAMES]
    wide, tau_q = (
        [t.repeat_interleave(group, dim=0) for t in of_queries],
        tau.repeat_interleave(group, dim=0),
    )
    gamma_q = (log_density(q, *wide) / tau_q).softmax(-1)
    gamma_k = (log_density(k, *of_keys) / tau).softmax(-1).repeat_interleave(group, dim=1)
    weights = gamma_q @ gamma_k.mT
    if causal:
        weights = weights.tril()
    if mask is not None:
        weights = weights * mask
    total = weights.sum(-1, keepdim=True) + epsilon
    return weights @ v.repeat_interleave(group, dim=1) / torch.where(total > 0, total, 1.0)


def compare(ours, theirs, tolerance=1e-12):
    for found, expected in zip(ours, theirs, strict=True):
        assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("side", [None, "right", "left"])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_they_are_those_of_the_dense_definition(causal, group, side):
    """To 1e-12, with respect to tokens, values, mixtures and temperature."""
    q, k, v = make_qkv(140, group=group)
    mask = None if side is None else padding_mask(torch.tensor([90, 140]), side=side)
    for shared, (temperature, epsilon) in itertools.product(
        (True, False), ((1.0, 0.0), (3.0, 0.2))
    ):
        tensors = mixture() | {"log_temperature": 0.3 * draw(3, seed=30)}
        if not shared:
            tensors |= mixture(seed=20, prefix="query_")
        leaves = [t.requires_grad_() for t in (q, k, v, *tensors.values())]
        options = {"temperature": temperature, "epsilon": epsilon}
        out = gma_attention(
            q,
            k,
            v,
            num_components=6,
            **tensors,
            **options,
            attn_mask=mask,
            is_causal=causal,
            enable_gqa=True,
        )
        want = definition(q, k, v, tensors, causal, mask, **options)
        g = draw(*out.shape, seed=3)
        compare(torch.autograd.grad(out, leaves, g), torch.autograd.grad(want, leaves, g))


def test_they_are_the_closed_forms():
    """With g = dL/do, W = gamma_q / D, S = W^T g: the chain of the definition, by hand."""
    q, k, v = (x[0, 0] for x in make_qkv(30))
    tensors = {n: t[0] for n, t in mixture(heads=1).items()}
    tau = 1.7
    leaves = [x.clone().requires_grad_() for x in (q, k, v, *tensors.values())]
    given = {n: t[None] for n, t in zip(NAMES, leaves[3:], strict=True)}
    tokens = (x[None, None] for x in leaves[:3])
    out = gma_attention(*tokens, num_components=6, temperature=tau, **given)[0, 0]
    g = draw(*out.shape, seed=3)

    means, log_var, log_prior = (t[None] for t in tensors.values())
    gamma_q, gamma_k = (
        (log_density(x[None, None], means, log_var, log_prior)[0, 0] / tau).softmax(-1)
        for x in (q, k)
    )
    z, slots = gamma_k.sum(0), gamma_k.T @ v
    d = gamma_q @ z
    o = gamma_q @ slots / d[:, None]
    go = (g * o).sum(-1)
    w = gamma_q / d[:, None]
    hq = (g @ slots.T - go[:, None] * z) / d[:, None]  # dL / dgamma_q
    hk = v @ (w.T @ g).T - w.T @ go  # dL / dgamma_k

    def through(x, gamma, h):
        dl = gamma * (h - (gamma * h).sum(-1, keepdim=True)) / tau
        step = (x[:, None] - tensors["means"]) / tensors["log_var"].exp()  # (N, K, D)
        curve = ((x[:, None] - tensors["means"]) * step - 1) / 2  # by the log variance
        dx = -torch.einsum("nk,nkd->nd", dl, step)
        of_means, of_var = (torch.einsum("nk,nkd->kd", dl, t) for t in (step, curve))
        return dx, of_means, of_var, dl.sum(0)

    dq, *of_q = through(q, gamma_q, hq)
    dk, *of_k = through(k, gamma_k, hk)
    want = [dq, dk, gamma_k @ (w.T @ g), *(a + b for a, b in zip(of_q, of_k, strict=True))]
    compare(torch.autograd.grad(out, leaves, g), want)


@pytest.mark.parametrize("causal", [False, True])
def test_they_reach_a_mixture_when_tokens_need_none(causal):
    q, k, v = make_qkv(20, batch=1, heads=2, head_dim=3)
    tensors = mixture(components=3, heads=2, dim=3) | {"log_temperature": draw(2)}
    inputs = tuple(t.requires_grad_() for t in tensors.values())

    def call(*given):
        named = dict(zip(tensors, given, strict=True))
        return gma_attention(q, k, v, num_components=3, is_causal=causal, **named)

    assert torch.autograd.gradcheck(call, inputs, atol=1e-7)


@pytest.mark.parametrize("causal", [False, True])
def test_a_component_of_prior_zero_has_none(causal):
    """And takes none from the others, nor from the temperature."""
    q, k, v = make_qkv(140)
    tensors = mixture() | {"log_temperature": 0.3 * draw(3, seed=30)}
    leaves = [t.requires_grad_() for t in tensors.values()]
    removed = torch.zeros(6, dtype=torch.bool).index_fill(0, torch.tensor([2]), True)
    prior = tensors["log_prior"].masked_fill(removed, -torch.inf)
    fewer = {n: t if t.dim() == 1 else t[:, ~removed] for n, t in tensors.items()}
    call = {"is_causal": causal, "epsilon": 0.1}
    out = gma_attention(q, k, v, num_components=6, **(tensors | {"log_prior": prior}), **call)
    without = gma_attention(q, k, v, num_components=5, **fewer, **call)
    ours, theirs = (torch.autograd.grad(o.square().sum(), leaves) for o in (out, without))
    compare(ours, theirs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("needs", ["tokens", "mixture", "both"])
def test_no_tensor_of_tokens_by_components_is_kept(needs, causal):
    """What a call keeps for backward is linear in N, by tokens and not by components."""
    components, kept = 512, {}
    module = GMAAttention(num_heads=2, head_dim=4, num_components=components)
    module.requires_grad_(needs != "tokens")

    def hook(t):
        storage = t.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() // t.element_size()
        return t

    sizes = []
    for length in (512, 1024):
        kept.clear()
        q, k, v = make_qkv(length, batch=1, heads=2, head_dim=4, dtype=torch.float32)
        if needs != "mixture":
            q.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(hook, lambda t: t):
            module(q, k, v, is_causal=causal).sum().backward()
        sizes.append(sum(kept.values()))
    # q, k, v, the output and log sums; causal, slots that take no more.
    tokens = 512 * 2 * (4 + 4 + 5 + 5 + 1)
    assert sizes[1] - sizes[0] <= tokens * (2 if causal else 1) < 512 * 2 * components
