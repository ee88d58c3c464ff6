"""Example 4.4 (Figs. 8 and 9): the Allen-Cahn equation with a physics-informed network,

    u_t - 0.0001 u_xx + 5 u^3 - 5 u = 0,  u(0, x) = x^2 cos(pi x),  t in [0, 1],  x in [-1, 1] periodic.

    python exp_allen_cahn.py --sfli                   on a CPU: natural gradient, minutes; fig_ac.png
    python exp_allen_cahn.py --all                    Baseline, SFLI, AT, AT+SFLI, the paper's method: fig_ac_error.png
    python exp_allen_cahn.py --sfli --at --preset paper        one of the four at the paper's scale (a GPU)
    python exp_allen_cahn.py --fourier 2              the competitor: random Fourier features instead of SFLI

AT (advanced techniques): random weight factorization, NTK loss weights, causal weights.
The laptop preset: an even network with exact initial values and the kink of u(0, x) subtracted (--kink), natural
gradient, then a linear least-squares fit of output weights that vary with t and x (--fit).
The paper shows curves and states no error for this example. Ours, relative L2 error on 2 CPU cores, seeds 20, 21, 22:
--sfli 1.1e-6, 2.0e-6, 1.4e-6; standard first layer 2.2e-6, 2.2e-6, 1.2e-6, with twice the steps to 1e-2.
--all, 12 000 steps of Adam: Baseline 1.5e-1, SFLI 4.3e-2, AT 4.2e-2, AT+SFLI 8.8e-3 (seed 0).
Minutes on 2 CPU cores: preset laptop 2, with --all 60 (on one core); smoke seconds; paper not timed (a GPU is meant).
"""
import argparse
import math

# First: from here on Ctrl-C is answered in one line.
from cli import (ARCHITECTURES, answered, cached, check_chunks, configurations, curve, fail, figure, figure_folder,
                 folder_of, gamma_of, lattice, natural, network, number, parse_args, positive, relative_l2, run,
                 run_folder, save_figure)
from common import MLP, Dense, Periodic, grid, jet, uniform, volume

import numpy as np
import torch
from torch import nn

# Parameters --------------------------------------------------------------------------------------

OMEGA = [(0.0, 1.0), (-1.0, 1.0)]  # t, x
GAMMA = {"gauss": math.sqrt(10), "tanh": 8.0, "cos": 10.0}  # the paper uses gauss; others from Example 4.1
# Table 4. It does not say how many initial points: 512, as in jaxpi, which the paper follows.
PAPER = dict(steps=300_000, batch=8192, initial=512, ic_weight=1.0, arch="pirate", layers=3, width=256, lr=1e-3,
             warmup=5000, decay=0.9, decay_every=5000, optimizer="adam", kink=False, time_weight=0.0, fit=0)
# On a CPU natural gradient with a small network; --all keeps the paper's method, scaled down. There the weight 100
# keeps Adam out of the state u = 0, in which it stays for 5000 steps with weight 1, with and without SFLI.
ABLATION = PAPER | dict(steps=12_000, batch=1024, initial=256, ic_weight=100.0, layers=2, width=128, warmup=500,
                        decay_every=1000)
NATURAL = dict(steps=300, batch=1024, arch="even", layers=4, width=50, kink=True, time_weight=4.0, fit=20_000,
               optimizer="ng")
FIT = dict(arch="fitted", steps=5, damping=1e-13)  # linear least squares: the step in full
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


def initial(x):
    return x**2 * torch.cos(math.pi * x)


def known(x):
    """What needs no network, [B, 1]: exact at t = 0, where it is u(0, x), and singular as u is at x = 1.

    Continued by its period, u(0, x) has a kink there, -1 + 2 |s| + .. at the distance s. v = u + 1 is small and obeys
    v_t = eps v_xx - 10 v + 15 v^2 - 5 v^3, so that the kink becomes 2 e^(-10 t) h(s, t) + smoother terms, h the heat
    flow of |s|, eps = 1e-4:

        h = s erf(s / q) + q e^(-s^2 / q^2) / sqrt(pi),  q = sqrt(4 eps t);  h_t = eps h_ss,  h(s, 0) = |s|

    sigma = (2 / pi) cos(pi x / 2) = |s| + O(|s|^3) takes the place of s, so that all is periodic:
    u(0, x) - 2 sigma + 2 e^(-10 t) h(sigma, t)."""
    t, x = x[..., :1], x[..., 1:]
    sigma, q = torch.cos(x * (math.pi / 2)) * (2 / math.pi), torch.sqrt(4e-4 * t + 1e-30)
    z = sigma / q
    h = sigma * torch.erf(z) + q * torch.exp(-z * z) / math.sqrt(math.pi)
    return initial(x) - 2 * sigma + 2 * torch.exp(-10 * t) * h


