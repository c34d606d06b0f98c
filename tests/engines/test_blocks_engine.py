"""The block and gather engines against dense float64 autograd, values and gradients."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from numattn.core.cost import count_flops
from numattn.engines import blocks
from numattn.engines.blocks import blocks_attention
from numattn.engines.gather import gather_attention, runs

F64 = torch.float64
SCALE = 0.4


def inputs(rows, keys, *, batch=2, heads=3, dim=5, width=4, seed=0):
    source = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, heads, *shape, generator=source, dtype=F64)
        for shape in ((rows, dim), (keys, dim), (keys, width))
    ]


def integers(low, high, *shape, seed=1):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def dense(q, k, v, seen, *, bias=None, added=None):
    """Masked attention by the definition: seen (B, H, rows, keys), added to the logits."""
    logits = SCALE * torch.einsum("bhid,bhjd->bhij", q, k)
    if bias is not None:
        logits = logits + bias[..., None, :]
    if added is not None:
        logits = logits + added
    logits = logits.masked_fill(~seen, -torch.inf)
    nothing = ~seen.any(-1)
    logits = logits.masked_fill(nothing[..., None], 0.0)  # logsumexp of nothing has no gradient
    lse = logits.logsumexp(-1).masked_fill(nothing, -torch.inf)
    return logits.softmax(-1).masked_fill(nothing[..., None], 0.0) @ v, lse


def agree(form, oracle, leaves):
    """Both outputs, and the gradients of a function of both, of every leaf."""
    found = []
    for call in (form, oracle):
        own = [x.clone().requires_grad_() for x in leaves]
        out, lse = call(*own)
        source = torch.Generator().manual_seed(7)
        a = torch.randn(out.shape, generator=source, dtype=F64)
        b = torch.randn(lse.shape, generator=source, dtype=F64)
        alive = lse > -torch.inf
        value = (out * a).sum() + (lse[alive] * b[alive]).sum()
        found.append((out, lse, *torch.autograd.grad(value, own)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)
    return found[0]


def listed(tiles, rows, keys, height, width, batch=2, heads=3):
    """Pairs that a list of tiles holds, by looking at each list in turn."""
    seen = torch.zeros(batch, heads, rows, keys, dtype=torch.bool)
    every = tiles.expand(batch, heads, -1, -1)
    for b in range(batch):
        for h in range(heads):
            for t in range(every.shape[2]):
                for u in every[b, h, t].tolist():
                    if u >= 0:
                        here = (
                            slice(t * height, (t + 1) * height),
                            slice(u * width, u * width + width),
                        )
                        seen[b, h][here] = True
    return seen


@pytest.mark.parametrize(
    ("rows", "keys", "height", "width"), [(24, 32, 8, 4), (21, 30, 4, 7), (3, 5, 8, 8)]
)
@pytest.mark.parametrize("shared", [False, True])
def test_listed_tiles(rows, keys, height, width, shared):
    query_tiles, key_tiles = -(-rows // height), -(-keys // width)
    lead = (1, 1) if shared else (2, 3)
    tiles = integers(-1, key_tiles, *lead, query_tiles, 3)  # holds -1 and repetitions
    seen = listed(tiles, rows, keys, height, width)
    agree(
        lambda q, k, v: blocks_attention(q, k, v, tiles, height=height, width=width, scale=SCALE),
        lambda q, k, v: dense(q, k, v, seen),
        inputs(rows, keys),
    )


def test_query_heads_with_lists_of_their_own_share_key_heads():
    rows, keys, group = 12, 20, 3
    q = torch.cat([inputs(rows, keys, seed=s)[0] for s in range(group)], 1)
    _, k, v = inputs(rows, keys)
    tiles = integers(-1, 5, 2, 9, 3, 2)
    bias = torch.randn(2, 3, keys, dtype=F64, generator=torch.Generator().manual_seed(3))
    seen = listed(tiles, rows, keys, 4, 4, heads=9)

    def expanded(q, k, v, b):
        k, v, b = (x.repeat_interleave(group, 1) for x in (k, v, b))
        return dense(q, k, v, seen, bias=b)

    agree(
        lambda q, k, v, b: blocks_attention(q, k, v, tiles, height=4, width=4, scale=SCALE, bias=b),
        expanded,
        [q, k, v, bias],
    )


def test_an_empty_list_is_the_identity():
    q, k, v = inputs(8, 8)
    tiles = torch.tensor([[0, -1], [-1, -1]])[None, None]
    out, lse = blocks_attention(q, k, v, tiles, height=4, width=4, scale=SCALE)
    assert not out[:, :, 4:].any()
    assert (lse[:, :, 4:] == -torch.inf).all()
    want, norm = dense(q, k[:, :, :4], v[:, :, :4], torch.ones(2, 3, 8, 4, dtype=torch.bool))
    torch.testing.assert_close(out[:, :, :4], want[:, :, :4])
    torch.testing.assert_close(lse[:, :, :4], norm[:, :, :4])


def test_a_tile_listed_twice_counts_once_and_a_key_gathered_twice_counts_twice():
    q, k, v = inputs(4, 12)
    tiles = torch.tensor([2, 0, 2, 2])[None, None, None]
    once = torch.tensor([0, 2])[None, None, None]
    for a, b in zip(
        blocks_attention(q, k, v, tiles, height=4, width=4, scale=SCALE),
        blocks_attention(q, k, v, once, height=4, width=4, scale=SCALE),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    count = torch.zeros(12, dtype=F64).index_add(
        0, torch.arange(12) // 4, torch.zeros(12, dtype=F64)
    )
    count[8:] = 3
    count[:4] = 1
    out, lse = gather_attention(q, k, v, tiles, scale=SCALE, page=4)
    want, norm = dense(q, k, v, (count > 0).expand(2, 3, 4, 12), added=count.clamp(min=1).log())
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, norm)


@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize(("rows", "keys", "height", "width"), [(40, 40, 8, 4), (21, 30, 4, 7)])
def test_bias_and_intervals(rows, keys, height, width, derived):
    first = integers(-2, keys, 2, 1, rows)
    last = first + integers(0, 12, 2, 1, rows, seed=2)  # some rows see nothing
    bias = torch.randn(2, 1, keys, dtype=F64, generator=torch.Generator().manual_seed(3))
    bias[:, :, 3] = -torch.inf
    j = torch.arange(keys)
    seen = (j >= first[..., None]) & (j < last[..., None]) & (bias > -torch.inf)[..., None, :]
    tiles = (
        None if derived else torch.arange(-(-keys // width)).expand(1, 1, -(-rows // height), -1)
    )
    call = {"height": height, "width": width, "scale": SCALE, "first": first, "last": last}
    finite = bias.clamp(min=-10)
    agree(
        lambda q, k, v, b: blocks_attention(
            q, k, v, tiles, bias=b.where(bias > -torch.inf, -torch.inf), **call
        ),
        lambda q, k, v, b: dense(q, k, v, seen.expand(2, 3, -1, -1), bias=b),
        [*inputs(rows, keys), finite],
    )


def test_pairs_that_are_counted_elsewhere():
    rows, keys = 24, 32
    low = integers(0, 10, 2, 3, rows, 2)
    high = low + integers(0, 6, 2, 3, rows, 2, seed=2)
    code = integers(0, 10, 2, 3, keys, 2, seed=3)
    code[:, :, :8] = -1  # tiles that every row sees whole
    tiles = torch.arange(8).expand(1, 1, 6, -1)
    hit = (code[:, :, None] >= low[:, :, :, None]) & (code[:, :, None] < high[:, :, :, None])
    agree(
        lambda q, k, v: blocks_attention(
            q, k, v, tiles, height=4, width=4, scale=SCALE, skip=(low, high, code)
        ),
        lambda q, k, v: dense(q, k, v, ~hit.any(-1)),
        inputs(rows, keys),
    )


def test_a_mask_per_entry():
    rows, keys, height, width = 12, 20, 4, 5
    tiles = torch.tensor([[3, 0], [1, -1], [2, 3]])[None, None]
    mask = integers(0, 2, 2, 3, 3, height, 2 * width).bool()
    seen = torch.zeros(2, 3, rows, keys, dtype=torch.bool)
    for t in range(3):
        for entry, u in enumerate(tiles[0, 0, t].tolist()):
            if u >= 0:
                part = mask[:, :, t, :, entry * width : (entry + 1) * width]
                seen[:, :, t * height : (t + 1) * height, u * width : (u + 1) * width] = part
    agree(
        lambda q, k, v: blocks_attention(
            q, k, v, tiles, height=height, width=width, scale=SCALE, mask=mask
        ),
        lambda q, k, v: dense(q, k, v, seen),
        inputs(rows, keys),
    )


@pytest.mark.parametrize("group", [1, 3])
def test_gathered_keys_with_log_weights(group):
    positions, keys, length = 6, 15, 5
    index = integers(-1, keys, 2, 3, positions, length)
    weight = torch.randn(
        2, 3, positions, length, dtype=F64, generator=torch.Generator().manual_seed(5)
    )

    def expanded(q, k, v, w):
        """Each entry as a key of its own."""
        logits = SCALE * torch.einsum(
            "bhpgd,bhpld->bhpgl", q.unflatten(2, (positions, group)), pick(k)
        )
        logits = (logits + w[:, :, :, None]).masked_fill((index < 0)[:, :, :, None], -torch.inf)
        out = torch.einsum("bhpgl,bhple->bhpge", logits.softmax(-1), pick(v))
        return out.flatten(2, 3), logits.logsumexp(-1).flatten(2, 3)

    def pick(x):
        where = index.clamp(min=0).flatten(2)[..., None].expand(-1, -1, -1, x.shape[3])
        return x.gather(2, where).unflatten(2, (positions, length))

    index[..., 0] = 2
    agree(
        lambda q, k, v, w: gather_attention(q, k, v, index, scale=SCALE, log_weight=w),
        expanded,
        [*inputs(positions * group, keys), weight],
    )


def test_gathered_pages_and_runs():
    start, count = torch.tensor([[[0, 3, 9]]]), torch.tensor([[[4, 0, 6]]])
    index = runs(start, count, 6)
    seen = torch.zeros(2, 3, 3, 12, dtype=torch.bool)
    seen[:, :, 0, :4] = seen[:, :, 2, 9:] = True  # the third run goes past the end of the keys
    agree(
        lambda q, k, v: gather_attention(q, k, v, index.where(index < 12, -1), scale=SCALE),
        lambda q, k, v: dense(q, k, v, seen),
        inputs(3, 12),
    )
    pages = torch.tensor([[1, -1], [0, 2], [2, 1]])[None, None]
    agree(
        lambda q, k, v: gather_attention(q, k, v, pages, scale=SCALE, page=4),
        lambda q, k, v: dense(q, k, v, listed(pages, 3, 11, 1, 4)),
        inputs(3, 11),
    )


def test_a_part_of_a_larger_cache_is_not_copied():
    q, room_k, room_v = inputs(3, 40)
    k, v = room_k[:, :, :12], room_v[:, :, :12]
    pages = torch.tensor([[1, -1], [0, 2], [2, 1]])[None, None]
    want = gather_attention(q, k.contiguous(), v.contiguous(), pages, scale=SCALE, page=4)
    for a, b in zip(gather_attention(q, k, v, pages, scale=SCALE, page=4), want, strict=True):
        torch.testing.assert_close(a, b)
    agree(
        lambda q, k, v: gather_attention(q, k[:, :, :12], v[:, :, :12], pages, scale=SCALE, page=4),
        lambda q, k, v: dense(q, k[:, :, :12], v[:, :, :12], listed(pages, 3, 12, 1, 4)),
        [q, room_k, room_v],
    )
    flat = (k.flatten(0, 1), v.flatten(0, 1))  # as the operator takes them
    index = torch.zeros(6, 3, 2, dtype=torch.int32)
    work = blocks._Work.of(q.flatten(0, 1), *flat, index, *[None] * 8, 1, 1, 12, 1.0)
    assert work.k.data_ptr() == room_k.data_ptr()


@pytest.mark.parametrize("elements", [1, 64, 1 << 20])
def test_the_answer_does_not_depend_on_the_tile_budget(elements, monkeypatch):
    q, k, v = inputs(40, 40)
    tiles = integers(-1, 10, 2, 3, 10, 4)
    want = blocks_attention(q, k, v, tiles, height=4, width=4, scale=SCALE)
    monkeypatch.setattr(blocks, "tile_elements", lambda device: elements)
    found = blocks_attention(q, k, v, tiles, height=4, width=4, scale=SCALE)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


def test_temporaries_stay_within_the_tile_budget(monkeypatch):
    """The engine's own code, run without the operator around it, which would hide it."""
    budget = 1 << 12
    monkeypatch.setattr(blocks, "tile_elements", lambda device: budget)
    q, k, v = (torch.randn(1, 512, 4) for _ in range(3))
    tiles = torch.arange(32).expand(1, 32, 32).int()
    work = blocks._Work.of(q, k, v, tiles, *[None] * 8, 16, 16, 512, 1.0)
    with Largest() as seen:
        for ids, index in work.chunks():
            work.logits(ids, index)
    assert seen.elements <= max(2 * budget, 16 * 512)  # one query tile by its list, at the least


