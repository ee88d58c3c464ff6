"""Which kind and which C: the four kinds with C = 0.5, 1, 2 and the standard first layer on problems of other people's
choosing and two of the paper's, five seeds each, stacked in one training.

    python tests/bench_kinds.py                       all that is not yet in results/kinds, one JSON per row
    python tests/bench_kinds.py --problem burgers     one problem
    python tests/bench_kinds.py --table               the Markdown table of the JSON files, without training
    python tests/bench_kinds.py --smoke               two steps of everything

Each problem has one setting, chosen on the standard first layer and the same for every row: MLP 3 x 50, Adam, learning
rate 2e-3 falling to 2e-4 over the run, fresh points every step, fixed weights. Hat layers have no second derivative:
they are left out where the equation has one.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import nn

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))
import exp_allen_cahn  # noqa: E402
from cli import commit, relative_l2, sfli_generator  # noqa: E402
from common import KINDS, MLP, Periodic, Schedule, eps_rank, grid, jet, sfli, train, uniform, volume  # noqa: E402
from kernels import cpu  # noqa: E402
from kernels.checkpoint import atomically  # noqa: E402

SEEDS = [0, 1, 2, 3, 4]
NETWORK = dict(width=50, layers=3)
PI = math.pi


def on(omega, sides, n, generator):
    """n points on the sides [(axis, value), ...] of the box, taken in turn."""
    x = uniform(omega, n, generator)
    for k, (axis, value) in enumerate(sides):
        x[k :: len(sides), axis] = value
    return x


def sides(omega, axes):
    return [(k, value) for k in axes for value in omega[k]]


# Problems: omega, sample, residuals, test points and values there, steps, weights -------------------------------------


def burgers(nu=0.01 / PI):
    """u_t + u u_x - nu u_xx = 0, u(0, x) = -sin pi x, u(t, +-1) = 0: Raissi, Perdikaris, Karniadakis (2019)."""
    omega = [(0.0, 1.0), (-1.0, 1.0)]
    edge = [(0, 0.0)] * 2 + sides(omega, [1])
    sample = lambda g: {"x": uniform(omega, 192, g), "xb": on(omega, edge, 64, g)}

    def residuals(net, batch):
        u, u_x, heat = jet(net, batch["x"], "t x", f"x t-{nu}*xx")
        return {"res": (heat + u * u_x)[:, 0], "bc": net(batch["xb"])[:, 0] + torch.sin(PI * batch["xb"][:, 1])}

    x = grid(omega, 80)
    return dict(omega=omega, sample=sample, residuals=residuals, x=x, u=cole_hopf(x.double(), nu), weights={"bc": 10.0})


def cole_hopf(x, nu, nodes=200):
    """u = -int sin(pi y) f(y) K dy / int f(y) K dy, f = exp(-cos(pi y) / (2 pi nu)), K the heat kernel at time t, by
    Gauss-Hermite quadrature."""
    z, w = (torch.from_numpy(a) for a in np.polynomial.hermite.hermgauss(nodes))
    y = x[:, 1:] - z * (4 * nu * x[:, :1]).sqrt()  # [N, nodes]
    f = w * torch.exp(-(1 + torch.cos(PI * y)) / (2 * PI * nu))
    return -(torch.sin(PI * y) * f).sum(1) / f.sum(1)


def poisson():
    """-Delta u = 14 pi^2 u*, u* = sin(pi x) sin(2 pi y) sin(3 pi z) on the unit cube, u = 0 on its faces."""
    omega, size = [(0.0, 1.0)] * 3, 14 * PI**2
    exact = lambda x: torch.sin(PI * x[:, 0]) * torch.sin(2 * PI * x[:, 1]) * torch.sin(3 * PI * x[:, 2])
    sample = lambda g: {"x": uniform(omega, 192, g), "xb": on(omega, sides(omega, range(3)), 96, g)}

    def residuals(net, batch):
        _, laplacian = jet(net, batch["x"], "x y z", "xx+yy+zz")
        return {"res": laplacian[:, 0] / size + exact(batch["x"]), "bc": net(batch["xb"])[:, 0]}

    x = grid(omega, 20)
    return dict(omega=omega, sample=sample, residuals=residuals, x=x, u=exact(x), weights={"bc": 0.1})


def oscillator(w0=20.0, delta=2.0):
    """u'' + 2 delta u' + w0^2 u = 0, u(0) = 1, u'(0) = 0 on [0, 1]: the underdamped oscillator, three periods."""
    omega, w = [(0.0, 1.0)], math.sqrt(w0**2 - delta**2)
    exact = lambda t: torch.exp(-delta * t) * (torch.cos(w * t) + delta / w * torch.sin(w * t))
    sample = lambda g: {"t": uniform(omega, 128, g), "t0": torch.zeros(1, 1)}

    def residuals(net, batch):
        u, u_t, u_tt = (v[:, 0] for v in jet(net, batch["t"], "t", "t tt"))
        v, v_t = (v[:, 0] for v in jet(net, batch["t0"], "t", "t"))
        return {"res": (u_tt + 2 * delta * u_t) / w0**2 + u, "ic": v - 1, "ic_t": v_t / w0}

    x = grid(omega, 2000)
    return dict(omega=omega, sample=sample, residuals=residuals, x=x, u=exact(x[:, 0]))


class Inverse(MLP):
    """u(t) and beside it the unknown k, a second column."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.k = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        u = super().forward(x)
        return torch.cat([u, 0 * u + self.k], -1)


