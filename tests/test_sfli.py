"""The structured first layer: formulas, draws, accuracy, the one-line adoption, refusals."""

import io
import math
import sys
from collections import OrderedDict

import pytest
import torch
from torch import nn

from common import (
    ACTIVATIONS,
    KINDS,
    MLP,
    Dense,
    FirstLayer,
    ModifiedMLP,
    Periodic,
    PirateNet,
    Refused,
    ResNet,
    eps_rank,
    grid,
    jet,
    sfli,
    sfli_,
    shape_parameter,
    uniform,
)
from kernels import gaussian_gram

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
    Middle and reach are those of the box; only rounding can pass the ends."""
    n, gamma, domain = 2000, 3.0, [(0, 2), (1, 5)]
    first = sfli(nn.Linear(2, n), domain, kind, gamma=gamma, generator=seeded())
    alpha, middle, half = first.weight / gamma, torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0])
    c = first.bias / gamma + alpha @ middle
    ratio = (c / (alpha.abs() @ half)).sort().values
    assert -1e-12 < ratio.min() and ratio.max() < 1 + 1e-12
    assert (ratio - (torch.arange(n) + 0.5) / n).abs().max() < 2 / math.sqrt(n)


def test_shifts_do_not_depend_on_the_drawn_points(float64):
    """The same alpha and u, of one generator, whatever the box: b = gamma (u |alpha| . half - alpha . middle)."""
    boxes = [[(0, 2), (1, 5)], [(-10, 30), (7, 7.5)]]
    one, two = (sfli(nn.Linear(2, 50), box, "tanh", gamma=1.0, generator=seeded()) for box in boxes)
    assert torch.equal(one.weight, two.weight)
    middle, half = (torch.tensor([[f(lo, hi) for lo, hi in box] for box in boxes])
                    for f in (lambda lo, hi: (lo + hi) / 2, lambda lo, hi: (hi - lo) / 2))  # fmt: skip
    u = [(layer.bias + layer.weight @ m) / (layer.weight.abs() @ h) for layer, m, h in zip((one, two), middle, half)]
    assert torch.allclose(u[0], u[1], atol=1e-12)


def test_shifts_behind_an_embedding_reach_what_it_reaches(float64):
    """Every hyperplane meets the circle on which the embedded domain lies, not only the square around it."""
    net = nn.Sequential(Periodic(1, {0: 2.0}), nn.Linear(2, 500), nn.Tanh(), nn.Linear(500, 1))
    new = sfli(net, [(-1, 1)], "tanh", gamma=3.0, generator=seeded())
    circle = new[0](torch.linspace(-1, 1, 2001)[:, None])
    z = circle @ new[1].weight.T + new[1].bias
    assert ((z.amin(0) < 0) & (z.amax(0) > 0)).all()


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
    assert isinstance(new[0], FirstLayer) and new[0].kind == kind and type(new[1]) is nn.Identity
    assert all(a is b for a, b in zip(new[2:], net[2:], strict=True)) and isinstance(net[0], nn.Linear)
    assert set(new.state_dict()) == set(net.state_dict()) | {"0._extra_state"}  # names stay
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
    with pytest.raises(Refused, match="first Linear of this Own, one of: first, out"):
        sfli(Own(), SQUARE)
    with pytest.raises(Refused, match="layer: 'firts' is no Linear"):
        sfli(Own(), SQUARE, layer="firts")
    with pytest.raises(Refused, match=r"'first' is not followed by an activation.*sfli_\(\)"):
        sfli(Own(), SQUARE, layer="first")


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
        ([(0, 1), (-math.inf, 1)], {}, "axis 1 is .* finite"),
        ([(0, math.inf), (0, 1)], {}, "axis 0 is .* finite"),
        ([(0, math.nan), (0, 1)], {}, "axis 0 is .* finite"),
        ([(0, 1)], {}, "the layer takes 2"),
        ((0, 1), {}, "one pair per axis"),
        (SQUARE, {"kind": "relu"}, "'relu' is unknown"),
        (SQUARE, {"gamma": 0.0}, "positive"),
        (SQUARE, {"gamma": float("nan")}, "positive"),
        (SQUARE, {"gamma": math.inf}, "positive"),
        (SQUARE, {"gamma": "auto", "kind": "tanh"}, "gamma: auto looks at the rank of Gaussians; give a number"),
        (SQUARE, {"C": -1.0}, "positive"),
    ],
)
def test_refusals(domain, options, message):
    for net in (plain(), nn.Linear(2, 5), MLP(2, 10, 2)):
        with pytest.raises(ValueError, match=message):
            sfli(net, domain, **options)


def test_sequential_without_activation_is_refused():
    """What stands behind the Linear must be an elementwise activation of torch.nn."""

    class Own(nn.Module):
        def forward(self, x):
            return torch.sin(x)

    others = [nn.Dropout(), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Softmax(1), nn.GLU(), nn.Identity(), Own()]
    for net in (
        nn.Sequential(nn.Linear(2, 1)),
        nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)),
        nn.Sequential(nn.Tanh()),
        nn.Sequential(nn.Sequential(nn.Linear(2, 4)), nn.Tanh()),
        *(nn.Sequential(nn.Linear(2, 4), other, nn.Linear(4, 1)) for other in others),
    ):
        with pytest.raises(ValueError, match="followed by an activation"):
            sfli(net, SQUARE)


def test_activations_are_elementwise():
    z = torch.randn(5, 6)
    for activation in ACTIVATIONS:
        f = activation(0.1, 1.0) if activation is nn.Threshold else activation().eval()
        assert torch.allclose(f(z)[1:3, 2:4], f(z[1:3, 2:4])), activation
        assert sfli(nn.Sequential(nn.Linear(2, 4), f, nn.Linear(4, 1)), SQUARE)[0].kind == "gauss"


def test_a_second_application_is_refused():
    for build in (plain, lambda: MLP(2, 10, 2), lambda: PirateNet(2, 10, 1)):
        net = sfli(build(), SQUARE)
        before = [p.detach().clone() for p in net.parameters()]
        with pytest.raises(Refused, match="first layer already; call sfli once"):
            sfli(net, SQUARE)
        assert all(torch.equal(a, b) for a, b in zip(before, net.parameters()))
    with pytest.raises(Refused, match="call sfli once"):
        sfli(sfli(nn.Linear(2, 10), SQUARE), SQUARE)
    with pytest.raises(Refused, match="before torch.compile"):
        sfli(torch.compile(plain()), SQUARE)


def test_names_and_class_of_a_sequential_stay():
    class Own(nn.Sequential):
        def forward(self, x):
            return 2 * super().forward(x)

    parts = {"embed": Periodic(2, {1: 2.0}), "in": nn.Linear(3, 9), "act": nn.Tanh(), "out": nn.Linear(9, 1)}
    net = Own(OrderedDict(parts))
    new = sfli(net, SQUARE)
    assert list(new._modules) == list(net._modules) == list(parts) and type(new) is Own
    x = uniform(SQUARE, 5)
    assert isinstance(new.get_submodule("in"), FirstLayer)
    assert torch.equal(new(x), 2 * new.out(new.get_submodule("in")(new.embed(x))))


def test_nested_sequential(float64):
    """The first Linear, depth first; the embeddings before it, at every level, are applied to the centres."""

    class Shift(nn.Module):
        def forward(self, x):
            return x + 10

    inner = nn.Sequential(Shift(), nn.Sequential(nn.Linear(3, 60), nn.Tanh()), nn.Linear(60, 5))
    net = nn.Sequential(Periodic(2, {1: 2.0}), inner, nn.Tanh(), nn.Linear(5, 1))
    new = sfli(net, [(0, 1), (-1, 1)], gamma=2.0, generator=seeded())
    first = new[1][1][0]
    c = -first.bias / 2 - 10
    assert isinstance(first, FirstLayer) and type(new[1][1][1]) is nn.Identity and new[1][2] is inner[2]
    assert torch.allclose(c[:, 1] ** 2 + c[:, 2] ** 2, torch.ones(60)) and 0 <= c[:, 0].min() and c[:, 0].max() <= 1
    assert isinstance(net[1][1][0], nn.Linear)  # the old one is as it was
    u, u_xx = jet(new, uniform([(0, 1), (-1, 1)], 4), "t x", "xx")
    assert u.shape == u_xx.shape == (4, 1)


def test_lazy_linear():
    net = nn.Sequential(nn.LazyLinear(9), nn.Tanh(), nn.LazyLinear(1))
    with pytest.raises(Refused, match="LazyLinear has no width yet; pass a batch"):
        sfli(net, SQUARE)
    net(torch.rand(3, 2))
    assert sfli(net, SQUARE)(torch.rand(3, 2)).shape == (3, 1)


@pytest.mark.parametrize("kind", ["tanh", "cos", "sin"])
def test_in_place(kind, float64):
    """sigma(linear(x)) is the layer that sfli() makes from the same draws; sin(z + pi / 2) = cos z."""
    linear, x = nn.Linear(2, 30), uniform(SQUARE, 50)
    weight = linear.weight
    assert sfli_(linear, SQUARE, kind, gamma=3.0, generator=seeded()) is linear and linear.weight is weight
    first = sfli(nn.Linear(2, 30), SQUARE, kind.replace("sin", "cos"), gamma=3.0, generator=seeded())
    assert torch.allclose(getattr(torch, kind)(linear(x)), first(x), atol=1e-12)
    assert weight.requires_grad and weight.grad_fn is None


def test_in_place_refusals():
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(2, 5))
    for linear, kind in ((nn.Linear(2, 5), "gauss"), (nn.Linear(2, 5), "hat"), (nn.Linear(2, 5, bias=False), "tanh"),
                         (nn.Conv1d(2, 5, 1), "tanh"), (Dense(2, 5), "tanh"), (parametrized, "tanh")):  # fmt: skip
        before = [p.detach().clone() for p in linear.parameters()]
        with pytest.raises(Refused, match="sfli.. makes a layer of every kind"):
            sfli_(linear, SQUARE, kind)
        assert all(torch.equal(a, b) for a, b in zip(before, linear.parameters()))
    with pytest.raises(Refused, match="finite lo < hi"):
        sfli_(nn.Linear(2, 5), [(0, 1), (0, math.inf)])


def test_gamma_auto(monkeypatch):
    """The choice is that of kernels/gaussian_gram.py, which is asked with the layer's own width, domain and draws."""
    asked = []
    scan = lambda n, domain, **options: asked.append((n, domain, sorted(options))) or 2.5
    monkeypatch.setattr(gaussian_gram, "scan_gamma", scan, raising=False)
    net = sfli(nn.Sequential(Periodic(2, {1: 2.0}), nn.Linear(3, 20), nn.Tanh()), SQUARE, gamma="auto")
    assert (net[1].weight == 2.5).all() and asked == [(20, SQUARE, ["embed", "generator"])]
    monkeypatch.setitem(sys.modules, "kernels.gaussian_gram", None)
    with pytest.raises(Refused, match="gamma: auto is in kernels/gaussian_gram.py; copy the folder kernels/"):
        sfli(plain(), SQUARE, gamma="auto")


