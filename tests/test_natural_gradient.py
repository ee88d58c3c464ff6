"""Natural gradient: the Jacobian against torch.func, the step against linear algebra, convergence, refusals."""

import math

import pytest
import torch
from torch import nn

from cli import FourierFeatures
from common import KINDS, MLP, ModifiedMLP, Periodic, PirateNet, ResNet, Save, Schedule, jet, sfli, train, uniform
from kernels import natural_gradient
from kernels.natural_gradient import NaturalGradient, gram, jacobian, jacobian_by_rows

pytestmark = pytest.mark.usefixtures("float64")


def ones(r):
    return {k: torch.ones_like(v) for k, v in r.items()}


def mean(r):
    return {k: torch.full_like(v, len(v) ** -0.5) for k, v in r.items()}


# Residuals of Examples 4, 5 and 6: dimension, outputs, periods, residuals. Initial and wall points have other sizes.


def allen_cahn(net, batch):
    u, heat = jet(net, batch["x"], "t x", "t-1e-4*xx")
    return {"ic": net(batch["x0"])[:, 0] - 1, "res": (heat + 5 * u**3 - 5 * u)[:, 0]}


def cavity(net, batch):
    q, q_x, q_y, lap = jet(net, batch["x"], "x y", "x y xx+yy")
    u, v, wall = q[:, 0], q[:, 1], net(batch["x0"])
    return {
        "lid": wall[:, 0] - 1,
        "wall": wall[:, 1],
        "ru": u * q_x[:, 0] + v * q_y[:, 0] + q_x[:, 2] - lap[:, 0] / 100,
        "rv": u * q_x[:, 1] + v * q_y[:, 1] + q_y[:, 2] - lap[:, 1] / 100,
        "rc": q_x[:, 0] + q_y[:, 1],
    }


def torus(net, batch):
    q, q_x, q_y, q_tx, q_ty, q_xx, q_xy, q_yy, lap_x, lap_y = jet(
        net, batch["x"], "t x y", "x y tx ty xx xy yy xxx+xyy xxy+yyy"
    )
    w_t, w_x, w_y = q_tx[:, 1] - q_ty[:, 0], q_xx[:, 1] - q_xy[:, 0], q_xy[:, 1] - q_yy[:, 0]
    lap_w = lap_x[:, 1] - lap_y[:, 0]
    return {
        "ic": net(batch["x0"])[:, 0],
        "rw": w_t + q[:, 0] * w_x + q[:, 1] * w_y - lap_w / 100,
        "rc": q_x[:, 0] + q_y[:, 1],
    }


def heat(net, batch):
    u, heat = jet(net, batch["x"], "x y z t", "t-xx-yy-zz")
    return {"ic": net(batch["x0"])[:, 0], "res": (heat + u)[:, 0]}


PROBLEMS = {
    "heat": (4, 1, {}, heat),
    "allen_cahn": (2, 1, {1: 2.0}, allen_cahn),
    "cavity": (2, 3, {}, cavity),
    "torus": (3, 2, {1: 2 * math.pi, 2: 2 * math.pi}, torus),
}


def problem(name, arch, kind, rwf, width=6):
    d, out, periods, residuals = PROBLEMS[name]
    omega = [(0.0, 1.0)] * d
    torch.manual_seed(1)
    net = arch(d + len(periods), width, 2, out=out, rwf=rwf, embed=Periodic(d, periods) if periods else None)
    net = sfli(net, omega, kind, gamma=2.0) if kind else net
    with torch.no_grad():
        for p in net.parameters():  # away from zero biases and alpha = 0
            p += 0.1 * torch.randn_like(p)
    return net, {"x": uniform(omega, 9), "x0": uniform(omega, 5)}, residuals


def difference(residuals, net, batch, scale=ones):
    _, _, J = jacobian(residuals, net, batch, scale, None)
    _, _, oracle = jacobian_by_rows(residuals, net, batch, scale, None)
    assert oracle.abs().amax(0).gt(0).sum() >= oracle.shape[1] - 1  # all parameters matter but the level of p
    return ((J - oracle).norm() / oracle.norm()).item()


