"""What layers keep, and that every check of `testing.layers` catches a layer with a defect."""

import pytest
import torch
from torch import nn

from numattn import Unsupported, padding_mask
from numattn.core.cost import Cost
from numattn.core.layer import AttentionLayer, Cache, heads, joined, positions
from numattn.testing import layers

WIDTH = 6

# What is wrong with a layer -> the check that must say so, in these words.
DEFECTS = {
    "counts every call from zero": ("step_by_step_equals_one_call", "differ from one call"),
    "forgets all but the last call": ("step_by_step_equals_one_call", "differ from one call"),
    "sees nothing that came before": ("step_by_step_equals_one_call", "differ from one call"),
    "says one token too many": ("step_by_step_equals_one_call", "the state says 24 tokens"),
    "sees padding": ("padding_is_truncation", "padding changes outputs"),
    "counts padding": ("padding_is_truncation", "left padding changes outputs"),
    "sees padding when not causal": ("padding_is_truncation", r"is_causal=False"),
    "sees the future": ("no_causal_leak", "a later token changes earlier outputs"),
    "sees itself only": ("no_causal_leak", "an earlier token changes nothing"),
    "keeps more than it says": ("cache_has_the_size_it_says", "bytes are kept, cost says"),
    "costs more than it says": ("flops_are_counted", "operations, cost says"),
    "costs less than it says": ("flops_are_counted", "operations, cost says"),
    "counts causal calls only": ("flops_are_counted", "operations, cost says"),
    "has an idle parameter": ("gradients_reach_every_parameter", "spare has no gradient"),
    "has a parameter times zero": ("gradients_reach_every_parameter", "gradient of spare is zero"),
    "has a gradient of nan": ("gradients_reach_every_parameter", "spare is not finite"),
    "answers in float64": ("types_are_kept", "in, torch.float64 out"),
    "answers a state in float32": ("types_are_kept", "bfloat16 in, torch.float32 out"),
    "is wrong in half precision": ("types_are_kept", "bfloat16 is far from float64"),
    "takes any width": ("bad_input_is_named", "ValueError was expected"),
    "takes any mask": ("bad_input_is_named", "Unsupported was expected"),
    "takes a mask with a state": ("bad_input_is_named", "Unsupported was expected"),
    "does not say its name": ("bad_input_is_named", "does not name the layer"),
}


class Tiny(AttentionLayer):
    """One head of softmax attention whose keys know their absolute positions, with a defect."""

    def __init__(self, defect=""):
        super().__init__()
        self.embed_dim, self.defect = WIDTH, defect
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        if " parameter" in defect or "nan" in defect:
            self.spare = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden, *, attn_mask=None, is_causal=True, state=None):
        hidden, attn_mask = self._taken(hidden, attn_mask, state)
        start = 0
        if state is not None and not self.has("counts every call from zero"):
            start = state["k"].shape[2]
        seen = None if self.has("counts padding") else attn_mask
        place = positions(hidden, seen, start)[..., None] + torch.arange(WIDTH)
        q, k, v = self.qkv(hidden).chunk(3, -1)
        k = k + place.to(k).cos()
        logits, v = self._logits(q, k, v, attn_mask, is_causal, state)
        out = logits.double().softmax(-1).nan_to_num() @ v.double()
        return self._answer(out, hidden, state)

    def has(self, defect):
        return self.defect == defect

    def _taken(self, hidden, attn_mask, state):
        """The arguments after the checks, or without them."""
        if self.has("takes any width"):
            hidden = nn.functional.pad(hidden, (0, WIDTH - hidden.shape[-1]))
        if self.has("takes any mask") and attn_mask is not None and attn_mask.dim() == 2:
            attn_mask = None
        if self.has("takes a mask with a state") and state is not None:
            attn_mask = None
        try:
            self._check(hidden, attn_mask, state)
        except (ValueError, Unsupported) as error:
            if self.has("does not say its name"):
                raise type(error)("no") from None
            raise
        return hidden, attn_mask

    def _logits(self, q, k, v, attn_mask, is_causal, state):
        if state is not None:
            if self.has("forgets all but the last call"):
                state.forget()
            state.append(k=k[:, None], v=v[:, None])
            k, v = state["k"][:, 0], state["v"][:, 0]
        before = k.shape[1] - q.shape[1]
        if self.has("sees nothing that came before") and q.shape[1] == 1:
            k, v, before = k[:, -1:], v[:, -1:], 0
        logits = q @ k.mT
        if self.has("costs more than it says"):
            logits = logits + 0 * ((q @ k.mT) @ v).sum()
        blind = self.has("sees padding") or (
            self.has("sees padding when not causal") and not is_causal
        )
        if attn_mask is not None and not blind:
            logits = logits.masked_fill(~attn_mask[:, 0], -torch.inf)
        i, j = torch.meshgrid(*map(torch.arange, logits.shape[1:]), indexing="ij")
        if is_causal and not self.has("sees the future"):
            logits = logits.masked_fill(j > i + before, -torch.inf)
        if self.has("sees itself only"):
            logits = logits.masked_fill(j != i + before, -torch.inf)
        return logits, v

    def _answer(self, out, hidden, state):
        if self.has("answers in float64"):
            return out
        if self.has("answers a state in float32") and state is not None:
            return out.float() if hidden.dtype is torch.bfloat16 else out.to(hidden)
        if self.has("is wrong in half precision") and hidden.dtype is torch.bfloat16:
            out = 1.2 * out
        if self.has("has a parameter times zero"):
            out = out + 0 * self.spare
        if self.has("has a gradient of nan"):
            out = out + (self.spare - self.spare).sqrt()
        return out.to(hidden)

    def state(self, batch=1):
        empty = self.qkv.weight.new_empty((batch, 1, 0, WIDTH))
        return Keeps(self.defect, k=empty, v=empty)

    def cost(self, batch, length, *, is_causal=True):
        flops = 2 * batch * length * (3 * WIDTH * WIDTH + 2 * length * WIDTH)
        if self.has("costs less than it says") or (
            self.has("counts causal calls only") and not is_causal
        ):
            flops *= 2
        size = self.qkv.weight.element_size()
        cache = batch * length * 2 * WIDTH * size
        return Cost(flops, self._io(batch, length), cache, 2 * WIDTH)


