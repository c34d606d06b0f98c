"""Usage, entropies, mutual information of responsibilities, and the pictures of them."""

import math
from collections import Counter

import pytest
import torch

from numattn.latent.routing import (
    component_usage,
    dead_components,
    normalized_mutual_information,
    plot_mutual_information,
    plot_responsibilities,
    plot_usage,
    soft_normalized_mutual_information,
    usage_entropy,
)

AVERAGES = {
    "min": min,
    "geometric": lambda a, b: math.sqrt(a * b),
    "arithmetic": lambda a, b: (a + b) / 2,
    "max": max,
}


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def gammas(*shape, seed=0):
    return torch.randn(shape, generator=source(seed), dtype=torch.float64).softmax(-1)


def labels(length, number, seed=0):
    return torch.randint(number, (length,), generator=source(seed))


def one_hot(codes, number):
    return torch.nn.functional.one_hot(codes, number).double()


def entropy(counts, total):
    return -sum(n / total * math.log(n / total) for n in counts)


def by_hand(a, b, average):
    """Mutual information from counts, over the mean of the entropies."""
    n = len(a)
    of_a, of_b, pairs = Counter(a), Counter(b), Counter(zip(a, b, strict=True))
    mutual = sum(c / n * math.log(c * n / (of_a[i] * of_b[j])) for (i, j), c in pairs.items())
    return mutual / AVERAGES[average](entropy(of_a.values(), n), entropy(of_b.values(), n))


def close(found, want, tolerance=1e-12):
    torch.testing.assert_close(found, want, rtol=0, atol=tolerance)


# --- usage ----------------------------------------------------------------------------------


def test_usage_is_the_mean_responsibility():
    gamma = gammas(2, 3, 40, 5)
    want = sum(gamma[..., n, :] for n in range(40)) / 40
    close(component_usage(gamma), want)
    close(component_usage(gamma).sum(-1), torch.ones(2, 3, dtype=torch.float64))


def test_usage_of_tokens_that_exist():
    gamma = gammas(2, 3, 40, 5)
    exists = torch.ones(2, 1, 40, dtype=torch.bool)
    exists[0, :, 13:] = False
    padded = gamma.masked_fill(~exists[..., None], torch.nan)
    usage = component_usage(padded, exists)
    close(usage[0], component_usage(gamma[0, :, :13]))
    close(usage[1], component_usage(gamma[1]))
    nothing = component_usage(padded, torch.zeros_like(exists))
    close(nothing, torch.zeros(2, 3, 5, dtype=torch.float64))


def test_usage_is_summed_in_float64():
    """In bfloat16 a sum of ones stops at 256."""
    gamma = torch.ones(3000, 1, dtype=torch.bfloat16)
    close(component_usage(gamma), torch.ones(1, dtype=torch.float64))


def test_entropies_by_hand():
    usage = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.25] * 4, [1.0, 0.0, 0.0, 0.0]]).double()
    found = usage_entropy(usage)
    close(found.nats, torch.tensor([1.5 * math.log(2), math.log(4), 0.0]).double(), 1e-7)
    close(found.relative, torch.tensor([0.75, 1.0, 0.0]).double())


def test_the_only_component_serves_its_share():
    found = usage_entropy(torch.ones(2, 1))
    assert found.nats.tolist() == [0.0, 0.0]
    assert found.relative.tolist() == [1.0, 1.0]


def test_entropy_of_usage_trains_what_is_used():
    logits = torch.zeros(10, 3, dtype=torch.float64)
    logits[:, 0], logits[:, 2] = 1.0, -torch.inf
    logits.requires_grad_()
    usage_entropy(component_usage(logits.softmax(-1))).nats.backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[:, 0] < 0).all()
    assert (logits.grad[:, 1] > 0).all()
    assert (logits.grad[:, 2] == 0).all()


