"""Example 4.4: the reference against another integrator, the residual on a known function, the draws, SIGKILL."""

import json
import math
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from conftest import ROOT

import exp_allen_cahn
from cli import build, load, relative_l2
from common import MLP, FourierFeatures, Periodic, sfli, train
from exp_allen_cahn import (GAMMA, OMEGA, PAPER, Even, Fitted, draw, known, reference, residuals, solution,
                            solve, spread)


def test_reference_converges():
    """Halving the step alone, then doubling the modes alone, changes u by less than 1e-8 at every point."""
    u = solve(4096, 800, 201, 512)
    assert np.abs(u - solve(4096, 400, 201, 512)).max() < 1e-8
    assert np.abs(u - solve(8192, 800, 201, 512)).max() < 1e-8


def test_reference_against_another_method():
    """Chebyshev collocation on [0, 1] with u_x = 0 at both ends, which is what even and periodic mean, and SciPy's Radau:
    an independent solution. The two agree to its tolerance, and until t = 0.75 to 3e-11."""
    N, k = 700, np.arange(701)
    x, sign = (1 - np.cos(np.pi * k / N)) / 2, (-1.0) ** k * np.where(k % N == 0, 2, 1)
    angle = np.pi * k / N
    gap = np.sin((angle[:, None] + angle) / 2) * np.sin((angle[:, None] - angle) / 2)  # x_i - x_j
    D = sign[:, None] / sign / (gap + np.eye(N + 1))
    D -= np.diag(D.sum(1))  # d/dx
    ends = -np.linalg.solve(D[np.ix_([0, N], [0, N])], D[[0, N], 1:N])  # u_x = 0 there
    whole = np.vstack([ends[:1], np.eye(N - 1), ends[1:]])  # [N + 1, N - 1]
    L = 1e-4 * (D @ D @ whole)[1:N]
    f, slope = lambda t, u: L @ u - 5 * u**3 + 5 * u, lambda t, u: L + np.diag(5 - 15 * u**2)
    u, t, found = (x**2 * np.cos(np.pi * x))[1:N], 0.0, solve(4096, 800, 5, 512)
    to = 1 - np.abs(-1 + 2 * np.arange(512) / 512)  # interpolated there: x = 1 is the first of the grid
    weight = (-1.0) ** k / np.where(k % N == 0, 2, 1) / np.where(gap_to := (1 - to)[:, None] - x, gap_to, 1e-300)
    for row, tolerance in zip(range(1, 5), (1e-10, 1e-10, 1e-9, 1e-7)):
        u, t = solve_ivp(f, (t, row / 4), u, method="Radau", jac=slope, rtol=1e-9, atol=1e-9).y[:, -1], row / 4
        assert np.abs(weight @ (whole @ u) / weight.sum(1) - found[row]).max() < tolerance


def test_reference_is_kept(tmp_path, monkeypatch, capsys):
    small = dict(nt=11, nx=64, folder=tmp_path, modes=512, steps=100)
    t, x, u = reference(**small)
    assert (len(t), len(x), u.shape) == (11, 64, (11, 64)) and "at most" in capsys.readouterr().out
    assert np.allclose(u[0], x**2 * np.cos(np.pi * x))
    monkeypatch.setattr(exp_allen_cahn, "solve", None)
    assert np.array_equal(reference(**small)[2], u)
    monkeypatch.undo()
    (tmp_path / "reference_11_64_512_100.npz").write_bytes(b"garbage")
    assert np.array_equal(reference(**small)[2], u)
    with pytest.raises(ValueError, match="divide"):
        reference(12, 64)


