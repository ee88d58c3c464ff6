"""Example 4.4 (Figs. 8 and 9): the Allen-Cahn equation with a physics-informed network,

    u_t - 0.0001 u_xx + 5 u^3 - 5 u = 0,  u(0, x) = x^2 cos(pi x),  t in [0, 1],  x in [-1, 1] periodic.

    python exp_allen_cahn.py --sfli                   on a CPU: natural gradient, minutes; fig_ac.png
    python exp_allen_cahn.py --all                    Baseline, SFLI, AT, AT+SFLI, the paper's method: fig_ac_error.png
    python exp_allen_cahn.py --sfli --at --preset paper        one of the four at the paper's scale (a GPU)
    python exp_allen_cahn.py --fourier 2              the competitor: random Fourier features instead of SFLI

AT (advanced techniques): random weight factorization, NTK loss weights, causal weights.
The paper shows curves and states no error for this example. Ours, relative L2 error on 2 CPU cores: --sfli 2.7e-5,
2.8e-5, 2.6e-5 (seeds 0-2, 2.5 minutes each); standard first layer 5.0e-5, 3.1e-5, 2.7e-5.
--all, 12 000 steps of Adam: Baseline 1.5e-1, SFLI 4.3e-2, AT 4.2e-2, AT+SFLI 8.8e-3 (seed 0).
Minutes on 2 CPU cores: preset laptop 2.5, with --all 60 (on one core); smoke seconds; paper not timed (a GPU is meant).
"""
import math

# First: from here on Ctrl-C is answered in one line.
from cli import (answered, cached, check_chunks, configurations, curve, fail, figure, figure_folder, folder_of,
                 gamma_of, natural, network, parse_args, positive, relative_l2, run, run_folder, save_figure)
from common import Periodic, grid, jet, uniform, volume

import numpy as np
import torch

# Parameters --------------------------------------------------------------------------------------

OMEGA = [(0.0, 1.0), (-1.0, 1.0)]  # t, x
GAMMA = {"gauss": math.sqrt(10), "tanh": 8.0, "cos": 10.0}  # the paper uses gauss; others from Example 4.1
# Table 4. It does not say how many initial points: 512, as in jaxpi, which the paper follows.
PAPER = dict(steps=300_000, batch=8192, initial=512, near=0, ic_weight=1.0, arch="pirate", layers=3, width=256,
             lr=1e-3, warmup=5000, decay=0.9, decay_every=5000, optimizer="adam")
# On a CPU natural gradient with a small network; --all keeps the paper's method, scaled down. There the weight 100
# keeps Adam out of the state u = 0, in which it stays for 5000 steps with weight 1, with and without SFLI.
ABLATION = dict(steps=12_000, batch=1024, initial=256, near=0, ic_weight=100.0, arch="pirate", layers=2, width=128,
                lr=1e-3, warmup=500, decay=0.9, decay_every=1000, optimizer="adam")
NATURAL = dict(steps=800, batch=900, initial=200, near=100, ic_weight=1.0, arch="mlp", layers=4, width=50,
               optimizer="ng", decay=0.03, decay_every=800)  # the longest step falls from 1 to 0.03
PRESETS = {
    "paper": PAPER,
    "laptop": ABLATION | dict(optimizer="ng", all=ABLATION, ng=NATURAL),
    "smoke": PAPER | dict(steps=20, batch=64, initial=32, layers=1, width=16, warmup=5, decay_every=5),
}
PERIODS = {1: 2.0}  # of x
CHUNKS = 32  # of time, for the causal weights

# Reference ---------------------------------------------------------------------------------------


