"""The checks on arguments, message by message, and the layout that methods compute in."""

from dataclasses import replace

import pytest
import torch

from numattn.core.info import Info
from numattn.core.inputs import (
    Unsupported,
    check,
    compute_dtype,
    fold,
    one_of,
    positive,
    prepare,
    unfold,
)
from numattn.core.masks import padding_mask
from numattn.testing import make_qkv

FULL = Info(
    name="probe",
    family="sparse",
    summary="",
    paper="",
    complexity="",
    budget=None,
    approximates="softmax",
    causal="native",
    mask="full",
)
PADDING = replace(FULL, mask="padding")
Q, K, V = make_qkv(6)  # (2, 3, 6, 8), (2, 3, 6, 8), (2, 3, 6, 5)


def call(
    info=FULL, q=Q, k=K, v=V, *, attn_mask=None, is_causal=False, scale=None, enable_gqa=False
):
    return prepare(info, q, k, v, attn_mask, is_causal, scale, enable_gqa)


def keep(*shape):
    return torch.ones(shape, dtype=torch.bool)


REFUSED = {
    "no tensor": (TypeError, {"q": [1.0]}, "probe: query must be a tensor; got list"),
    "value none": (TypeError, {"v": None}, "probe: value must be a tensor; got NoneType"),
    "integers": (TypeError, {"k": K.long()}, "probe: key must be floating point; got torch.int64"),
    "dimensions": (
        ValueError,
        {"k": K[0]},
        r"probe: key must have four dimensions .*got shape \(3, 6, 8\)",
    ),
    "types": (
        ValueError,
        {"v": V.float()},
        "must share type and device; query is torch.float64 on cpu, value is torch.float32",
    ),
    "devices": (ValueError, {"k": K.to("meta")}, "share type and device.*key is .* on meta"),
    "scale tensor": (
        TypeError,
        {"scale": torch.tensor(1.0)},
        "scale must be a number or None; got Tensor",
    ),
    "scale text": (TypeError, {"scale": "1"}, "scale must be a number or None; got str"),
    "batch": (ValueError, {"q": Q[:1]}, r"must agree in batch.*\(1, 3, 6, 8\), \(2, 3, 6, 8\)"),
    "value length": (ValueError, {"v": V[:, :, :4]}, "key and value in heads and length"),
    "value heads": (ValueError, {"v": V[:, :1]}, "key and value in heads and length"),
    "head size": (ValueError, {"q": Q[..., :7]}, "must have the same head size; got 7 and 8"),
    "groups": (
        ValueError,
        {"k": K[:, :1], "v": V[:, :1]},
        "query has 3 heads and key has 1. Pass enable_gqa=True",
    ),
    "indivisible": (
        ValueError,
        {"k": K[:, :2], "v": V[:, :2], "enable_gqa": True},
        "the 3 query heads must be a multiple of the 2 key heads",
    ),
    "no key heads": (
        ValueError,
        {"k": K[:, :0], "v": V[:, :0], "enable_gqa": True},
        "must be a multiple of the 0 key heads",
    ),
    "mask no tensor": (TypeError, {"attn_mask": [True]}, "attn_mask must be a tensor; got list"),
    "mask integers": (
        TypeError,
        {"attn_mask": keep(2, 1, 1, 6).long()},
        "attn_mask must be bool or floating; got torch.int64",
    ),
    "mask device": (
        ValueError,
        {"attn_mask": keep(2, 1, 1, 6).to("meta")},
        "attn_mask is on meta, the query on cpu",
    ),
    "mask shape": (
        ValueError,
        {"attn_mask": keep(2, 1, 1, 5)},
        r"must broadcast to \(B, H, Nq, Nk\) = \(2, 3, 6, 6\); got \(2, 1, 1, 5\)",
    ),
    "mask dimensions": (
        ValueError,
        {"attn_mask": keep(1, 2, 1, 1, 6)},
        r"must broadcast to .*got \(1, 2, 1, 1, 6\)",
    ),
    "mask larger": (ValueError, {"attn_mask": keep(4, 1, 1, 6)}, r"got \(4, 1, 1, 6\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_malformed_arguments_are_refused(case):
    kind, arguments, message = REFUSED[case]
    with pytest.raises(kind, match=message) as caught:
        call(**arguments)
    assert type(caught.value) is kind
    assert str(caught.value).startswith("probe: ")


def test_what_a_method_cannot_serve_is_unsupported():
    short = {"q": Q[:, :, :4]}
    cases = (
        (replace(FULL, scaled=False), {"scale": 0.5}, "no logits to scale; call it with scale=No"),
        (replace(FULL, causal="no"), {"is_causal": True}, "no causal form.*is_causal=False"),
        (replace(FULL, cross=False), short, "needs as many queries as keys; got 4 and 6"),
        (replace(FULL, mask="none"), {"attn_mask": keep(2, 1, 1, 6)}, "remove the padded keys"),
        (PADDING, {"attn_mask": torch.zeros(2, 1, 1, 6).double()}, "no logits to add a bias"),
        (PADDING, {"attn_mask": keep(6, 6)}, r"shape \(B, 1, 1, Nk\); got \(6, 6\).*padding_mask"),
        (PADDING, {"attn_mask": keep(2, 3, 1, 6)}, r"got \(2, 3, 1, 6\)"),
    )
    for info, arguments, message in cases:
        with pytest.raises(Unsupported, match=message) as caught:
            call(info, **arguments)
        assert str(caught.value).startswith("probe")
    assert issubclass(Unsupported, NotImplementedError)


def test_causal_with_other_lengths_names_a_way_out():
    for info, way_out in (
        (FULL, r"pass an explicit attn_mask \(torch aligns top left, flash-attention bottom right"),
        (PADDING, r"use equal lengths, or decode step by step with Method\.state\.$"),
        (replace(PADDING, decode=False), r"use equal lengths\.$"),
    ):
        with pytest.raises(ValueError, match="4 queries and 6 keys is ambiguous; " + way_out):
            call(info, q=Q[:, :, :4], is_causal=True)


def test_a_malformed_mask_is_malformed_for_every_method():
    """The shape is judged before the method's capability."""
    for kind in ("none", "padding", "full"):
        with pytest.raises(ValueError, match="must broadcast"):
            call(replace(FULL, mask=kind), attn_mask=keep(2, 1, 1, 5))


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3", None])
def test_positive_refuses(value):
    with pytest.raises(ValueError, match=r"probe: budget must be a positive integer; got "):
        positive("probe", "budget", value)
    positive("probe", "budget", 1)


def test_one_of_names_the_choices():
    one_of("probe", "kind", "a", ("a", "b"))
    with pytest.raises(ValueError, match="probe: kind must be one of 'a', 'b'; got 'c'"):
        one_of("probe", "kind", "c", ("a", "b"))


# --- layout ---------------------------------------------------------------------------------


def test_types_scale_and_shape():
    assert compute_dtype(torch.float16) == compute_dtype(torch.bfloat16) == torch.float32
    assert compute_dtype(torch.float64) == torch.float64
    x = call(q=Q.bfloat16(), k=K.bfloat16(), v=V.bfloat16())
    assert (x.q.dtype, x.k.dtype, x.v.dtype) == (torch.float32,) * 3
    assert x.dtype == torch.bfloat16
    assert x.scale == 8**-0.5
    assert call(scale=2).scale == 2.0
    assert call(scale=0.0).scale == 0.0
    assert x.shape == (2, 3, 6, 5)
    assert x.restore(torch.zeros(2, 3, 6, 5)).dtype == torch.bfloat16
    assert check(FULL, Q, K, V, None, False, None, False) == 1


def test_grouped_heads_become_rows_of_their_key_head():
    q, k, v = make_qkv(5, group=3)
    x = call(q=q, k=k, v=v, enable_gqa=True)
    assert x.group == 3
    assert x.q.shape == (2, 3, 15, 8)
    for head in range(9):
        for position in range(5):
            row = x.q[:, head // 3, position * 3 + head % 3]
            assert torch.equal(row, q[:, head, position])
    assert torch.equal(unfold(fold(q, 3), 3), q)
    assert torch.equal(x.restore(x.q[..., :5]), q[..., :5])
    assert fold(q, 1) is q


def test_equal_heads_need_no_grouping():
    assert call(enable_gqa=True).group == 1


def test_masks_are_sorted_into_padding_and_the_rest():
    for mask in (keep(2, 1, 1, 6), keep(1, 6), keep(6), keep(1, 1, 1, 1)):
        x = call(attn_mask=mask)
        assert x.mask is None
        assert x.padding.shape == (mask.shape[0] if mask.dim() == 4 else 1, 1, 6)
    for mask in (keep(6, 6), keep(3, 1, 6), torch.zeros(2, 1, 1, 6).double()):
        x = call(attn_mask=mask)
        assert x.padding is None
        assert x.mask.dim() == 4
    x = call(q=Q.bfloat16(), k=K.bfloat16(), v=V.bfloat16(), attn_mask=torch.zeros(6, 6).double())
    assert x.mask.dtype == torch.float32


def test_masks_of_grouped_heads_follow_the_rows():
    q, k, v = make_qkv(5, group=2)
    source = torch.Generator().manual_seed(0)
    for shape in ((2, 6, 5, 5), (1, 6, 5, 5), (2, 6, 1, 5), (2, 1, 5, 5), (5, 1)):
        mask = torch.rand(shape, generator=source) < 0.5
        x = call(q=q, k=k, v=v, attn_mask=mask, enable_gqa=True)
        full = mask.expand(2, 6, 5, 5)
        ours = x.mask
        if ours.shape[2] == 2:  # one group of rows, the same for every position
            ours = ours.repeat(1, 1, 5, 1)
        assert torch.equal(ours.expand(2, 3, 10, 5), fold(full, 2))


def test_query_padding_follows_the_keys_where_lengths_agree():
    mask = keep(2, 1, 1, 6)
    mask[0, ..., 4:] = False
    assert call().query_padding is None
    assert torch.equal(call(attn_mask=mask).query_padding, mask[:, :, 0])
    assert call(q=Q[:, :, :4], attn_mask=mask).query_padding is None
    q, k, v = make_qkv(6, group=2)
    rows = call(q=q, k=k, v=v, attn_mask=mask, enable_gqa=True).query_padding
    assert torch.equal(rows[..., 0::2], mask[:, :, 0])
    assert torch.equal(rows[..., 1::2], mask[:, :, 0])


@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_empty_calls_give_zeros_that_carry_gradients(part):
    arguments = {
        "q": {"q": Q[:, :, :0]},
        "k": {"k": K[:, :, :0], "v": V[:, :, :0]},
        "v": {"v": V[..., :0]},
    }[part]
    leaves = {
        n: x.clone().requires_grad_() for n, x in {"q": Q, "k": K, "v": V, **arguments}.items()
    }
    x = call(**leaves)
    assert x.empty
    assert not call().empty
    out = x.nothing()
    assert out.shape == (2, 3, leaves["q"].shape[2], leaves["v"].shape[3])
    assert not out.any()
    out.sum().backward()
    assert leaves["q"].grad is not None


def test_compact_moves_padding_to_the_end_and_back():
    q, k, v = (torch.randn(2, h, 6, 3) for h in (4, 2, 2))
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1]]).bool()[:, None, None]
    x = prepare(FULL, q, k, v, mask, False, None, True)
    y, place = x.compact()
    assert torch.equal(y.k[0, :, :3], k[0][:, [1, 2, 4]])
    assert torch.equal(y.v[1], v[1])
    assert y.padding.int().tolist() == [[[1, 1, 1, 0, 0, 0]], [[1] * 6]]
    assert torch.equal(x.num_keys, torch.tensor([[3], [6]]))
    assert torch.equal(y.restore(y.q, place), q)  # rows of a group moved together
    assert torch.equal(y.q[0, 1, 2:4], q[0, 2:4, 2])  # position 2 is the second that exists


