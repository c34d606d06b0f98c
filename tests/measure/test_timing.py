import time

import pytest
import torch

from numattn.measure.timing import compare


def test_the_ratio_is_of_the_call_to_the_baseline():
    timing = compare(lambda: time.sleep(0.02), lambda: time.sleep(0.002), repeats=3)
    assert timing.repeats == 3
    assert timing.seconds >= 0.02
    assert timing.baseline_seconds >= 0.002
    assert timing.ratio > 1 > compare(lambda: None, lambda: time.sleep(0.01), repeats=1).ratio
    assert timing.cpu_seconds < timing.seconds  # sleeping takes no processor time


def test_calls_alternate_after_one_warm_up():
    seen = []
    compare(lambda: seen.append("a"), lambda: seen.append("b"), repeats=2)
    assert seen == ["a", "b"] * 3


def test_a_slow_warm_up_is_the_only_repetition():
    seen = []
    timing = compare(lambda: seen.append(time.sleep(0.01)), lambda: None, repeats=9, limit=0.001)
    assert timing.repeats == len(seen) == 1


def test_without_gradients():
    x = torch.ones(2, requires_grad=True)
    seen = []
    compare(lambda: seen.append((x * 2).requires_grad), lambda: None, repeats=1)
    assert seen == [False, False]


def test_repeats_must_be_positive():
    with pytest.raises(ValueError, match="repeats must be positive; got 0"):
        compare(lambda: None, lambda: None, repeats=0)