def test_residuals_on_a_known_function(float64):
    """u = exp(-t) cos(pi x): u_t - 0.0001 u_xx + 5 u^3 - 5 u in closed form."""
    u = lambda x: torch.exp(-x[..., :1]) * torch.cos(math.pi * x[..., 1:])
    batch = draw(torch.Generator().manual_seed(0), 64, 8)
    value = u(batch["x"])[:, 0]
    r = residuals(u, batch)
    want = -value + 1e-4 * math.pi**2 * value + 5 * value**3 - 5 * value
    assert torch.allclose(r["res"], want, rtol=1e-12, atol=1e-12)
    x0 = batch["x0"][:, 1]
    assert torch.allclose(r["ic"], torch.cos(math.pi * x0) * (1 - x0**2), atol=1e-14)


def test_draws(float64):
    """Sorted by time, each time with its own x; uniform; initial points at t = 0, equispaced."""
    batch = draw(torch.Generator().manual_seed(3), 4096, 100)
    plain = exp_allen_cahn.uniform(OMEGA, 4096, torch.Generator().manual_seed(3))
    t = batch["x"][:, 0]
    assert (t.diff() >= 0).all()
    assert {tuple(p) for p in batch["x"].tolist()} == {tuple(p) for p in plain.tolist()}
    x0 = batch["x0"]
    assert (x0[:, 0] == 0).all() and torch.allclose(x0[:, 1].diff(), torch.tensor(0.02)) and x0[:, 1].abs().max() <= 1


def points(n, seed=0):
    return exp_allen_cahn.uniform(OMEGA, n, torch.Generator().manual_seed(seed))


def test_what_is_known(float64):
    """u(0, x) at t = 0; even and periodic; u_t - 1e-4 u_xx by jets as by nested autograd, also close to the kink, where
    u_t and 1e-4 u_xx are of size 1 and cancel."""
    x = points(200)
    start = x * torch.tensor([0.0, 1.0])
    assert torch.allclose(known(start)[:, 0], x[:, 1] ** 2 * torch.cos(math.pi * x[:, 1]), atol=1e-14)
    assert torch.allclose(known(x), known(x * torch.tensor([1.0, -1.0])), rtol=1e-14)
    x[:100, 1] = 1 - 0.01 * x[:100, 1].abs()
    x[:50, 0] *= 1e-3
    x.requires_grad_()
    (first,) = torch.autograd.grad(known(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 1].sum(), x)
    _, heat = exp_allen_cahn.jet(known, x.detach(), "t x", "t-1e-4*xx")
    assert torch.allclose(heat[:, 0], first[:, 0] - 1e-4 * second[:, 1], rtol=1e-9, atol=1e-9)


def test_the_kink_is_subtracted():
    """Second differences in x of the reference at t = 0.005: over 1000 at x = 1, where those of u - known(x) are like
    everywhere."""
    u = torch.tensor(solve(4096, 800, 201, 4096)[1])
    x = -1 + 2 * torch.arange(4096, dtype=torch.float64) / 4096
    rest = u - known(torch.stack([torch.full_like(x, 0.005), x], 1))[:, 0]
    bend = lambda f: (f.roll(1) - 2 * f + f.roll(-1)).abs() * 2048**2
    assert bend(u)[0] > 1000 and bend(rest).max() < 60 and bend(rest)[:100].max() < bend(rest).max()


def test_even_points():
    """spread(): in the half domain, sorted by time, in each of 100 boxes 10 of 1000 points to within 4 (independent
    points: up to 10 more)."""
    x = spread(torch.Generator().manual_seed(0), 1000)["x"]
    assert x.min() >= 0 and x.max() < 1 and (x[:, 0].diff() >= 0).all()
    boxes = torch.bincount((10 * x).long() @ torch.tensor([10, 1]), minlength=100)
    assert (boxes - 10).abs().max() <= 4