def test_entropies_do_not_depend_on_the_order():
    usage = component_usage(gammas(3, 40, 6))
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    for a, b in zip(usage_entropy(usage[..., order]), usage_entropy(usage), strict=True):
        close(a, b)
    assert torch.equal(
        dead_components(usage[..., order], 0.16), dead_components(usage, 0.16)[..., order]
    )


def test_dead_components():
    usage = torch.tensor([[0.0124, 0.0126, 0.975, 0.0], [0.25] * 4])
    assert dead_components(usage).tolist() == [[True, False, False, True], [False] * 4]
    assert dead_components(usage, 0.3).tolist() == [[True, True, False, True], [True] * 4]


# --- mutual information ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("average", "want"),
    [("min", 1.0), ("geometric", 1 / math.sqrt(1.5)), ("arithmetic", 0.8), ("max", 1 / 1.5)],
)
def test_mutual_information_in_closed_form(average, want):
    """Entropies log 2 and 1.5 log 2, and the second labelling tells the first."""
    found = normalized_mutual_information([0, 0, 1, 1], [0, 0, 1, 2], average)
    assert math.isclose(found, want, rel_tol=1e-12)


@pytest.mark.parametrize("average", AVERAGES)
def test_mutual_information_from_the_definition(average):
    a = labels(200, 4, seed=1)
    b = torch.where(labels(200, 3, seed=2) > 0, a, labels(200, 7, seed=3))
    found = normalized_mutual_information(a, b, average)
    assert math.isclose(found, by_hand(a.tolist(), b.tolist(), average), rel_tol=1e-12)
    assert math.isclose(found, normalized_mutual_information(b, a, average), rel_tol=1e-12)
    assert 0 < found < 1


@pytest.mark.parametrize("average", AVERAGES)
def test_names_of_labels_do_not_matter(average):
    a = labels(300, 6)
    names = torch.tensor([40, -3, 7, 0, 1000, 2])
    words = [f"class {i}" for i in a.tolist()]
    assert math.isclose(normalized_mutual_information(a, names[a], average), 1.0)
    assert math.isclose(normalized_mutual_information(words, a.numpy(), average), 1.0)
    other = labels(300, 4, seed=5)
    found = normalized_mutual_information(names[a], other, average)
    assert math.isclose(found, normalized_mutual_information(a, other, average), rel_tol=1e-11)


@pytest.mark.parametrize("average", AVERAGES)
def test_one_cluster_tells_nothing_and_two_single_ones_agree(average):
    assert normalized_mutual_information([5, 5, 5], [1, 2, 3], average) == 0.0
    assert normalized_mutual_information([1, 2, 3], [5, 5, 5], average) == 0.0
    assert normalized_mutual_information([5, 5, 5], [1, 1, 1], average) == 1.0
    assert normalized_mutual_information([], [], average) == 1.0


def test_all_pairs_equally_often_share_nothing():
    a = torch.arange(4).repeat_interleave(6)
    b = torch.arange(6).repeat(4)
    assert normalized_mutual_information(a, b) < 1e-14


@pytest.mark.parametrize("length", [300, 30_000])
def test_independent_labels_share_only_what_chance_gives(length):
    """2 N times it follows chi^2 with (A - 1)(B - 1) degrees of freedom: mean + 4 sigma."""
    a, b = labels(length, 5, seed=1), labels(length, 4, seed=2)
    smallest = min(entropy(Counter(x.tolist()).values(), length) for x in (a, b))
    mutual = normalized_mutual_information(a, b, "min") * smallest
    assert mutual <= (12 + 4 * math.sqrt(2 * 12)) / (2 * length)


def test_averages_are_ordered():
    a, b = labels(200, 4, seed=1), labels(200, 9, seed=1)
    values = [normalized_mutual_information(a, b, average) for average in AVERAGES]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == 4