ARCHITECTURES = [MLP, ResNet, ModifiedMLP, PirateNet]
FIRST = [None, *KINDS]


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("k", range(len(FIRST)))
def test_jacobian(k, name):
    """Every problem with every first layer; architecture and factorization take turns, so that each problem and each
    first layer meets all of them."""
    turn = k + list(PROBLEMS).index(name)
    net, batch, residuals = problem(name, ARCHITECTURES[turn % 4], FIRST[k], (None, (1.0, 0.1))[turn // 2 % 2])
    assert difference(residuals, net, batch) < 1e-10


def test_jacobian_of_fourier_features_scaled_rows_and_any_number_of_rows():
    torch.manual_seed(0)
    net = MLP(8, 6, 2, embed=nn.Sequential(Periodic(2, {1: 2.0}), FourierFeatures(3, 8)))
    omega = [(0.0, 1.0)] * 2
    for n in (1, 2, 30):
        batch = {"x": uniform(omega, n), "x0": uniform(omega, 3)}
        scale = lambda r: {k: torch.arange(1.0, len(v) + 1) for k, v in r.items()}
        assert difference(allen_cahn, net, batch, scale) < 1e-10


def test_jacobian_where_one_residual_needs_two_points():
    """Two calls of the network in one residual: rows add up."""
    torch.manual_seed(0)
    net, batch = MLP(1, 5, 2), {"x": torch.rand(7, 1), "y": torch.rand(7, 1)}
    assert difference(lambda net, b: {"jump": (net(b["x"]) * net(b["y"]))[:, 0]}, net, batch) < 1e-10


def test_jacobian_of_pseudo_time_steps():
    """r + lam (q - stop q) has the value of r and the derivative of r + lam q."""
    net, batch, _ = problem("allen_cahn", PirateNet, "gauss", (1.0, 0.1))

    def residuals(net, batch):
        u, heat = jet(net, batch["x"], "t x", "t-1e-4*xx")
        return {"res": (heat + 7 * (u - u.detach()))[:, 0]}

    r, _, J = jacobian(residuals, net, batch, ones, None)
    _, _, oracle = jacobian_by_rows(residuals, net, batch, ones, None)
    assert (J - oracle).norm() < 1e-10 * oracle.norm()
    u, heat = jet(net, batch["x"], "t x", "t-1e-4*xx")
    assert torch.equal(r["res"], heat[:, 0].detach())


def whole_jacobian(residuals, net, batch):
    """J as training would take it, by whichever way choose_jacobian() finds, against float64 autograd row by row."""
    opt = NaturalGradient(net, residuals)
    way = opt.choose_jacobian(batch)[1]
    r, _, J = way(residuals, net, batch, ones, None)
    params, live = [p for p in net.parameters() if p.requires_grad], residuals(net, batch)
    rows = [torch.cat([g.flatten() for g in torch.autograd.grad(x, params, retain_graph=True, allow_unused=True,
                                                                materialize_grads=True)])
            for v in live.values() for x in v]  # fmt: skip
    assert (J - torch.stack(rows)).norm() < 1e-10 * J.norm()
    return way


@pytest.mark.parametrize("mix", [lambda u: u - u.mean(), lambda u: u.flip(0), lambda u: u.cumsum(0)],
                         ids=["mean", "flip", "sum"])  # fmt: skip
def test_residuals_that_mix_samples(mix, capsys):
    """J is right: jacobian() follows a mean as a number that all samples share; order it does not, and would be wrong by
    0.39 and more, so that backward goes row by row."""
    torch.manual_seed(0)
    net, batch = MLP(1, 5, 2), {"x": torch.rand(7, 1)}
    way = whole_jacobian(lambda net, b: {"r": mix(net(b["x"])[:, 0])}, net, batch)
    assert way is jacobian or "backward row by row" in capsys.readouterr().out


class Fixed(nn.Module):
    """Fixed random features, a fixed mean, a bias without weight, a frozen layer, then what is trained."""

    def __init__(self):
        super().__init__()
        self.register_buffer("B", torch.randn(6, 2))
        self.b, self.frozen, self.net = nn.Parameter(torch.randn(6)), nn.Linear(6, 6).requires_grad_(False), MLP(6, 5, 2)

    def forward(self, x):
        z = torch.sin(torch.nn.functional.linear(x, self.B, self.b))
        return self.net(torch.lerp(z, torch.tanh(self.frozen(z)), 0.5))


def test_fixed_maps_and_frozen_parameters(capsys):
    """They need no rows of their own and leave the fast way open."""
    torch.manual_seed(0)
    net, batch = Fixed(), {"x": torch.rand(7, 2), "x0": torch.rand(4, 2)}
    assert whole_jacobian(allen_cahn, net, batch) is jacobian
    before = [p.clone() for p in net.frozen.parameters()]
    train(net, lambda g: batch, allen_cahn, 5, optimizer="ng", lr=1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, net.frozen.parameters()))


def test_residuals_that_differentiate_themselves(capsys):
    """torch.autograd.grad inside residuals, in training too."""
    torch.manual_seed(0)
    net, x = MLP(1, 8, 2), torch.linspace(0, 1, 20)[:, None]

    def residuals(net, b):
        x = b["x"].clone().requires_grad_()
        u = net(x)
        (u_x,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return {"ode": u_x - torch.cos(x), "start": net(torch.zeros(1, 1))}

    history = train(net, lambda g: {"x": x}, residuals, 30, optimizer="ng")
    assert history[-1]["loss"] < 1e-6 and (net(x) - torch.sin(x)).abs().max() < 1e-2


def test_whatever_jacobian_raises_torch_func_takes_over(capsys):
    class Stacked(nn.Module):  # a map of [2, B, n]
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(1, 5), nn.Linear(5, 1)

        def forward(self, x):
            return self.last(torch.tanh(self.first(torch.stack([x, 2 * x])))).sum(0)

    torch.manual_seed(0)
    net, batch = Stacked(), {"x": torch.rand(7, 1)}
    assert whole_jacobian(lambda net, b: {"r": net(b["x"])[:, 0]}, net, batch) is jacobian_by_rows
    assert "backward row by row" in capsys.readouterr().out


def test_inverse_problem(capsys):
    """An unknown coefficient beside the network has its column on the fast way; k u'' = -1 finds k = 2.5."""
    torch.manual_seed(0)
    net = MLP(1, 10, 2)
    net.k = nn.Parameter(torch.tensor(1.0))
    x = torch.linspace(0, 1, 30)[:, None]

    def residuals(net, b):
        u, u_xx = jet(net, b["x"], "x", "xx")
        return {"res": (net.k * u_xx + 1)[:, 0], "data": (u - b["x"] * (1 - b["x"]) / 5)[:, 0]}

    assert whole_jacobian(residuals, net, {"x": x}) is jacobian
    train(net, lambda g: {"x": x}, residuals, 60, optimizer="ng", lr=1.0)
    assert net.k.item() == pytest.approx(2.5, rel=1e-3)


def test_the_check_of_the_jacobian(monkeypatch, capsys):
    """An entry of J that is wrong by 1e-6 of its norm is found."""
    right = natural_gradient.jacobian

    def wrong(*args):
        r, factor, J = right(*args)
        J[3, 5] += 1e-6 * J.norm()
        return r, factor, J

    monkeypatch.setattr(natural_gradient, "jacobian", wrong)
    net, batch, residuals = problem("allen_cahn", MLP, "gauss", None)
    NaturalGradient(net, residuals).choose_jacobian(batch)
    assert "row by row" in capsys.readouterr().out


def test_gram_is_the_lower_triangle():
    for n in (1, 5, 8, 33):
        A = torch.randn(n, 11)
        assert torch.allclose(gram(A).tril(), (A @ A.T).tril(), rtol=1e-13, atol=1e-13)


class Scaled(nn.Module):
    """A parameter that meets samples in a product, and is too large for columns one by one."""

    def __init__(self):
        super().__init__()
        self.net, self.scale = MLP(1, 5, 2, out=20), nn.Parameter(torch.rand(20) + 1)

    def forward(self, x):
        return (self.scale * self.net(x)).sum(1, keepdim=True)


class Convolution(nn.Module):
    """Linear maps of three-dimensional tensors."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(1, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x.unsqueeze(1).expand(-1, 3, -1)))).sum(1)


@pytest.mark.parametrize("module", [Scaled, Convolution])
def test_foreign_modules_fall_back(module, capsys):
    torch.manual_seed(0)
    net, x = module(), torch.linspace(-1, 1, 40)[:, None]
    residuals = lambda net, batch: {"fit": net(batch["x"])[:, 0] - 2 * torch.sin(batch["x"][:, 0])}
    history = train(net, lambda g: {"x": x}, residuals, 30, optimizer="ng", lr=1.0)
    assert "backward row by row" in capsys.readouterr().out
    assert history[-1]["loss"] < 1e-2 * history[0]["loss"]


@pytest.mark.parametrize("rows, columns", [(6, 20), (20, 6)])
def test_linear_least_squares_in_one_step(rows, columns):
    """Under- and overdetermined. Rounding: lam / sigma_min^2 = 1e-13 and the condition of A A^T, here below 1e3."""
    torch.manual_seed(0)
    A, y = torch.randn(rows, columns), torch.randn(rows)
    net = nn.Linear(columns, 1, bias=False)
    start = net.weight.detach()[0].clone()
    train(
        net, lambda g: {"A": A}, lambda net, b: {"fit": net(b["A"])[:, 0] - y}, 1, optimizer="ng", lr=1.0,
        optimizer_options={"damping": 1e-15}
    )
    want = start + torch.linalg.pinv(A) @ (y - A @ start)
    assert (net.weight[0] - want).norm() < 1e-11 * want.norm()


def test_quadratic_convergence():
    """Recover a tanh(w x + b) + c from its values, 40 rows for 4 parameters: the ratios e_{k+1} / e_k^2 stay
    bounded (0.2 to 1) until rounding, while e_{k+1} / e_k falls to 1e-4 and below."""
    x = torch.linspace(-2, 2, 40)[:, None]
    net = MLP(1, 1, 1)
    solution = torch.tensor([1.3, 0.4, 0.8, -0.2])
    y = solution[2] * torch.tanh(solution[0] * x + solution[1]) + solution[3]
    nn.utils.vector_to_parameters(solution[[1, 0, 3, 2]] + 0.15, net.parameters())  # bias comes before weight
    distance = lambda net: {
        "e": (nn.utils.parameters_to_vector(net.parameters()) - solution[[1, 0, 3, 2]]).norm().item()
    }
    residuals = lambda net, batch: {"fit": (net(x) - y)[:, 0]}
    history = train(net, lambda g: {}, residuals, 5, optimizer="ng", lr=1.0, optimizer_options={"damping": 1e-13},
                    evaluate=distance)
    e = [row["e"] for row in history]
    assert e[0] > 0.1 and e[-1] < 1e-13 and all(e[k + 1] < 2 * e[k] ** 2 for k in range(3)), e


def test_momentum_is_spring():
    """Second direction = argmin |J d - r|^2 + lam |d - mu d_old|^2, by an independent least-squares solver."""
    net, batch, residuals = problem("allen_cahn", MLP, "gauss", None)
    opt = NaturalGradient(net, residuals, damping=1e-2, momentum=0.7)
    opt.direction(batch, mean)
    old = opt.d.clone()
    opt.step()
    lam = opt.damping
    r = opt.direction({"x": batch["x"].flip(1), "x0": batch["x0"]}, mean)
    factor = mean(r)
    J, r = opt.J, torch.cat([factor[k] * r[k] for k in r])
    A = torch.cat([J, math.sqrt(lam) * torch.eye(J.shape[1])])
    want = torch.linalg.lstsq(A, torch.cat([r, math.sqrt(lam) * 0.7 * old])[:, None]).solution[:, 0]
    assert (opt.d - want).norm() < 1e-9 * want.norm()


def test_damping_rule_and_rejected_steps():
    """r = 2 stop(p) - p has the value p and the wrong derivative: no step falls; each is counted, nothing moves."""
    net = nn.Linear(1, 1, bias=False)
    start = net.weight.item()

    def wrong(net, batch):
        y = net(torch.ones(3, 1))[:, 0]
        return {"fit": 2 * y.detach() - y}

    history = train(net, lambda g: {}, wrong, 4, optimizer="ng", lr=1.0, optimizer_options={"damping": 1e-3})
    assert net.weight.item() == start and [row["rejected"] for row in history] == [0, 1, 2, 3, 4]
    assert [row["damping"] for row in history] == [1e-3 * 2**k for k in range(5)] and history[-1]["eta"] == 0
    right = lambda net, batch: {"fit": net(torch.ones(3, 1))[:, 0] - 2}
    history = train(net, lambda g: {}, right, 1, optimizer="ng", lr=0.5, optimizer_options={"damping": 1e-3})
    assert history[-1]["damping"] == 1e-3 / 1.5 and history[-1]["eta"] == 0.5 and history[-1]["rejected"] == 0


def test_line_search_halves_until_the_loss_falls():
    """|arctan(10 w)| from w = 1: the full Newton step overshoots, shorter ones do not."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 1.0)
    residuals = lambda net, batch: {"fit": torch.atan(10 * net(torch.ones(1, 1)))[:, 0]}
    history = train(net, lambda g: {}, residuals, 1, optimizer="ng", lr=1.0, optimizer_options={"damping": 1e-12})
    assert 0 < history[1]["eta"] < 0.25 and history[1]["loss"] < history[0]["loss"]
    assert history[1]["damping"] == 2e-12


WEIGHTS = [
    dict(weights={"ic": 7.0}),
    dict(weighting="ntk"),
    dict(weighting="grad_norm", weights={"ic": 3.0}, causal=dict(terms=["res"], tol=1.0, chunks=4)),
]


def heat(generator):
    x = uniform([(0.0, 1.0)] * 2, 16, generator)
    return {"x": x[x[:, 0].argsort()], "x0": uniform([(0.0, 1.0)] * 2, 5, generator)}


@pytest.mark.parametrize("options", WEIGHTS)
def test_loss_is_that_of_the_other_optimisers(options):
    """Same first row of the history, loss weights and causal weights included; and |r|^2 is that loss."""
    rows = []
    for optimizer in ("adam", "ng"):
        net, _, residuals = problem("allen_cahn", PirateNet, "gauss", (1.0, 0.1))
        rows.append(train(net, heat, residuals, 1, optimizer=optimizer, lr=1e-3, **options)[0])
    for key in ("loss", "loss_ic", "loss_res", *(["weight_ic", "weight_res"] if "weighting" in options else [])):
        assert rows[0][key] == pytest.approx(rows[1][key], rel=1e-12)


@pytest.mark.parametrize("options", WEIGHTS)
def test_resume_bit_for_bit(options, tmp_path):
    """Every step saved; a run broken off at step 7 of 12 and resumed ends with the same bits."""
    ends = []
    for broken in (False, True):
        net, _, residuals = problem("allen_cahn", PirateNet, "gauss", (1.0, 0.1))
        calls = iter(range(7 if broken else 10**6))

        def sample(generator):
            next(calls)
            return heat(generator)

        save = lambda resume: Save(tmp_path / str(broken), resume=resume, seconds=0.0)
        arguments = dict(optimizer="ng", lr=Schedule(1.0, 0, 0.9, 3), optimizer_options={"momentum": 0.5}, **options)
        if broken:
            with pytest.raises(StopIteration):
                train(net, sample, residuals, 12, save=save(False), **arguments)
            net, _, residuals = problem("allen_cahn", PirateNet, "gauss", (1.0, 0.1))
            history = train(net, heat, residuals, 12, save=save(True), **arguments)
        else:
            history = train(net, sample, residuals, 12, save=save(False), **arguments)
        ends.append((history, [p.detach().clone() for p in net.parameters()]))
    (whole, p), (resumed, q) = ends
    assert all(torch.equal(a, b) for a, b in zip(p, q))
    strip = lambda rows: [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    assert strip(whole) == strip(resumed)


def test_refusals(monkeypatch):
    residuals = lambda net, batch: {"fit": net(torch.rand(50, 1))[:, 0]}
    go = lambda nets, residuals=residuals, **options: train(nets, lambda g: {}, residuals, 2, optimizer="ng", **options)
    for damping in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="damping"):
            go(MLP(1, 5, 2), optimizer_options={"damping": damping})
    with pytest.raises(ValueError, match="momentum"):
        go(MLP(1, 5, 2), optimizer_options={"momentum": 1.0})
    with pytest.raises(ValueError, match="seeds"):
        go([MLP(1, 5, 2), MLP(1, 5, 2)])
    with pytest.raises(ValueError, match="float64"):
        go(MLP(1, 5, 2).float())
    with pytest.raises(ValueError, match="Jacobian .* not finite"):
        go(MLP(1, 5, 2), lambda net, batch: {"fit": (net(torch.zeros(5, 1))[:, 0] * 0).sqrt()})
    monkeypatch.setattr(natural_gradient, "NG_BYTES", 1000)
    with pytest.raises(ValueError, match="50 rows x 46 parameters"):
        go(MLP(1, 5, 2))