def test_networks_that_are_even_and_fitted(float64):
    """Even in x and of period 2. The fitted one starts as the trained one, also with factorized weights; it trains its
    output weights alone, and is linear in them."""
    x = points(20)
    for rwf in (None, (1.0, 0.1)):
        net = sfli(Even(3, 6, 3, rwf=rwf), OMEGA, gamma=2.0)
        fitted = sfli(Fitted(3, 6, 3, rwf=rwf), OMEGA, gamma=2.0)
        fitted.load_state_dict(net.state_dict())
        for f in (net, fitted):
            for y in (x * torch.tensor([1.0, -1.0]), x + torch.tensor([0.0, 2.0])):
                assert torch.allclose(f(x), f(y), atol=1e-13)
        assert torch.allclose(net(x), fitted(x), atol=1e-14)
        assert {k for k, p in fitted.named_parameters() if p.requires_grad} == {"out.weight", "out.bias"}
    z = [torch.randn_like(p) for p in fitted.out.parameters()]
    values = []
    for _ in range(3):
        values.append(fitted(x).detach())
        torch._foreach_add_([p.data for p in fitted.out.parameters()], z)
    assert (values[1] - values[0]).abs().max() > 1 and torch.allclose(values[2] - values[1], values[1] - values[0])


def test_fourier_features_of_an_even_network(float64):
    """--fourier takes effect there too."""
    recipe = dict(omega=OMEGA, gamma=None, out=1, periods=exp_allen_cahn.PERIODS, rwf=None, layers=2, width=6, first=None,
                  sfli=None, C=None)  # fmt: skip
    x, mirror = points(20), torch.tensor([1.0, -1.0])
    for arch in ("even", "fitted"):
        net = build(recipe | dict(arch=arch, fourier=2.0))
        assert isinstance(net.embed[1], FourierFeatures) and net.first[0].in_features == 6
        assert torch.allclose(net(x), net(x * mirror), atol=1e-13)
        assert isinstance(build(recipe | dict(arch=arch, fourier=None)).embed[0], exp_allen_cahn.Harmonics)


def test_fit_after_training(tmp_path, capsys):
    """A small network, 40 steps and the fit: a percent, then a tenth of that; resumed, nothing is left to do; load()
    gives the fitted network."""
    flags = ("--sfli --preset smoke --optimizer ng --arch even --kink --time-weight 4 --layers 3 --width 20 --batch 300 "
             f"--steps 40 --fit 3000 --no-plot --out {tmp_path}").split()
    exp_allen_cahn.main(flags)
    results = [json.loads((tmp_path / f"allen_cahn/sfli-gauss/seed0/{part}result.json").read_text())
               for part in ("", "fit/")]  # fmt: skip
    trained, fitted = (r["rel_l2_mean"] for r in results)
    assert trained < 3e-2 and fitted < 0.1 * trained
    exp_allen_cahn.main([*flags, "--resume"])
    assert f"sfli-gauss/fit rel_l2={fitted:.3e}" in capsys.readouterr().out
    code = f"from cli import load; print(type(load({str(tmp_path / 'allen_cahn/sfli-gauss/seed0')!r})).__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("Even\n"), done.stderr  # cli.py alone finds this script's network
    net = load(tmp_path / "allen_cahn/sfli-gauss/seed0/fit")
    small = dict(nt=11, nx=64, modes=512, steps=100)
    t, x, u = (torch.tensor(a) for a in reference(folder=tmp_path / "allen_cahn", **small))
    mesh = torch.stack(torch.meshgrid(t, x, indexing="ij"), -1).reshape(-1, 2)
    assert relative_l2(solution(net, True)(mesh)[:, 0], u.reshape(-1)) == pytest.approx(fitted, rel=1e-9)


def test_paper_preset_is_the_table():
    want = dict(steps=300_000, batch=8192, arch="pirate", layers=3, width=256, lr=1e-3, warmup=5000, decay=0.9,
                decay_every=5000, optimizer="adam")  # fmt: skip
    assert want.items() <= PAPER.items() and GAMMA["gauss"] == math.sqrt(10) and exp_allen_cahn.CHUNKS == 32
    named = "allen_cahn", "", exp_allen_cahn.PRESETS
    args = exp_allen_cahn.parse_args(*named, ["--preset", "laptop"], exp_allen_cahn.flags)
    assert args.optimizer == "ng" and args.arch == "even" and args.kink and args.fit
    args = exp_allen_cahn.parse_args(*named, ["--preset", "laptop", "--all"], exp_allen_cahn.flags)
    assert args.optimizer == "adam" and args.arch == "pirate" and not args.kink and not args.fit