def test_compact_leaves_the_queries_of_other_sequences_alone():
    q, k = torch.randn(1, 1, 4, 3), torch.randn(1, 1, 3, 3)
    mask = torch.tensor([[[[False, True, True]]]])
    y, place = prepare(FULL, q, k, k, mask, False, None, False).compact()
    assert place is None
    assert torch.equal(y.q, q)
    assert torch.equal(y.k[0, 0, :2], k[0, 0, 1:])
    plain = prepare(FULL, q, q, q, None, False, None, False)
    assert plain.compact() == (plain, None)


def test_a_joined_batch_is_one_sequence():
    q, k, v = make_qkv(5, group=2)
    mask = padding_mask(torch.tensor([2, 5]))
    for attn_mask in (None, mask):
        x = prepare(FULL, q, k, v, attn_mask, False, None, True)
        one = x.joined()
        assert one.q.shape == (1, 3, 2 * 5 * 2, 8)
        assert one.shape == (1, 6, 10, 5)
        for mine, whole in ((one.q, x.q), (one.k, x.k), (one.v, x.v)):
            assert torch.equal(mine[0], torch.cat([whole[0], whole[1]], 1))
    assert torch.equal(one.padding[0, 0], mask.flatten())
    assert torch.equal(one.query_padding[0, 0], mask.flatten().repeat_interleave(2))