def solve(n, steps, nt, nx):
    """u [nt, nx] by n Fourier modes and ETDRK4 (Cox & Matthews 2002; coefficients by Kassam & Trefethen 2005).

    The periodic extension of u(0, x) has a kink at x = 1. Sampled, it would alias and spoil every digit beyond the
    sixth; so u(0, x) enters by its exact Fourier coefficients, 2 int_0^1 x^2 cos(pi x) cos(k pi x) dx."""
    k = np.arange(n // 2 + 1)
    moment = lambda m: np.where(m == 0, 1 / 3, 2 * (-1.0) ** m / (np.pi * np.where(m == 0, 1, m)) ** 2)
    v = n / 2 * (-1.0) ** k * (moment(k + 1) + moment(k - 1)) + 0j  # rfft of the values at x_j = -1 + 2 j / n
    h, L = 1 / steps, 5 - 1e-4 * (np.pi * k) ** 2
    z = h * L[:, None] + np.exp(1j * np.pi * (np.arange(32) + 0.5) / 32)  # a circle around h L
    mean = lambda f: h * f.mean(1).real
    Q = mean((np.exp(z / 2) - 1) / z)
    f1 = mean((-4 - z + np.exp(z) * (4 - 3 * z + z**2)) / z**3)
    f2 = mean((2 + z + np.exp(z) * (z - 2)) / z**3)
    f3 = mean((-4 - 3 * z - z**2 + np.exp(z) * (4 - z)) / z**3)
    E, half = np.exp(h * L), np.exp(h * L / 2)
    N = lambda v: -5 * np.fft.rfft(np.fft.irfft(v, n) ** 3)
    x = -1 + 2 * np.arange(nx) / nx
    u = [x**2 * np.cos(np.pi * x)]
    for step in range(1, steps + 1):
        Nv = N(v)
        a = half * v + Q * Nv
        Na = N(a)
        b = half * v + Q * Na
        Nb = N(b)
        c = half * a + Q * (2 * Nb - Nv)
        v = E * v + f1 * Nv + 2 * f2 * (Na + Nb) + f3 * N(c)
        if step % (steps // (nt - 1)) == 0:
            u.append(np.fft.irfft(v, n)[:: n // nx])
    return np.stack(u)


def reference(nt=201, nx=512, folder=None, modes=4096, steps=800):
    """t [nt], x [nx], u [nt, nx]; x = 1 is left out, being x = -1. Kept in `folder`. Six seconds, and the change on
    halving the step and doubling the modes is printed: 4e-10."""

    def compute():
        if steps % (nt - 1) or modes % nx:
            raise ValueError(f"reference: nt - 1 = {nt - 1} must divide {steps} and nx = {nx} must divide {modes}")
        coarse, fine = solve(modes, steps, nt, nx), solve(2 * modes, 2 * steps, nt, nx)
        print(f"reference: {nt} x {nx} points, {2 * modes} modes, {2 * steps} steps; half of both changes u by at most "
              f"{np.abs(coarse - fine).max():.0e}")
        return {"t": np.linspace(0, 1, nt), "x": -1 + 2 * np.arange(nx) / nx, "u": fine}

    shapes = {"t": (nt,), "x": (nx,), "u": (nt, nx)}
    data = cached(folder, f"reference_{nt}_{nx}" + (f"_{modes}_{steps}" if modes < 4096 else ""), shapes, compute)
    return data["t"], data["x"], data["u"]


# Problem -----------------------------------------------------------------------------------------


def residuals(net, batch):
    u, heat = jet(net, batch["x"], "t x", "t-1e-4*xx")  # u_t - 0.0001 u_xx
    x0 = batch["x0"]  # (0, x)
    return {"ic": net(x0)[:, 0] - x0[:, 1] ** 2 * torch.cos(math.pi * x0[:, 1]),
            "res": (heat + 5 * u**3 - 5 * u)[:, 0]}


def draw(generator, batch, initial, near=0):
    """`batch` uniform points, `near` of them moved to within 0.05 of x = 1, where u(0, x) has a kink, all sorted by
    time together with their x; `initial` equispaced ones at t = 0, shifted."""
    x = uniform(OMEGA, batch, generator)
    x[:near, 1] = torch.sign(x[:near, 1]) * (1 - 0.05 * x[:near, 1].abs())
    shift = torch.rand(1, generator=generator, device=generator.device, dtype=x.dtype)
    x0 = -1 + 2 / initial * (torch.arange(initial, device=x.device) + shift)
    return {"x": x[x[:, 0].argsort()], "x0": torch.stack([torch.zeros_like(x0), x0], 1)}


# Train and evaluate ------------------------------------------------------------------------------


def name(args):
    first = f"sfli-{args.sfli}" if args.sfli else f"fourier-{args.fourier:g}" if args.fourier else ""
    return "-".join(filter(None, ["at" if args.at else "", first])) or "baseline"


def fit(args):
    """Train one configuration; -> history and the prediction on the grid of the reference."""
    points = grid(OMEGA, 50).to(args.device)  # for the eps-rank
    gamma = gamma_of(args, GAMMA, OMEGA, points, volume(OMEGA), Periodic(2, PERIODS))
    small = dict(nt=11, nx=64, modes=512, steps=100) if args.preset == "smoke" else {}
    t, x, u = (torch.as_tensor(a, dtype=torch.get_default_dtype()) for a in reference(folder=folder_of(args), **small))
    mesh = torch.stack(torch.meshgrid(t, x, indexing="ij"), -1).to(args.device)  # [201, 512, 2]
    test, u_test = mesh.reshape(-1, 2), u.reshape(-1).to(args.device)

    recipe = network(args, OMEGA, gamma, periods=PERIODS, rwf=(1.0, 0.1) if args.at else None)
    options = dict(weights={"ic": args.ic_weight})
    options |= dict(weighting="ntk", causal=dict(terms=["res"], tol=1.0, chunks=CHUNKS)) if args.at else {}
    sample = lambda generator: draw(generator, args.batch, args.initial, args.near)
    evaluate = lambda net: {"rel_l2": relative_l2(net(test)[:, 0], u_test)}
    nets, history = run(args, recipe, sample, residuals, evaluate, points, volume(OMEGA), **options)
    with torch.no_grad():
        predicted = nets[0](test).reshape(u.shape).cpu()
    return history, (t, x, u, predicted)


# Plot --------------------------------------------------------------------------------------------


def plot_solution(t, x, u, predicted, path):
    """Fig. 8. The error is on a logarithmic scale: its peaks, at the kink of u(0, x) and on the fronts, would hide
    the rest."""
    fig, axes = figure(1, 3, size=(4.4, 3.2))
    from matplotlib.colors import LogNorm

    error = (u - predicted).abs()
    top = max(error.max().item(), 1e-12)
    panels = [("reference", u, dict(cmap="RdBu_r", vmin=-1, vmax=1)),
              ("prediction", predicted, dict(cmap="RdBu_r", vmin=-1, vmax=1)),
              ("absolute error", error.clamp(min=1e-4 * top), dict(norm=LogNorm(1e-4 * top, top)))]
    for ax, (title, field, colors) in zip(axes[0], panels):
        image = ax.pcolormesh(t, x, field.T, shading="nearest", rasterized=True, **colors)
        ax.set(title=title, xlabel="t")
        fig.colorbar(image, ax=ax)
    axes[0, 0].set_ylabel("x")
    save_figure(fig, path)


LABELS = {"baseline": "Baseline", "sfli-gauss": "SFLI", "at": "AT", "at-sfli-gauss": "AT+SFLI"}


def plot_error(histories, width, path):
    """Fig. 9, and below it the weights that AT logs."""
    weighted = {label: h for label, h in histories.items() if "causal_last" in h[0]}
    fig, axes = figure(2 if weighted else 1, 2, size=(5.2, 3.6))
    for color, (label, history) in zip(("black", "tab:blue", "tab:orange", "tab:red"), histories.items()):
        style = dict(color=color, label=LABELS.get(label, label))
        curve(axes[0, 0], history, "eps_rank", log=False, **style)
        curve(axes[0, 1], history, "rel_l2", **style)
        if label in weighted:
            curve(axes[1, 0], history, "weight_ic", **style | {"label": style["label"] + ", initial condition"})
            curve(axes[1, 0], history, "weight_res", ls="--", **style | {"label": style["label"] + ", equation"})
            curve(axes[1, 1], history, "causal_last", log=False, **style)
    axes[0, 0].set(ylabel="ε-rank of the last hidden layer", ylim=(0, 1.05 * width))
    axes[0, 1].set_ylabel("relative $L^2$ error")
    axes[0, 0].legend(fontsize=8)
    if weighted:
        axes[1, 0].set_ylabel("NTK weight")
        axes[1, 0].legend(fontsize=8)
        axes[1, 1].set(ylabel="causal weight of the last time chunk", ylim=(-0.02, 1.02))
    save_figure(fig, path)


def flags(cli):
    cli.add_argument("--at", action="store_true", help="advanced techniques: weight factorization, NTK, causal weights")
    cli.add_argument("--fourier", type=positive(float), metavar="SCALE", help="random Fourier features, not SFLI")
    cli.add_argument("--arch", choices=["pirate", "mlp"], help="PirateNet or MLP")
    cli.add_argument("--layers", type=positive(int), help="residual blocks of the PirateNet, layers of the MLP")
    cli.add_argument("--initial", type=positive(int), help="points on the initial condition")
    cli.add_argument("--near", type=natural, help="how many of the points lie near x = 1, where u(0, x) has a kink")
    cli.add_argument("--ic-weight", type=positive(float), help="weight of the initial loss; --at adapts it")


@answered()
def main(argv=None):
    args = parse_args("allen_cahn", __doc__, PRESETS, argv, flags)
    if args.all and args.at:
        fail("--all runs with and without AT; drop --at")
    if args.near > args.batch:
        fail(f"--near: {args.near} of {args.batch} points; use --near {args.batch} at most")
    if args.at or args.all:
        check_chunks(args, CHUNKS)
    choices = [dict(at=at, sfli=kind) for at in (False, True) for kind in (None, "gauss")]
    runs = configurations(args, choices, name, second_order=True)
    histories = {}
    for a in runs:
        histories[a.config], fields = fit(a)
        if not args.no_plot:
            plot_solution(*fields, run_folder(a) / "fig_ac.png")
    if not args.no_plot:
        plot_error(histories, args.width, figure_folder(args, runs) / "fig_ac_error.png")


if __name__ == "__main__":
    main()
