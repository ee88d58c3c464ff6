"""The structured first layer: formulas, draws, accuracy, the one-line adoption, refusals."""

import math

import pytest
import torch
from torch import nn

from common import (
    KINDS,
    MLP,
    Dense,
    FirstLayer,
    ModifiedMLP,
    Periodic,
    PirateNet,
    eps_rank,
    grid,
    sfli,
    shape_parameter,
    uniform,
)

SQUARE = [(-1, 1), (-1, 1)]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def plain(d=2, n=40):
    return nn.Sequential(nn.Linear(d, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 1))


def test_shape_parameter_is_eq_choice():
    assert shape_parameter(100, SQUARE) == pytest.approx((10 - 1) / 2)
    assert shape_parameter(50, [(0, 4)], C=0.5) == pytest.approx(0.5 * 49 / 4)


@pytest.mark.parametrize("kind", KINDS)
def test_layer_is_the_formula(kind, float64):
    """F_i = sigma(gamma (alpha_i . x + c_i)) with |alpha| = 1 (tanh, hat); exp(-gamma^2 |x - c_i|^2) (gauss)."""
    gamma, domain, x = 3.0, [(0, 2), (1, 5)], uniform([(0, 2), (1, 5)], 200)
    first = sfli(nn.Linear(2, 30), domain, kind, gamma=gamma, generator=seeded())
    w, b = first.weight, first.bias
    if kind == "gauss":
        c = -b / gamma
        assert (
            (w == gamma).all()
            and (c[:, 0] >= 0).all()
            and (c[:, 0] <= 2).all()
            and (c[:, 1] >= 1).all()
            and (c[:, 1] <= 5).all()
        )
        want = torch.exp(-(gamma**2) * ((x[:, None] - c) ** 2).sum(-1))
    else:
        z = x @ w.T + b
        want = {"cos": torch.cos, "tanh": torch.tanh, "hat": lambda z: (1 - z.abs()).clamp(min=0)}[kind](z)
        if kind != "cos":
            assert torch.allclose(w.norm(dim=1), torch.tensor(gamma))
    assert torch.allclose(first(x), want, atol=1e-14)


@pytest.mark.parametrize("kind", ["tanh", "cos", "hat"])
def test_shifts_are_uniform_up_to_the_corners(kind, float64):
    """c_i, measured from the middle, lies between 0 and max over the box of |alpha_i . (x - middle)|, neuron by neuron,
    and fills that interval evenly: Kolmogorov-Smirnov with P(sqrt(n) D > 2) = 2 exp(-8) = 7e-4 for one fixed seed.
    Middle and reach come from 1024 draws: they fall short of the box's by 2% at most here."""
    n, gamma, domain = 2000, 3.0, [(0, 2), (1, 5)]
    first = sfli(nn.Linear(2, n), domain, kind, gamma=gamma, generator=seeded())
    alpha, middle, half = first.weight / gamma, torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0])
    c = first.bias / gamma + alpha @ middle
    ratio = (c / (alpha.abs() @ half)).sort().values
    assert ratio.min() > -0.02 and ratio.max() < 1.02
    assert (ratio - (torch.arange(n) + 0.5) / n).abs().max() < 2 / math.sqrt(n) + 0.02


def test_every_hyperplane_meets_the_domain(float64):
    first = sfli(nn.Linear(2, 500), [(0, 1), (2, 3)], "hat", gamma=5, generator=seeded())
    corners = torch.tensor([[0.0, 2], [0, 3], [1, 2], [1, 3]])
    z = corners @ first.weight.T + first.bias
    assert ((z.amin(0) < 0) & (z.amax(0) > 0)).all()


@pytest.mark.parametrize("gamma,d", [(1.0, 1), (10.0, 2), (50.0, 1), (50.0, 2), (50.0, 3)])
def test_gauss_float32_accuracy(gamma, d):
    """Relative error <= 2e-6 against float64 with the same parameters, where the value exceeds 1e-6."""
    first = sfli(nn.Linear(d, 200), [(-1, 1)] * d, "gauss", gamma=gamma, generator=seeded())
    centres = -first.bias / gamma
    reach = math.sqrt(math.log(1e6)) / gamma  # points where values exceed 1e-6 are this close to a centre
    x = torch.cat([centres[:100].detach() + reach * torch.randn(100, d) / math.sqrt(d), uniform([(-1, 1)] * d, 4000)])
    s = ((first.weight.double() * x.double()[:, None] + first.bias.double()) ** 2).sum(-1)
    exact = torch.exp(-s)
    far = exact > 1e-6
    assert far.sum() > 100
    assert (first(x).double() / exact - 1)[far].abs().max() <= 2e-6