def test_natural_gradient_solves_it(float64):
    """A small network, 200 steps, a few seconds: below one percent. Adam is at 0.99 after 5000 steps."""
    torch.manual_seed(0)
    net = MLP(3, 30, 4, embed=Periodic(2, {1: 2.0}))
    net = sfli(net, OMEGA, gamma=GAMMA["gauss"], generator=torch.Generator().manual_seed(0))
    x = -1 + 2 * torch.arange(64) / 64
    u = torch.tensor(solve(2048, 200, 11, 64))
    mesh = torch.stack(torch.meshgrid(torch.linspace(0, 1, 11), x, indexing="ij"), -1).reshape(-1, 2)
    error = lambda net: {"rel_l2": ((net(mesh)[:, 0] - u.reshape(-1)).norm() / u.norm()).item()}
    history = train(net, lambda g: draw(g, 400, 100), residuals, 200, optimizer="ng", lr=1.0, evaluate=error)
    assert history[0]["rel_l2"] > 0.5 and history[-1]["rel_l2"] < 1e-2


@pytest.mark.usefixtures("side_by_side")
@pytest.mark.parametrize("flags", ["--dtype float32", "--dtype float64 --optimizer ng"], ids=["adam", "ng"])
def test_sigkill_and_resume(flags, tmp_path):
    """Killed in the middle and resumed: parameters and history of the undisturbed run, bit for bit."""
    steps = 60
    arguments = f"--sfli --at --preset smoke --no-plot --save-seconds 1e-9 --steps {steps} {flags} --out".split()
    start = lambda out, *more: subprocess.Popen([sys.executable, "exp_allen_cahn.py", *arguments, str(out), *more],
                                                cwd=ROOT, stdout=subprocess.DEVNULL)  # fmt: skip
    whole, process = (start(tmp_path / run) for run in ("whole", "killed"))  # side by side
    path = tmp_path / "killed/allen_cahn/at-sfli-gauss/seed0/history.csv"
    until = time.monotonic() + 200
    while not (path.exists() and path.read_text().count("\n") > 20):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    killed = tmp_path / "killed/allen_cahn/at-sfli-gauss/seed0/checkpoint.pt"
    assert 10 < torch.load(killed, weights_only=True)["step"] < steps
    assert start(tmp_path / "killed", "--resume").wait(300) == 0 and whole.wait(300) == 0
    a, b = (torch.load(tmp_path / f"{run}/allen_cahn/at-sfli-gauss/seed0/checkpoint.pt", weights_only=True)
            for run in ("whole", "killed"))  # fmt: skip
    assert all(torch.equal(a["params"][k], b["params"][k]) for k in a["params"])
    strip = lambda rows: [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    assert strip(a["history"]) == strip(b["history"]) and len(a["history"]) == steps + 1


BAD = [
    ("--fourier 0", "--fourier"),
    ("--fourier 2 --sfli", "--fourier"),
    ("--fourier 2 --all", "--fourier"),
    ("--fourier 2 --width 15", "--width"),
    ("--all --at", "--at"),
    ("--at --batch 65", "--batch"),
    ("--all --batch 65", "--batch"),
    ("--arch cnn", "--arch"),
    ("--layers 0", "--layers"),
    ("--initial 0", "--initial"),
    ("--fit 100", "--fit"),
    ("--fit 100 --optimizer ng", "--fit"),
    ("--fit -1", "--fit"),
    ("--time-weight nan", "--time-weight"),
    ("--ic-weight 0", "--ic-weight"),
]


@pytest.mark.parametrize("flags,named", BAD)
def test_bad_input(flags, named, tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        exp_allen_cahn.main([*flags.split(), "--preset", "smoke", "--out", str(tmp_path / "out")])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and named in err and not (tmp_path / "out").exists()