class Keeps(Cache):
    def __init__(self, defect, **empty):
        super().__init__(**empty)
        self.defect, self._empty = defect, empty

    def forget(self):
        super().__init__(**self._empty)

    @property
    def length(self):
        return super().length + (self.defect == "says one token too many")

    @property
    def nbytes(self):
        return super().nbytes + 8 * (self.defect == "keeps more than it says")


def test_a_sound_layer_passes():
    layers.check_layer(Tiny())


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_caught(defect):
    check, words = DEFECTS[defect]
    layer = Tiny(defect).double()
    with pytest.raises(AssertionError, match=words):
        getattr(layers, check)(layer)
    with pytest.raises(AssertionError):
        layers.check_layer(Tiny(defect))


def test_checks_leave_the_layer_as_it_was():
    layer = Tiny().train()
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    layers.check_layer(layer)
    assert layer.training
    assert all(p.grad is None and p.dtype is torch.float32 for p in layer.parameters())
    assert all(torch.equal(t, before[n]) for n, t in layer.state_dict().items())


def test_every_check_has_a_defect():
    known = {n for n, f in vars(layers).items() if getattr(f, "__module__", "") == layers.__name__}
    checks = {n for n in known if not n.startswith("_")} - {"check_layer"}
    assert checks == {check for check, _ in DEFECTS.values()}


# --- Cache, and the helpers -----------------------------------------------------------------


@pytest.mark.parametrize("by_token", [False, True])
def test_cache_grows_by_tokens_in_their_order(by_token):
    pieces = [torch.randn(2, 3, n, 4) for n in (2, 0, 1, 7, 1)]
    empty = {"a": torch.zeros(2, 3, 0, 4), "b": torch.zeros(2, 1, 0, 5, dtype=torch.bfloat16)}
    cache = Cache(by_token=by_token, **empty)
    assert (cache.length, cache.nbytes) == (0, 0)
    for piece in pieces:
        cache.append(a=piece, b=piece[:, :1, :, :1].expand(-1, -1, -1, 5).bfloat16())
    assert torch.equal(cache["a"], torch.cat(pieces, 2))
    assert cache["b"].dtype is torch.bfloat16
    assert cache.length == 11
    assert cache.nbytes == 2 * 11 * (3 * 4 * 4 + 5 * 2)
    side_by_side = 4 if by_token else cache["a"].stride(0) // 3
    assert cache["a"].stride(1) == side_by_side


def test_cache_has_no_gradient_and_is_a_copy():
    cache = Cache(a=torch.zeros(1, 1, 0, 2))
    x = torch.ones(1, 1, 3, 2, requires_grad=True)
    cache.append(a=x)
    assert not cache["a"].requires_grad
    with torch.no_grad():
        x.zero_()
    assert cache["a"].sum() == 6
    with pytest.raises(KeyError):
        cache["b"]


def test_positions_count_tokens_that_exist():
    hidden = torch.zeros(2, 5, 3)
    assert positions(hidden, None, 0).tolist() == [[0, 1, 2, 3, 4]]
    assert positions(hidden, None, 7).tolist() == [[7, 8, 9, 10, 11]]
    right = padding_mask(torch.tensor([5, 2]))
    left = padding_mask(torch.tensor([5, 2]), side="left")
    assert positions(hidden, right, 0)[:, :2].tolist() == [[0, 1], [0, 1]]
    assert positions(hidden, left, 0).tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 0, 1]]


def test_heads_and_joined_are_inverse():
    x = torch.randn(2, 5, 12)
    split = heads(x, 3)
    assert split.shape == (2, 3, 5, 4)
    assert torch.equal(split[:, 1], x[..., 4:8])
    assert torch.equal(joined(split), x)
