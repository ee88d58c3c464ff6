"""Jets against nested float64 autograd, the definition of the derivative they replace."""

import itertools
import random
import re

import pytest
import torch
from torch import nn

from cli import FourierFeatures
from common import KINDS, MLP, ModifiedMLP, Periodic, PirateNet, Plan, ResNet, jet, sfli, uniform

DOMAIN = [(0, 1), (-1, 1), (-2, 1)]
NETS = [MLP, ResNet, ModifiedMLP, PirateNet]
pytestmark = pytest.mark.usefixtures("float64")


def autograd(f, x, variables, derivatives):
    """The oracle: one nested torch.autograd.grad per factor, per term, per output."""
    names = variables.split()
    x = x.clone().requires_grad_()
    y = f(x)

    def derivative(column, factors):
        for v in factors:
            if not column.requires_grad:
                return torch.zeros(len(x))
            g = torch.autograd.grad(column.sum(), x, create_graph=True, allow_unused=True)[0]
            column = torch.zeros(len(x)) if g is None else g[:, names.index(v)]
        return column

    out = [y]
    for entry in derivatives.split():
        terms = []
        for term in filter(None, entry.replace("-", "+-").split("+")):
            factor, _, product = term.removeprefix("-").rpartition("*")
            sign = -1.0 if term.startswith("-") else 1.0
            terms.append((sign * float(factor or 1), re.findall(r"[A-Za-z]\d*", product)))
        out.append(torch.stack([sum(m * derivative(column, term) for m, term in terms) for column in y.unbind(1)], 1))
    return [o.detach() for o in out]


def check(f, x, variables, derivatives):
    """Both evaluate the same function in float64; sums of a few hundred rounded terms stay below 1e-10 relative."""
    mine, want = jet(f, x, variables, derivatives), autograd(f, x, variables, derivatives)
    assert len(mine) == len(want)
    for a, b, name in zip(mine, want, ["value", *derivatives.split()]):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= 1e-10 * max(b.abs().max(), 1e-3), name


def network(Net, kind, embed=None, d=3):
    net = Net(d if embed is None else d + 1, 12, 3, out=2, rwf=(1.0, 0.1), embed=embed)
    for block in net.blocks:
        if hasattr(block, "alpha"):
            nn.init.constant_(block.alpha, 0.4)  # at the initial 0 the blocks would not be tested
    for p in net.parameters():
        p.data += 0.05 * torch.randn_like(p)  # biases too
    return sfli(net, DOMAIN, kind, gamma=1.5) if kind else net


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("Net", NETS)
def test_every_architecture_and_kind(Net, kind):
    net, x = network(Net, kind), uniform(DOMAIN, 6)
    for derivatives in ("t x y", "tt tx xx xy yy", "tt+xx+yy t", "txy xxx+xyy xxy+yyy"):
        check(net, x, "t x y", derivatives)


@pytest.mark.parametrize("Net", NETS)
def test_embeddings(Net):
    x = uniform(DOMAIN, 5)
    check(network(Net, "gauss", Periodic(3, {1: 2.0})), x, "t x y", "t x xx+yy txx xxx+xyy")
    check(network(Net, None, nn.Sequential(FourierFeatures(3, 4))), x, "t x y", "t x xx+yy txx xxx+xyy")
    check(network(Net, "gauss", Periodic(3, {1: 2.0})), x, "t x y", "t xx+yy")
    check(network(Net, None, nn.Sequential(FourierFeatures(3, 4))), x, "t x y", "tt+xx+yy")