def test_gauss_leaves_no_subnormal_numbers():
    first = sfli(nn.Linear(2, 200), SQUARE, "gauss", gamma=5, generator=seeded())
    y = first(uniform(SQUARE, 2000))
    assert not ((y > 0) & (y < 1e-30)).any() and (y == 0).any()


@pytest.mark.parametrize("kind", KINDS)
def test_sequential(kind):
    net = plain()
    new = sfli(net, SQUARE, kind, generator=seeded())
    assert isinstance(new[0], FirstLayer) and new[0].kind == kind and len(new) == len(net) - 1
    assert new[1] is net[2] and new[-1] is net[-1]
    x = uniform(SQUARE, 7)
    assert new(x).shape == (7, 1)
    x = grid(SQUARE, 40)
    assert eps_rank(new, x, measure=4.0) > 2 * eps_rank(net, x, measure=4.0)


def test_sequential_with_embedding_puts_centres_on_the_circle():
    net = nn.Sequential(Periodic(2, {1: 2.0}), nn.Linear(3, 60), nn.Tanh(), nn.Linear(60, 1))
    new = sfli(net, [(0, 1), (-1, 1)], gamma=2.0, generator=seeded())
    c = -new[1].bias / 2
    assert torch.allclose(c[:, 1] ** 2 + c[:, 2] ** 2, torch.ones(60), atol=1e-6)
    assert c[:, 0].min() >= 0 and c[:, 0].max() <= 1 and c[:, 0].std() > 0.2


def test_own_module():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.out = nn.Linear(2, 50), nn.Linear(50, 1)

        def forward(self, x):
            return self.out(self.first(x))

    net = Own()
    net.first = sfli(net.first, SQUARE, "tanh")
    assert net(uniform(SQUARE, 4)).shape == (4, 1)
    assert {"first.weight", "first.bias"} <= set(dict(net.named_parameters()))
    with pytest.raises(ValueError, match="first Linear"):
        sfli(Own(), SQUARE)


@pytest.mark.parametrize("Net", [ModifiedMLP, PirateNet])
def test_encoders_get_independent_draws_and_nothing_else_changes(Net):
    torch.manual_seed(3)
    base = Net(2, 30, 2, rwf=(1.0, 0.1))
    torch.manual_seed(3)
    net = sfli(Net(2, 30, 2, rwf=(1.0, 0.1)), SQUARE, generator=seeded())
    assert not torch.equal(net.U.bias, net.V.bias)
    rest = {k: v for k, v in net.named_parameters() if k[0] not in "UV"}
    old = dict(base.named_parameters())
    assert len(rest) > 5 and all(torch.equal(v, old[k]) for k, v in rest.items())


def test_draws_follow_the_generator():
    a, b, c = (sfli(nn.Linear(2, 20), SQUARE, "tanh", generator=seeded(s)) for s in (1, 1, 2))
    assert torch.equal(a.weight, b.weight) and torch.equal(a.bias, b.bias) and not torch.equal(a.weight, c.weight)


def test_dtype_follows_the_layer():
    assert sfli(nn.Linear(2, 9).double(), SQUARE).weight.dtype == torch.float64
    assert sfli(Dense(2, 9), SQUARE)(torch.rand(3, 2)).dtype == torch.float32


@pytest.mark.parametrize(
    "domain,options,message",
    [
        ([(1, 1), (0, 1)], {}, "axis 0 is"),
        ([(0, 1), (2, -2)], {}, "lo < hi"),
        ([(0, 1)], {}, "the layer takes 2"),
        ((0, 1), {}, "one pair per axis"),
        (SQUARE, {"kind": "relu"}, "'relu' is unknown"),
        (SQUARE, {"gamma": 0.0}, "positive"),
        (SQUARE, {"gamma": float("nan")}, "positive"),
        (SQUARE, {"C": -1.0}, "positive"),
    ],
)
def test_refusals(domain, options, message):
    for net in (plain(), nn.Linear(2, 5), MLP(2, 10, 2)):
        with pytest.raises(ValueError, match=message):
            sfli(net, domain, **options)


def test_sequential_without_activation_is_refused():
    for net in (
        nn.Sequential(nn.Linear(2, 1)),
        nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)),
        nn.Sequential(nn.Tanh()),
    ):
        with pytest.raises(ValueError, match="followed by an activation"):
            sfli(net, SQUARE)