def test_lists_are_read_not_their_room():
    """A long list of nothing costs nothing, and the count of operations says so."""
    q, k, v = inputs(32, 32)
    short = torch.tensor([[0], [1], [2], [3]])[None, None]
    padded = torch.cat([short, torch.full((1, 1, 4, 50), -1)], -1)
    counts = [
        count_flops(lambda t=t: blocks_attention(q, k, v, t, height=8, width=8, scale=SCALE))
        for t in (short, padded)
    ]
    assert counts == [2 * 2 * 3 * 32 * 8 * (5 + 4)] * 2


@pytest.mark.parametrize(("rows", "keys"), [(0, 4), (4, 0), (0, 0)])
def test_nothing_there(rows, keys):
    q, k, v = (x.requires_grad_() for x in inputs(rows, keys))
    tiles = torch.zeros(1, 1, -(-rows // 4), 1, dtype=torch.int)
    out, lse = blocks_attention(q, k, v, tiles, height=4, width=4, scale=SCALE)
    assert out.shape == (2, 3, rows, 4)
    assert not out.any()
    assert (lse == -torch.inf).all()
    out.sum().backward()


def test_large_logits_do_not_overflow():
    q, k, v = (x.float() for x in inputs(8, 16))
    tiles = torch.arange(4).expand(1, 1, 2, 4)
    out, lse = blocks_attention(1e4 * q, k, v, tiles, height=4, width=4, scale=SCALE)
    want, norm = dense(
        1e4 * q.double(), k.double(), v.double(), torch.ones(2, 3, 8, 16, dtype=torch.bool)
    )
    torch.testing.assert_close(out.double(), want, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.double(), norm, rtol=1e-5, atol=1e-2)


def test_operators_keep_their_promises():
    """Schema, fake tensors and autograd registration of the operator."""
    q, k, v = (x.flatten(0, 1).requires_grad_() for x in inputs(8, 12))
    tiles = torch.tensor([[0, 2], [1, -1]]).expand(6, 2, 2).int()
    bias = torch.zeros(6, 12, dtype=F64, requires_grad=True)
    args = (q, k, v, tiles, None, bias, *[None] * 6, 4, 4, 12, SCALE)
    torch.library.opcheck(torch.ops.numattn.blocks.default, args)