def solution(net, kink):
    """u as a function of x [B, 2]: the network, or with `kink` what is known + t * network."""
    return (lambda x: known(x) + x[..., :1] * net(x)) if kink else net


def residuals(net, batch, kink=False, time_weight=0.0):
    """Perturbations of u = 0 grow as e^(5 t), so that early residuals count most: the equation is multiplied by
    e^(-time_weight t)."""
    t = batch["x"][:, 0]
    u, heat = jet(solution(net, kink), batch["x"], "t x", "t-1e-4*xx")  # u_t - 0.0001 u_xx
    r = {"res": torch.exp(-time_weight * t) * (heat + 5 * u**3 - 5 * u)[:, 0]}
    return r if kink else {"ic": net(batch["x0"])[:, 0] - initial(batch["x0"][:, 1])} | r


def draw(generator, batch, initial):
    """`batch` uniform points sorted by time together with their x; `initial` equispaced ones at t = 0, shifted."""
    x = uniform(OMEGA, batch, generator)
    shift = torch.rand(1, generator=generator, device=generator.device, dtype=x.dtype)
    x0 = -1 + 2 / initial * (torch.arange(initial, device=x.device) + shift)
    return {"x": x[x[:, 0].argsort()], "x0": torch.stack([torch.zeros_like(x0), x0], 1)}


def spread(generator, batch):
    """`batch` points of a lattice with x >= 0, for an even network, sorted by time."""
    x = lattice(2, batch, generator)
    return {"x": x[x[:, 0].argsort()]}


# Networks ----------------------------------------------------------------------------------------


class Harmonics(nn.Module):
    """t, cos(pi x), cos(2 pi x)"""

    def forward(self, x):
        z = x[..., 1:] * math.pi
        return torch.cat([x[..., :1], torch.cos(z), torch.cos(2 * z)], -1)


class Even(MLP):
    """MLP of these, or with --fourier of random features of these, even in x and of period 2 as u is."""

    def __init__(self, d, n, L, out=1, rwf=None, embed=None, first=None):
        features = list(embed)[1:] if isinstance(embed, nn.Sequential) else []  # of cli.build(), behind Periodic
        super().__init__(d, n, L, out, rwf, nn.Sequential(Harmonics(), *features), first)


class Fitted(Even):
    """A trained network whose output weights vary: sum_m p_m(t, x) (beta_m . y_L + b_m), where y_L are the features of
    the last hidden layer and p_m = T_j(2 t - 1) cos(k pi x), j < 12, k < 7, with Chebyshev's T_j. What is trained, beta
    and b, enters linearly: natural gradient with more points than these solves for them in a step or two."""

    def __init__(self, d, n, L, out=1, rwf=None, embed=None, first=None):
        super().__init__(d, n, L, out, rwf, embed, first)
        self.out = Dense(self.out.in_features, 84)

    def forward(self, x):
        t, z = 2 * x[..., :1] - 1, x[..., 1:] * math.pi
        T = [0 * t + 1, t]
        while len(T) < 12:
            T.append(2 * t * T[-1] - T[-2])
        waves = torch.cat([torch.cos(k * z) for k in range(7)], -1)  # [B, 7]
        p = torch.cat([waves * T_j for T_j in T], -1)  # [B, 84]
        return (super().forward(x) * p).sum(-1, keepdim=True)

    def load_state_dict(self, state, *args, **kwargs):
        """Of such a network, or of the trained one, with which it then agrees. Hidden layers stay as loaded."""
        state = dict(state)
        if len(state["out.bias"]) == 1:
            beta, b = torch.zeros_like(self.out.weight), torch.zeros_like(self.out.bias)
            old = state.pop("out.g", 1) * state["out.weight"]
            beta[0], b[0] = old[0], state["out.bias"][0]  # p_0 = 1
            state |= {"out.weight": beta, "out.bias": b}
        super().load_state_dict(state, *args, **kwargs)
        for part in (self.first, self.blocks):
            part.requires_grad_(False)


ARCHITECTURES.update(even=Even, fitted=Fitted)

# Train and evaluate ------------------------------------------------------------------------------


def name(args):
    first = f"sfli-{args.sfli}" if args.sfli else f"fourier-{args.fourier:g}" if args.fourier else ""
    return "-".join(filter(None, ["at" if args.at else "", first])) or "baseline"


