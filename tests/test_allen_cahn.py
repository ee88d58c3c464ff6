"""Example 4.4: the reference against another integrator, the residual on a known function, the draws, SIGKILL."""

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
from common import MLP, Periodic, sfli, train
from exp_allen_cahn import GAMMA, OMEGA, PAPER, draw, reference, residuals, solve


def test_reference_converges():
    """Halving the step alone, then doubling the modes alone, changes u by less than 1e-8 at every point."""
    u = solve(4096, 800, 201, 512)
    assert np.abs(u - solve(4096, 400, 201, 512)).max() < 1e-8
    assert np.abs(u - solve(8192, 800, 201, 512)).max() < 1e-8


def test_reference_against_finite_differences():
    """Second-order differences on [0, 1] (u is even and 2-periodic: u_x = 0 at both ends), SciPy's integrator,
    extrapolated in the grid spacing: an independent solution. Tolerance: what extrapolation leaves, 2e-6."""

    def lines(n):
        x, h = np.linspace(0, 1, n + 1), 1 / n

        def f(t, u):
            ends = np.concatenate([u[1:2], u, u[-2:-1]])
            return 1e-4 * (ends[2:] - 2 * u + ends[:-2]) / h**2 - 5 * u**3 + 5 * u

        options = dict(method="LSODA", t_eval=[0.5, 1.0], rtol=1e-9, atol=1e-10, lband=1, uband=1)
        return solve_ivp(f, (0, 1), x**2 * np.cos(np.pi * x), **options).y[:: n // 256].T  # [2, 257]

    coarse, fine = lines(1024), lines(2048)
    u = solve(4096, 800, 201, 512)[[100, 200], 256:]  # x = 0 .. 1 - 1/256
    assert np.abs(u - (4 * fine - coarse)[:, :-1] / 3).max() < 5e-6


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
    near = draw(torch.Generator().manual_seed(3), 4096, 100, near=1000)["x"]
    assert (near[:, 1].abs() >= 0.95).sum() > 1000 and near[:, 1].abs().max() <= 1 and (near[:, 0].diff() >= 0).all()
    x0 = batch["x0"]
    assert (x0[:, 0] == 0).all() and torch.allclose(x0[:, 1].diff(), torch.tensor(0.02)) and x0[:, 1].abs().max() <= 1


def test_paper_preset_is_the_table():
    want = dict(steps=300_000, batch=8192, arch="pirate", layers=3, width=256, lr=1e-3, warmup=5000, decay=0.9,
                decay_every=5000, optimizer="adam")  # fmt: skip
    assert want.items() <= PAPER.items() and GAMMA["gauss"] == math.sqrt(10) and exp_allen_cahn.CHUNKS == 32
    named = "allen_cahn", "", exp_allen_cahn.PRESETS
    args = exp_allen_cahn.parse_args(*named, ["--preset", "laptop"], exp_allen_cahn.flags)
    assert args.optimizer == "ng" and args.arch == "mlp"
    args = exp_allen_cahn.parse_args(*named, ["--preset", "laptop", "--all"], exp_allen_cahn.flags)
    assert args.optimizer == "adam" and args.arch == "pirate"


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
    ("--near 65", "--near"),
    ("--near -1", "--near"),
    ("--ic-weight 0", "--ic-weight"),
]


@pytest.mark.parametrize("flags,named", BAD)
def test_bad_input(flags, named, tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        exp_allen_cahn.main([*flags.split(), "--preset", "smoke", "--out", str(tmp_path / "out")])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and named in err and not (tmp_path / "out").exists()