def test_kind_is_in_the_state_dict():
    """A checkpoint of another kind is refused, one without the kind is taken, and torch.load needs no trust."""
    tanh, cos = (sfli(plain(), SQUARE, kind, generator=seeded()) for kind in ("tanh", "cos"))
    file = io.BytesIO()
    torch.save(tanh.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    with pytest.raises(Refused, match="saved first layer is tanh, this one is cos; build it as tanh"):
        cos.load_state_dict(saved)
    again, x = sfli(plain(), SQUARE, "tanh", generator=seeded(5)), uniform(SQUARE, 4)
    assert not torch.equal(again(x), tanh(x))
    again.load_state_dict(saved)
    assert torch.equal(again(x), tanh(x)) and "0._extra_state" in saved
    for net in (sfli(plain(), SQUARE, "tanh"), sfli(plain(), SQUARE, "cos")):
        net.load_state_dict({k: v for k, v in saved.items() if "extra" not in k})
    with pytest.raises(RuntimeError, match="Missing key"):
        again.load_state_dict({k: v for k, v in saved.items() if k != "0.weight"})
    nets = [sfli(MLP(2, 8, 2), SQUARE, "tanh") for _ in range(2)]
    params, buffers = torch.func.stack_module_state(nets)
    assert not buffers  # it is no tensor of the network that stacking or functional_call could meet
    assert torch.equal(torch.func.functional_call(nets[0], {k: v[1] for k, v in params.items()}, x), nets[1](x))


def test_a_wide_first_layer(float64):
    """`first` neurons, then n; gamma follows that width by itself. A ResNet cannot add them."""
    net = sfli(MLP(2, 9, 3, out=2, first=100), SQUARE)
    assert [b[0].in_features for b in net.blocks] == [100, 9] and net.first.weight.shape == (100, 2)
    assert (net.first.weight == shape_parameter(100, SQUARE)).all() and net(uniform(SQUARE, 4)).shape == (4, 2)
    assert MLP(2, 9, 1, first=100)(uniform(SQUARE, 4)).shape == (4, 1)
    with pytest.raises(Refused, match="first: a ResNet"):
        ResNet(2, 9, 2, first=100)
    assert ResNet(2, 9, 2, first=9)(uniform(SQUARE, 4)).shape == (4, 1)