def fit(args):
    """Train one configuration; -> history and the prediction on the grid of the reference."""
    points = grid(OMEGA, 50).to(args.device)  # for the eps-rank
    embed = Harmonics() if args.arch == "even" else Periodic(2, PERIODS)
    gamma = gamma_of(args, GAMMA, OMEGA, points, volume(OMEGA), embed)
    small = dict(nt=11, nx=64, modes=512, steps=100) if args.preset == "smoke" else {}
    t, x, u = (torch.as_tensor(a, dtype=torch.get_default_dtype()) for a in reference(folder=folder_of(args), **small))
    mesh = torch.stack(torch.meshgrid(t, x, indexing="ij"), -1).to(args.device)  # [201, 512, 2]
    test, u_test = mesh.reshape(-1, 2), u.reshape(-1).to(args.device)
    equation = lambda net, batch: residuals(net, batch, args.kink, args.time_weight)
    evaluate = lambda net: {"rel_l2": relative_l2(solution(net, args.kink)(test)[:, 0], u_test)}

    def train(args, **options):
        recipe = network(args, OMEGA, gamma, periods=PERIODS, rwf=(1.0, 0.1) if args.at else None)
        even = args.arch in ("even", "fitted")
        sample = lambda g: spread(g, args.batch) if even else draw(g, args.batch, args.initial)
        return run(args, recipe, sample, equation, evaluate, points, volume(OMEGA), **options)

    options = {} if args.kink else dict(weights={"ic": args.ic_weight})
    options |= dict(weighting="ntk", causal=dict(terms=["res"], tol=1.0, chunks=CHUNKS)) if args.at else {}
    nets, history = train(args, **options)
    if args.fit:
        seconds = history[-1]["seconds"]
        nets, more = train(argparse.Namespace(**vars(args) | FIT | dict(batch=args.fit)), part="fit", start=nets[0])
        history += [row | {"step": args.steps + row["step"], "seconds": seconds + row["seconds"]} for row in more[1:]]
        print(f"training and fit: {history[-1]['seconds']:.1f} seconds")
    with torch.no_grad():
        predicted = solution(nets[0], args.kink)(test).reshape(u.shape).cpu()
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
            weighed = [row for row in history if "causal_last" in row]  # without those of --fit
            for term, line, text in (("ic", "-", ", initial condition"), ("res", "--", ", equation")):
                if f"weight_{term}" in weighed[0]:
                    curve(axes[1, 0], weighed, f"weight_{term}", ls=line, **style | {"label": style["label"] + text})
            curve(axes[1, 1], weighed, "causal_last", log=False, **style)
    axes[0, 0].set(ylabel="ε-rank of the last hidden layer", ylim=(0, 1.05 * width))
    axes[0, 1].set_ylabel("relative $L^2$ error")
    axes[0, 0].legend(fontsize=8)
    if weighted:
        axes[1, 0].set_ylabel("NTK weight")
        axes[1, 0].legend(fontsize=8)
        axes[1, 1].set(ylabel="causal weight of the last time chunk", ylim=(-0.02, 1.02))
    save_figure(fig, path)


not_negative = number(float, lambda v: 0 <= v < math.inf, "a number from 0 on")


def flags(cli):
    cli.add_argument("--at", action="store_true", help="advanced techniques: weight factorization, NTK, causal weights")
    cli.add_argument("--fourier", type=positive(float), metavar="SCALE", help="random Fourier features, not SFLI")
    cli.add_argument("--arch", choices=["pirate", "mlp", "even"], help="PirateNet, MLP, or an MLP even in x, as u is")
    cli.add_argument("--layers", type=positive(int), help="residual blocks of the PirateNet, layers of the MLP")
    cli.add_argument("--initial", type=positive(int), help="points on the initial condition")
    cli.add_argument("--ic-weight", type=positive(float), help="weight of the initial loss; --at adapts it")
    cli.add_argument("--kink", action=argparse.BooleanOptionalAction,
                     help="exact initial values, and the kink that they have at x = 1 subtracted")
    cli.add_argument("--time-weight", type=not_negative, metavar="RATE", help="the equation at t counts e^(-RATE t)")
    cli.add_argument("--fit", type=natural, metavar="POINTS",
                     help="at the end fit output weights that vary with t and x, at so many points; 0: none")


@answered()
def main(argv=None):
    args = parse_args("allen_cahn", __doc__, PRESETS, argv, flags)
    if args.all and args.at:
        fail("--all runs with and without AT; drop --at")
    if args.fit and (args.optimizer != "ng" or args.arch != "even"):
        fail("--fit is natural gradient on an even network; add --optimizer ng --arch even, or use --fit 0")
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