def test_labels_are_checked():
    with pytest.raises(ValueError, match=r"same length; got \(3,\) and \(2,\)"):
        normalized_mutual_information([1, 2, 3], [1, 2])
    with pytest.raises(ValueError, match="two rows"):
        normalized_mutual_information([[1, 2]], [[1, 2]])
    with pytest.raises(ValueError, match="average must be one of"):
        normalized_mutual_information([1], [1], "mean")
    with pytest.raises(ValueError, match="average must be one of"):
        soft_normalized_mutual_information(gammas(1, 2), [1], "mean")


@pytest.mark.parametrize("average", AVERAGES)
def test_one_hot_responsibilities_give_the_hard_index(average):
    a, b = labels(200, 4, seed=1), 3 * labels(200, 5, seed=2) - 4
    b = torch.where(a == 0, 0, b)
    gamma = torch.stack([one_hot(a, 6), one_hot(a.flip(0), 6)])
    found = soft_normalized_mutual_information(gamma, b, average)
    want = [normalized_mutual_information(x, b, average) for x in (a, a.flip(0))]
    close(found, torch.tensor(want, dtype=torch.float64))
    both = torch.stack([b, b.flip(0)])
    found = soft_normalized_mutual_information(gamma.requires_grad_(), both, average)
    assert not found.requires_grad
    close(found, torch.tensor([want[0]] * 2, dtype=torch.float64))


@pytest.mark.parametrize("average", AVERAGES)
def test_soft_mutual_information_from_the_definition(average):
    gamma, codes = gammas(60, 4), labels(60, 3, seed=1)
    joint = [
        [sum(gamma[n, k].item() for n in range(60) if codes[n] == c) / 60 for c in range(3)]
        for k in range(4)
    ]
    of_k = [sum(row) for row in joint]
    of_c = [sum(column) for column in zip(*joint, strict=True)]
    mutual = sum(
        joint[k][c] * math.log(joint[k][c] / (of_k[k] * of_c[c]))
        for k in range(4)
        for c in range(3)
    )
    want = mutual / AVERAGES[average](entropy(of_k, 1), entropy(of_c, 1))
    found = soft_normalized_mutual_information(gamma, codes, average).item()
    assert math.isclose(found, want, rel_tol=1e-11)


def test_a_token_shared_by_components_blurs_the_index():
    """Half of each token goes to a twin of its component: log 2 known of an entropy of log 4."""
    codes = torch.tensor([0, 1]).repeat(10)
    gamma = one_hot(codes, 2).repeat_interleave(2, dim=-1) / 2
    found = soft_normalized_mutual_information(gamma, codes, "max").item()
    assert math.isclose(found, 0.5, rel_tol=1e-12)


def test_soft_mutual_information_does_not_depend_on_order():
    gamma, codes = gammas(2, 60, 4), labels(60, 3, seed=1)
    found = soft_normalized_mutual_information(gamma, codes)
    order = torch.tensor([2, 0, 3, 1])
    close(soft_normalized_mutual_information(gamma[..., order], codes), found)
    move = torch.randperm(60, generator=source())
    close(soft_normalized_mutual_information(gamma[:, move], codes[move]), found)
    words = ["noun", "verb", "other"]
    close(soft_normalized_mutual_information(gamma, [words[c] for c in codes]), found)


def test_soft_mutual_information_of_tokens_that_exist():
    gamma, codes = gammas(2, 3, 40, 5), labels(40, 3, seed=1)
    exists = torch.ones(2, 1, 40, dtype=torch.bool)
    exists[0, :, 13:] = False
    padded = gamma.masked_fill(~exists[..., None], torch.nan)
    found = soft_normalized_mutual_information(padded, codes, exists=exists)
    close(found[0], soft_normalized_mutual_information(gamma[0, :, :13], codes[:13]))
    close(found[1], soft_normalized_mutual_information(gamma[1], codes))