@pytest.mark.parametrize("seed", range(20))
def test_random_channel_lists(seed):
    """Random linear combinations of random products, orders mixed and terms repeated."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    products = ["".join(p) for k in (1, 2, 3) for p in itertools.product("abc", repeat=k)]
    factors = ["", "", "0.5*", "2*", "3.25*"]
    term = lambda k: rng.choice("+-" if k else ["", "-"]) + rng.choice(factors) + rng.choice(products)
    entries = ["".join(map(term, range(rng.randint(1, 4)))) for _ in range(rng.randint(1, 6))]
    net = network(rng.choice(NETS), rng.choice([None, *KINDS]))
    check(net, uniform(DOMAIN, 4), "a b c", " ".join(entries))


def test_foreign_functions():
    """Every rule of the table, in operator and function form, with constants on either side."""
    w, c = torch.randn(3, 4), torch.rand(4) + 0.5
    silu = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 1))

    def f(x):
        a, b = x @ w, torch.matmul(x, 2 * w) * 0.3
        y = c * torch.sin(a) - torch.exp(-b * b) / c + (2 - torch.cos(a)) / (3 + torch.sigmoid(b) ** 2)
        y = c - y + torch.relu(a) * torch.square(b) - torch.abs(b) / 2 + c / (4 + torch.tanh(a)) + a**3
        rows = torch.cat([y, x[:, 1:2] * x[..., 0:1], c.expand(len(w) + 2, 4)], dim=-1)
        return torch.cat([rows[:, ::2], silu(x)], -1)

    check(f, torch.randn(5, 3), "x y z", "x xy zzz xx+yy+zz xyz yyz")
    check(f, torch.randn(5, 3), "x y z", "xx+yy+zz")


def test_laplacian_in_50_dimensions_is_one_channel():
    d = 50
    net = sfli(MLP(d + 1, 16, 3), [(0, 0.2)] + [(-1, 1)] * d, gamma=0.3)
    names = ["t"] + [f"x{k}" for k in range(d)]
    laplacian = "+".join(f"x{k}x{k}" for k in range(d))
    check(net, uniform([(0, 0.2)] + [(-1, 1)] * d, 3), " ".join(names), f"t {laplacian}")
    plan = Plan(" ".join(names), f"t {laplacian}")  # value, t, x1..xd as one group, Laplacian: d + 3 rows in a product
    assert [len(group or [0]) for group in plan.groups] == [1, 1, d, 1] and len(plan.chain) == 4


def test_groups_hold_what_is_used_alike():
    """Of x, y, z, w only equally weighted squares may share a channel; another use takes a variable out."""
    groups = lambda derivatives: [g for g in Plan("x y z w", derivatives).groups if g]
    assert groups("xx+yy+zz+ww") == [[0, 1, 2, 3]]
    assert groups("xx+yy+2*zz+2*ww") == [[0, 1], [2, 3]]
    assert groups("x xx+yy+zz") == groups("xx+yy+zz x+ww") == groups("xx+yy+zz xw") == [[1, 2]]
    assert groups("xx+yy zz+yy") == groups("xx yy") == groups("x y z w") == []
    x = uniform([(-1, 1)] * 4, 5)
    for derivatives in ("xx+yy+2*zz+2*ww", "xx+yy+zz x+ww", "xx+yy+zz xw", "x-xx-yy-zz+ww xx+ww", "zz www-xx-yy"):
        for kind in (None, "gauss"):
            net = MLP(4, 9, 2)
            check(net if kind is None else sfli(net, [(-1, 1)] * 4, kind, 1.0), x, "x y z w", derivatives)


def test_a_linear_combination_is_one_channel():
    """u_t - 1e-4 u_xx needs the value, u_x and itself; asked for together with its parts it costs nothing."""
    assert len(Plan("t x", "t-1e-4*xx").chain) == 3 and len(Plan("t x", "t xx t-1e-4*xx").chain) == 4
    net, x = network(MLP, "gauss"), uniform(DOMAIN, 4)
    combination = jet(net, x, "t x y", "t-1e-4*xx")[1]
    _, u_t, u_xx, again = jet(net, x, "t x y", "t xx t-1e-4*xx")
    assert torch.allclose(combination, u_t - 1e-4 * u_xx, atol=1e-13) and torch.allclose(combination, again, atol=1e-13)


def test_plan_of_its_docstring():
    """The worked example, "t-xx-yy": channels, group and rules as the docstring of Plan has them."""
    plan = Plan("t x y", "t-xx-yy")
    assert plan.groups == [None, [1, 2], None] and plan.order == 2 and plan.outputs == [[(2, 1)]]
    assert plan.seeds == [[(1, 1)], [(0, 1.0)]]
    assert plan.chain == ((), (), (((1, 1), -1.0),)) and plan.leibniz == ((), (), (((1, 1), -2.0),))


def test_polynomial_in_closed_form():
    x = torch.randn(7, 2)
    f = lambda x: x[:, :1] ** 2 * x[:, 1:2] + 3 * x[:, 1:2]
    u, u_x, u_xy, lap, u_xxy = jet(f, x, "x y", "x xy xx+yy xxy")
    a, b = x[:, :1], x[:, 1:2]
    for mine, want in [(u, a**2 * b + 3 * b), (u_x, 2 * a * b), (u_xy, 2 * a), (lap, 2 * b), (u_xxy, 2 + 0 * a)]:
        assert torch.allclose(mine, want, atol=1e-14)


def test_gradients_of_a_residual_reach_the_parameters():
    net, x = network(PirateNet, "gauss"), uniform(DOMAIN, 6)
    u, u_t, lap = jet(net, x, "t x y", "t xx+yy")
    mine = torch.autograd.grad(((u_t - lap + u**3) ** 2).mean(), list(net.parameters()))
    z = x.clone().requires_grad_()
    v, total = net(z), 0
    for column in v.unbind(1):
        g = torch.autograd.grad(column.sum(), z, create_graph=True)[0]
        second = sum(torch.autograd.grad(g[:, k].sum(), z, create_graph=True)[0][:, k] for k in (1, 2))
        total = total + ((g[:, 0] - second + column**3) ** 2).mean() / 2
    for a, b in zip(mine, torch.autograd.grad(total, list(net.parameters()))):
        assert (a - b).abs().max() <= 1e-10 * max(b.abs().max(), 1e-3)


@pytest.mark.parametrize("derivatives", ["t xx+yy txx", "t-xx-yy"])
def test_vmap_over_stacked_networks(derivatives):
    nets, x = [network(ModifiedMLP, "gauss") for _ in range(3)], torch.stack([uniform(DOMAIN, 4) for _ in range(3)])
    params, _ = torch.func.stack_module_state(nets)
    call = lambda p, x: jet(lambda z: torch.func.functional_call(nets[0], p, (z,)), x, "t x y", derivatives)
    stacked = torch.func.vmap(call)(params, x)
    for k, net in enumerate(nets):
        for a, b in zip(stacked, jet(net, x[k], "t x y", derivatives)):
            assert torch.allclose(a[k], b, atol=1e-12)


def test_compiles_without_graph_breaks():
    """fullgraph=True raises at the first graph break; value and gradient agree with eager."""
    net, x = network(PirateNet, "gauss"), uniform(DOMAIN, 6)
    loss = lambda x: sum((c**2).sum() for c in jet(net, x, "t x y", "t xx+yy"))
    want = torch.autograd.grad(loss(x), list(net.parameters()))
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), list(net.parameters()))
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(got, want))


def test_refusals():
    x = torch.rand(4, 2)
    for variables, derivatives, message in [
        ("x y", "z", "'z' is no product"),
        ("x y", "xxxx", "one to three"),
        ("x y", "x+", "'x\\+' is no sum"),
        ("x y", "2xx", "no sum"),
        ("x y", "x*y", "no sum"),
        ("x y", "x++y", "no sum"),
        ("x", "x", "names 1 columns"),
    ]:
        with pytest.raises(ValueError, match=message):
            jet(lambda x: x, x, variables, derivatives)
    with pytest.raises(NotImplementedError, match="no rule for gelu"):
        jet(nn.GELU(), x, "x y", "x")
    with pytest.raises(NotImplementedError, match="on the left"):
        jet(lambda x: torch.matmul(torch.rand(4, 4), x), x, "x y", "x")


@pytest.mark.parametrize("d", [2, 5])
@pytest.mark.parametrize("gamma, bound", [(1.2, 5e-7), (50.0, 1e-5)])
def test_gaussian_layer_in_float32(gamma, bound, d):
    """The exponent is float64, so values keep float32's digits for any gamma; derivatives lose a few. Grouped (the
    Laplacian alone) and not. Half of the points are close to centres: elsewhere narrow bumps are zero."""
    layer = sfli(nn.Linear(d, 100), [(-1, 1)] * d, gamma=gamma, generator=torch.Generator().manual_seed(0))
    single = nn.Linear(d, 100, dtype=torch.float32)
    single = sfli(single, [(-1, 1)] * d, gamma=gamma, generator=torch.Generator().manual_seed(0))
    layer.load_state_dict(single.state_dict())
    centres = (-single.bias / single.weight).detach()
    g = torch.Generator().manual_seed(1)
    near = centres + torch.randn(100, d, generator=g, dtype=torch.float32) / gamma
    x = torch.cat([2 * torch.rand(100, d, generator=g, dtype=torch.float32) - 1, near])
    names = [f"x{k}" for k in range(d)]
    laplacian = "+".join(v + v for v in names)
    for derivatives in (laplacian, f"x0 x1 {laplacian} x0x0x1"):
        got, want = (jet(f, z, " ".join(names), derivatives) for f, z in ((single, x), (layer, x.double())))
        errors = [((a - b).norm() / b.norm()).item() for a, b in zip(got, want)]
        assert got[0].dtype == torch.float32 and errors[0] < 2e-7 and max(errors) < bound, errors