def inverse(k=2.5):
    """u' = -k u on [0, 2], k unknown, from u at ten points; the error is that of k, which starts from 1."""
    omega, points = [(0.0, 2.0)], torch.linspace(0, 2, 10)[:, None]
    sample = lambda g: {"t": uniform(omega, 128, g), "points": points}

    def residuals(net, batch):
        q, q_t = jet(net, batch["t"], "t", "t")
        data = net(batch["points"])[:, 0] - torch.exp(-k * batch["points"][:, 0])
        return {"res": q_t[:, 0] + q[:, 1] * q[:, 0], "data": data}

    error = lambda net: abs(net.k.item() - k) / k
    return dict(omega=omega, sample=sample, residuals=residuals, x=grid(omega, 2000), error=error, net=Inverse, order=1)


def helmholtz(k=4 * PI):
    """Delta u + k^2 u = -k^2 u*, u* = sin(k x) sin(k y) on the unit square, u = 0 on its sides: the demo of DeepXDE."""
    omega = [(0.0, 1.0)] * 2
    exact = lambda x: torch.sin(k * x[:, 0]) * torch.sin(k * x[:, 1])
    sample = lambda g: {"x": uniform(omega, 192, g), "xb": on(omega, sides(omega, range(2)), 64, g)}

    def residuals(net, batch):
        u, laplacian = (v[:, 0] for v in jet(net, batch["x"], "x y", "xx+yy"))
        return {"res": laplacian / k**2 + u + exact(batch["x"]), "bc": net(batch["xb"])[:, 0]}

    x = grid(omega, 80)
    return dict(omega=omega, sample=sample, residuals=residuals, x=x, u=exact(x), weights={"bc": 0.1})


