"""Choosing the form of the engines."""

import pytest
import torch

import numattn
from numattn import Unsupported, backend, resolve, why_not


def test_auto_resolves_to_a_form_that_runs():
    assert resolve() == "torch"
    with backend("auto"):
        assert resolve() == "torch"
        assert why_not("auto") is None


def test_the_choice_ends_with_the_block_even_on_an_error():
    from numattn.engines import _chosen

    def fail():
        with backend("torch"):
            assert _chosen.get() == "torch"
            with backend("auto"):
                assert _chosen.get() == "auto"
            assert _chosen.get() == "torch"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert _chosen.get() == "auto"


def test_unknown_backends_are_refused():
    for call in (lambda: backend("cuda").__enter__(), lambda: why_not("cuda")):
        with pytest.raises(ValueError, match="one of auto, torch, triton; got 'cuda'"):
            call()


def test_asking_for_triton_runs_it_or_says_why_not():
    """Never another form in its place."""
    q, k, v = (torch.zeros(1, 1, 4, 8) for _ in range(3))
    reason = why_not("triton", numattn.get("exact"), q, k, v)
    assert reason is not None
    assert "backend('torch')" in reason
    with pytest.raises(Unsupported) as caught, backend("triton"):
        numattn.exact_attention(q, k, v)
    assert str(caught.value) == reason
    assert why_not("torch", numattn.get("exact"), q, k, v) is None
