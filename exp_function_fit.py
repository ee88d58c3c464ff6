"""Example 4.1 (Fig. 6): fit f(x) = cos x1 cos x2 + cos 10 x1 cos 10 x2 on [-1, 1]^2.
Baseline against SFLI with Gaussian, tanh, cosine and hat first layers: eps-rank and loss over training.

    python exp_function_fit.py --all                  all five, fig_fun.png
    python exp_function_fit.py --sfli cos             one of them
    python exp_function_fit.py --figure staircase     Figs. 1 and 2: f = sin 20x, rank layer by layer
    python exp_function_fit.py --figure basis         Fig. 3: first-layer outputs, n = 5

The paper shows curves and states no error for this example. Ours (20 000 steps, seeds 0-2, 2 CPU cores, 4 minutes in
all): baseline 5.8e-1, gauss 1.5e-2, tanh 2.1e-2, cos 6.0e-3, hat 1.1e-2; initial eps-rank 6 against 90-100 of 100.
Minutes on 2 CPU cores, --all: preset laptop and paper, which are the same, 2.3; smoke seconds.
"""
import math

# First: from here on Ctrl-C is answered in one line.
from cli import (COLORS, answered, configurations, curve, fail, figure, figure_folder, folder_of, gamma_of, network,
                 parse_args, relative_l2, run, save_figure)
from common import KINDS, grid, sfli, uniform, volume

import torch

# Parameters --------------------------------------------------------------------------------------

# Width, layers, batch and gamma are those of Table 3; it does not state the number of steps.
PAPER = dict(steps=20_000, batch=250, lr=1e-3, optimizer="adam")
PRESETS = {"paper": PAPER, "laptop": PAPER, "smoke": PAPER | dict(steps=20, batch=50)}
WIDTH = {"fun": 100, "staircase": 50, "basis": 5}
LAYERS = {"fun": 3, "staircase": 4}
OMEGA = {"fun": [(-1.0, 1.0)] * 2, "staircase": [(-1.0, 1.0)], "basis": [(-1.0, 1.0)]}
# The table's Gauss column (10 here, 420 in Example 4.2) is gamma^2: with gamma = 420 the bumps of the latter would be
# narrower than the gaps between its 50 centres, and no network learns from them; with sqrt(420) it does.
# The Tanh, Cos and Hat columns are gamma.
GAMMA = {"gauss": math.sqrt(10), "tanh": 8.0, "cos": 10.0, "hat": 5.0}
# Fig. 1 has no SFLI; --figure staircase --sfli takes Eq. (3.3) with C = 1, and so does Fig. 3.


# Problem -----------------------------------------------------------------------------------------


def target(which, x):
    if which == "staircase":
        return torch.sin(20 * x[:, 0])
    return torch.cos(x[:, 0]) * torch.cos(x[:, 1]) + torch.cos(10 * x[:, 0]) * torch.cos(10 * x[:, 1])


# Train and evaluate ------------------------------------------------------------------------------


def fit(args):
    """Train one configuration of args.figure; -> history."""
    which, omega = args.figure, OMEGA[args.figure]
    test = grid(omega, 10_000 if len(omega) == 1 else 100).to(args.device)  # 10^4 points
    points = grid(omega, 2_500 if len(omega) == 1 else 50).to(args.device)  # for the eps-rank
    gamma = gamma_of(args, GAMMA if which == "fun" else dict.fromkeys(KINDS), omega, points, volume(omega))
    f_test = target(which, test)

    def sample(generator):  # fresh points every step
        return {"x": uniform(omega, args.batch, generator)}

    def residuals(net, batch):
        return {"fit": net(batch["x"])[:, 0] - target(which, batch["x"])}

    def evaluate(net):
        return {"rel_l2": relative_l2(net(test)[:, 0], f_test)}

    _, history = run(args, network(args, omega, gamma), sample, residuals, evaluate, points, volume(omega))
    return history


def name(args):
    return ("" if args.figure == "fun" else f"{args.figure}-") + (f"sfli-{args.sfli}" if args.sfli else "baseline")


# Plot --------------------------------------------------------------------------------------------


def plot_fun(histories, width, path):
    fig, axes = figure(1, 2, size=(5.2, 3.6))
    for kind, history in histories.items():
        name = kind or "baseline"
        curve(axes[0, 0], history, "eps_rank", name if kind is None else f"SFLI-{name}", log=False, color=COLORS[name])
        curve(axes[0, 1], history, "loss", color=COLORS[name])
    axes[0, 0].set(ylabel="ε-rank of the last hidden layer", ylim=(0, 1.05 * width))
    axes[0, 0].legend(fontsize=8)
    axes[0, 1].set_ylabel("training loss")
    save_figure(fig, path)


def plot_staircase(history, width, path):
    fig, axes = figure(1, 2, size=(5.2, 3.6))
    curve(axes[0, 0], history, "loss", color="tab:red")
    axes[0, 0].set_ylabel("training loss", color="tab:red")
    right = axes[0, 0].twinx()
    curve(right, history, "eps_rank", log=False, color="tab:blue")
    right.set_ylabel("ε-rank of the last hidden layer", color="tab:blue")
    right.locator_params(axis="y", integer=True)
    for k in range(1, LAYERS["staircase"] + 1):
        curve(axes[0, 1], history, f"eps_rank_{k}", f"layer {k}", log=False)
    axes[0, 1].set(ylabel="ε-rank", ylim=(0, 1.05 * width))
    axes[0, 1].legend(fontsize=8)
    save_figure(fig, path)


def plot_basis(args, path):
    """First-layer outputs under SFLI in one dimension, gamma by Eq. (3.3) unless --gamma is given."""
    (domain,) = OMEGA["basis"]
    x = torch.linspace(*domain, 500)[:, None]
    fig, axes = figure(1, len(KINDS), size=(3.2, 2.6))
    for ax, kind in zip(axes[0], KINDS):
        generator = torch.Generator().manual_seed(args.seed)
        first = sfli(torch.nn.Linear(1, args.width), [domain], kind, args.gamma, args.C or 1.0, generator)
        ax.plot(x, first(x).detach())
        ax.set(title=kind, xlabel="x")
    axes[0, 0].set_ylabel("first-layer outputs")
    save_figure(fig, path)


@answered()
def main(argv=None):
    args = parse_args("function_fit", __doc__, PRESETS, argv, lambda cli: cli.add_argument(
        "--figure", default="fun", choices=["fun", "staircase", "basis"], help="which figure (default fun)"))
    if args.all and args.figure != "fun":
        fail(f"--all belongs to --figure fun; drop it for --figure {args.figure}")
    if args.figure == "basis" and (args.sfli or args.resume or args.no_plot):
        fail("--figure basis draws all kinds and trains nothing; drop --sfli, --resume and --no-plot")
    if args.figure == "basis" and args.gamma == "auto":
        fail("--gamma auto counts ranks for training; give a number for --figure basis")
    args.width = args.width or (20 if args.preset == "smoke" and args.figure != "basis" else WIDTH[args.figure])
    if args.figure == "basis":
        return plot_basis(args, folder_of(args, "fig_basis.png"))
    args.layers = LAYERS[args.figure]
    runs = configurations(args, [dict(sfli=kind) for kind in (None, *KINDS)], name)
    histories = {a.sfli: fit(a) for a in runs}
    if args.no_plot:
        return
    if args.figure == "staircase":
        plot_staircase(histories[args.sfli], args.width, figure_folder(args, runs) / "fig_staircase.png")
    else:
        plot_fun(histories, args.width, figure_folder(args, runs) / "fig_fun.png")


if __name__ == "__main__":
    main()