def kuramoto(T=0.1):
    """u_t + a u u_x + b u_xx + c u_xxxx = 0, periodic on [0, 2 pi], u(0, x) = cos x (1 + sin x), a = 100 / 16,
    b = 100 / 16^2, c = 100 / 16^4: Wang, Sankaran, Perdikaris (2024), here the first of its windows."""
    omega, a, b, c = [(0.0, T), (0.0, 2 * PI)], 100 / 16, 100 / 16**2, 100 / 16**4
    initial = lambda x: torch.cos(x) * (1 + torch.sin(x))
    sample = lambda g: {"x": uniform(omega, 128, g), "x0": on(omega, [(0, 0.0)], 64, g)}

    def residuals(net, batch):
        u, u_x, linear = (v[:, 0] for v in jet(net, batch["x"], "t x", f"x t+{b}*xx+{c}*xxxx"))
        return {"res": (linear + a * u * u_x) * T, "ic": net(batch["x0"])[:, 0] - initial(batch["x0"][:, 1])}

    n, times = 256, np.linspace(0, T, 41)
    s, m = torch.arange(n) * (2 * PI / n), np.arange(n // 2 + 1)
    hat = np.fft.rfft(np.eye(n), axis=0)
    linear = np.fft.irfft((b * m**2 - c * m**4)[:, None] * hat, n, axis=0)  # -b u_xx - c u_xxxx
    slope = np.fft.irfft((1j * m * (m < n // 3))[:, None] * hat, n, axis=0)  # u_x, with the 2/3 rule
    rhs = lambda t, u: linear @ u - a / 2 * slope @ u**2
    jacobian = lambda t, u: linear - a * slope * u
    u = solve_ivp(rhs, (0, T), initial(s.double()).numpy(), "Radau", times, rtol=1e-9, atol=1e-11, jac=jacobian).y.T
    x = torch.cartesian_prod(torch.tensor(times, dtype=s.dtype), s[::2])
    return dict(omega=omega, sample=sample, residuals=residuals, x=x, u=torch.from_numpy(u[:, ::2].ravel()),
                weights={"ic": 10.0}, periods={1: 2 * PI})


def fit():
    """Example 4.1: cos x cos y + cos 10 x cos 10 y on [-1, 1]^2, no derivatives."""
    omega = [(-1.0, 1.0)] * 2
    f = lambda x: torch.cos(x).prod(1) + torch.cos(10 * x).prod(1)
    x = grid(omega, 80)
    return dict(omega=omega, sample=lambda g: {"x": uniform(omega, 256, g)}, x=x, u=f(x), order=0,
                residuals=lambda net, batch: {"fit": net(batch["x"])[:, 0] - f(batch["x"])})


def allen_cahn():
    """Example 4.4 without the advanced techniques, as exp_allen_cahn.py has it."""
    omega, ac = exp_allen_cahn.OMEGA, exp_allen_cahn
    u = torch.from_numpy(ac.solve(2048, 400, 41, 128).ravel())
    x = torch.cartesian_prod(torch.linspace(0, 1, 41), -1 + torch.arange(128) / 64)
    return dict(omega=omega, sample=lambda g: ac.draw(g, 192, 64), residuals=ac.residuals, x=x, u=u,
                weights={"ic": 100.0}, periods=ac.PERIODS)


PROBLEMS = {f.__name__: f for f in (burgers, poisson, oscillator, inverse, helmholtz, kuramoto, fit, allen_cahn)}
STEPS = dict(burgers=12_000, poisson=10_000, oscillator=12_000, inverse=8000, helmholtz=8000, kuramoto=8000, fit=8000,
             allen_cahn=12_000)

# Train, write, print --------------------------------------------------------------------------------------------------


def networks(problem, kind, C):
    """One network per seed; later layers are the same with and without SFLI."""
    nets, omega, periods = [], problem["omega"], problem.get("periods", {})
    for seed in SEEDS:
        torch.manual_seed(seed)
        d, embed = len(omega) + len(periods), Periodic(len(omega), periods) if periods else None
        net = problem.get("net", MLP)(d, NETWORK["width"], NETWORK["layers"], embed=embed)
        nets.append(net if kind == "baseline" else sfli(net, omega, kind, C=C, generator=sfli_generator(seed)))
    return nets


def measure(name, problem, kind, C, steps):
    """Train the five networks of one row; -> what its JSON holds."""
    nets, points, size = networks(problem, kind, C), problem["x"], volume(problem["omega"])
    error = problem.get("error", lambda net: relative_l2(net(problem["x"])[:, 0], problem["u"]))
    ranks = lambda: [eps_rank(net, points, measure=size) for net in nets]
    lr = dict(lr=2e-3, decay=0.1, every=steps)
    row = dict(problem=name, kind=kind, C=C, seeds=SEEDS, eps_rank_initial=ranks())
    start, diverged = time.perf_counter(), None
    try:
        train(nets, problem["sample"], problem["residuals"], steps, lr=Schedule(**lr), weights=problem.get("weights"),
              seeds=SEEDS, compile=cpu.compile_options("cpu"))
    except FloatingPointError as e:
        diverged = str(e)
    seconds = time.perf_counter() - start
    settings = NETWORK | dict(steps=steps, optimizer="adam", lr=lr, weights=problem.get("weights"))
    settings |= {"points": {k: len(v) for k, v in problem["sample"](torch.Generator()).items()}}
    return row | dict(eps_rank_final=ranks() if not diverged else None, error=[error(net) for net in nets],
                      diverged=diverged, seconds=round(seconds, 1), settings=settings, torch=torch.__version__,
                      threads=torch.get_num_threads(), commit=commit(),
                      command=f"python tests/bench_kinds.py --problem {name}")


def table(folder):
    """Mean over the seeds and the worst of them, a column per problem."""
    rows = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    at = {(r["problem"], r["kind"], r["C"]): r for r in rows}
    names = [name for name in PROBLEMS if any(r["problem"] == name for r in rows)]
    print("| first layer | C | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 2))
    Cs = sorted({r["C"] for r in rows} - {None})
    for kind, C in [("baseline", None)] + [(kind, C) for kind in KINDS for C in Cs]:
        cells = []
        for name in names:
            r = at.get((name, kind, C))
            cells.append("–" if r is None else f"{np.mean(r['error']):.1e} ({max(r['error']):.1e})")
        if set(cells) != {"–"}:
            print(f"| {kind} | {C or ''} | " + " | ".join(cells) + " |")


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--problem", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    cli.add_argument("--kind", nargs="+", choices=["baseline", *KINDS], default=["baseline", *KINDS])
    cli.add_argument("--C", nargs="+", type=float, default=[0.5, 1.0, 2.0])
    cli.add_argument("--out", type=Path, default=HERE / "results" / "kinds")
    cli.add_argument("--smoke", action="store_true", help="two steps of everything, nothing written")
    cli.add_argument("--table", action="store_true", help="print the table")
    args = cli.parse_args()
    if args.table:
        return table(args.out)
    torch.set_flush_denormal(True)
    cpu.keep_memory()
    for name in args.problem:
        problem = PROBLEMS[name]()
        for kind, C in [(k, C) for k in args.kind for C in ([None] if k == "baseline" else args.C)]:
            path = args.out / f"{name}-{kind}{'' if C is None else f'-C{C:g}'}.json"
            if path.exists() and not args.smoke or kind == "hat" and problem.get("order", 2) > 1:
                continue
            row = measure(name, problem, kind, C, 2 if args.smoke else STEPS[name])
            if not args.smoke:
                atomically(path, lambda tmp: tmp.write_text(json.dumps(row, indent=1) + "\n"))
            print(f"{path.stem}: error {np.mean(row['error']):.2e}, worst {max(row['error']):.2e}, rank "
                  f"{row['eps_rank_initial']} -> {row['eps_rank_final']}, {row['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