@pytest.mark.parametrize("average", AVERAGES)
def test_edge_cases_of_the_soft_index(average):
    same_row = gammas(1, 4).expand(30, 4)
    codes = labels(30, 3)
    assert soft_normalized_mutual_information(same_row, codes, average).item() == 0.0
    single = torch.ones(30, 1)
    assert soft_normalized_mutual_information(single, codes, average).item() == 0.0
    assert soft_normalized_mutual_information(single, [1] * 30, average).item() == 1.0
    assert soft_normalized_mutual_information(gammas(30, 4), [1] * 30, average).item() == 0.0
    assert soft_normalized_mutual_information(torch.ones(0, 4), [], average).item() == 1.0


# --- pictures -------------------------------------------------------------------------------


@pytest.fixture
def axes():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    return figure.add_subplot()


def heights(axes):
    """What the bars show: place -> height."""
    return {round(p.get_x() + p.get_width() / 2): p.get_height() for p in axes.patches}


def test_usage_is_drawn(axes):
    usage = torch.tensor([0.5, 0.0, 0.3, 0.2, 0.0])
    assert plot_usage(usage, axes=axes) is axes
    assert heights(axes) == dict(enumerate(usage.tolist()))
    alive, dead = axes.containers
    assert [round(p.get_x() + p.get_width() / 2) for p in dead] == [1, 4]
    assert alive[0].get_facecolor() != dead[0].get_facecolor()
    equal, cross = axes.lines
    assert list(equal.get_ydata()) == [0.2, 0.2]
    assert list(cross.get_xdata()) == [1, 4]
    assert list(cross.get_ydata()) == [0, 0]
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert {"alive (3)", "dead (2)"} <= set(names)
    relative = usage_entropy(usage).relative.item()
    assert f"{relative:.2f}" in axes.get_title(loc="left")
    plot_usage(usage, threshold=0.25, axes=axes)
    assert len(axes.containers[-1]) == 3


def test_nothing_is_drawn_of_nothing(axes):
    """Empty bars would break a constrained layout, and a legend would list them."""
    plot_usage(torch.full((4,), 0.25), axes=axes)
    assert len(axes.containers) == 1
    assert len(axes.lines) == 1
    assert not any("dead" in text.get_text() for text in axes.get_legend().get_texts())


def test_responsibilities_are_drawn(axes):
    gamma = gammas(7, 3)
    names = list("abcdefg")
    assert plot_responsibilities(gamma, tokens=names, axes=axes) is axes
    (image,) = axes.images
    close(torch.from_numpy(image.get_array().data), gamma, 0)
    assert image.get_clim() == (0.0, 1.0)
    assert [t.get_text() for t in axes.get_yticklabels()] == names
    assert image.colorbar is not None


def test_mutual_information_is_drawn(axes):
    values = torch.tensor([0.25, 1.0, 0.0])
    assert plot_mutual_information(values, axes=axes) is axes
    assert heights(axes) == {0: 0.25, 1: 1.0, 2: 0.0}
    assert [t.get_text() for t in axes.texts] == ["0.25", "1.00", "0.00"]
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] >= 1


def test_pictures_make_a_figure_of_their_own(tmp_path):
    pytest.importorskip("matplotlib")
    gamma = gammas(20, 4)
    pictures = [
        plot_usage(component_usage(gamma)),
        plot_responsibilities(gamma.float().requires_grad_()),
        plot_mutual_information(torch.rand(40, generator=source())),
    ]
    for i, drawn in enumerate(pictures):
        drawn.figure.savefig(tmp_path / f"{i}.png")
        assert (tmp_path / f"{i}.png").stat().st_size > 0


def test_a_picture_is_of_one_head(axes):
    with pytest.raises(ValueError, match="usage must have shape"):
        plot_usage(torch.ones(2, 3), axes=axes)
    with pytest.raises(ValueError, match="responsibilities must have shape"):
        plot_responsibilities(torch.ones(3), axes=axes)
    with pytest.raises(ValueError, match="information must have shape"):
        plot_mutual_information(torch.ones(2, 3), axes=axes)
    with pytest.raises(ValueError, match="2 names were given for 3 tokens"):
        plot_responsibilities(torch.ones(3, 1), tokens=["a", "b"], axes=axes)
