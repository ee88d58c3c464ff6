"""Example 4.6 (Fig. 12): decaying turbulence on the torus [0, 2 pi]^2 up to T = 10 with physics-informed networks,

    w_t + u . grad w = 0.01 Delta w,  div u = 0,  w = v_x - u_y,  periodic;  Re = 100.

    python exp_ns_torus.py --sfli                     on a CPU: preset laptop; fig_ns_torus.png
    python exp_ns_torus.py --all                      with and without SFLI
    python exp_ns_torus.py --sfli --preset paper      modified MLP 4 x 256, five windows of 100 000 steps (a GPU)
    python exp_ns_torus.py --sfli --ic random --seed 1         another flow of the same family

Time is cut into windows. Each has a network of its own, whose initial values are the last one's prediction at the end
of its window, as a Fourier series of 65 x 65 modes. rel_l2 is the relative L2 error of w on a 64 x 64 grid.
Laptop: 40 windows, each from the last one's network (--warm), the early ones with more steps (--fade), 256 neurons in
the first layer and 64 in the others (--first), exact initial values (--hard-ic) and a network for stream function and
vorticity (--formulation psi, u = psi_y, v = -psi_x) by SOAP.
Paper, error of w at T = 10: 8.99e-2 with SFLI, 2.96e-1 without. Ours, seed 0: 1.65e-1 with SFLI, 2.17e-1 without, both
with --first 64 --no-warm --steps 9000; the preset as it is has not been run up to T = 10.
Minutes on one CPU core: these 78 and 74; preset laptop about 85 by its first windows; smoke seconds; paper not timed (a
GPU is meant).
The initial vorticity in data/ is that of the paper, regenerated from jaxpi's recipe (maximal speed 3, log-normal
spectrum at k = 2, JAX key 0) and stored as Fourier modes: w = 2 Re sum_j c_j exp(i k_j . x), |k| <= 32.
"""
import argparse
import math
import zlib
from pathlib import Path

# First: from here on Ctrl-C is answered in one line.
from cli import (answered, begin, cached, check_chunks, configurations, fail, figure, figure_folder, folder_of,
                 gamma_of, lattice, network, parse_args, positive, relative_l2, run, run_folder, save_figure,
                 settings_of, world, write_json, write_rows)
from common import Periodic, jet, uniform, volume

import numpy as np
import torch
import torch.nn.functional as F

# Parameters --------------------------------------------------------------------------------------

NU, T = 0.01, 10.0
M = 32  # modes -M..M in either direction
GAMMA = {"gauss": math.sqrt(1.5), "tanh": 8.0, "cos": 10.0}  # the paper uses gauss; others from Example 4.1
# Table 6. steps is per window. It does not say how many initial points: as many as inside.
PAPER = dict(steps=100_000, batch=4096, initial=4096, windows=5, arch="modified", layers=4, width=256, lr=1e-3,
             decay=0.9, decay_every=2000, optimizer="adam", formulation="uv", hard_ic=False, warm=False, fade=None)
PRESETS = {
    "paper": PAPER,
    "laptop": PAPER | dict(steps=5000, batch=1024, windows=40, arch="mlp", layers=4, width=64, first=256, lr=2e-2,
                           warmup=100, decay=0.85, decay_every=200, optimizer="soap", formulation="psi", hard_ic=True,
                           warm=True, fade=5.0,
                           ng=dict(steps=100, batch=600, layers=3, decay=0.9, decay_every=5, fade=None)),
    "smoke": PAPER | dict(steps=4, batch=32, initial=16, windows=2, layers=1, width=8, decay_every=2),
}
PERIODS = {1: 2 * math.pi, 2: 2 * math.pi}  # of x and y
CHUNKS = 32  # of time, for the causal weights
GRID = 128  # points a side, from which a random subset is drawn wherever the initial fields are needed
TIMES = 4  # a window is looked at so often

# Fourier series: [fields, 65, 65], entry [:, M + k, M + l] belongs to exp(i (k x + l y)) ---------

K = np.arange(-M, M + 1)


def stream(w):
    """Modes of psi, w from those of w: -Delta psi = w."""
    k2 = K[:, None] ** 2 + K**2
    return np.stack([np.where(k2 == 0, 0, w / np.maximum(k2, 1)), w])


def velocity(w):
    """Modes of u, v, w from those of w: u = psi_y, v = -psi_x."""
    psi = stream(w)[0]
    return np.stack([1j * K * psi, -1j * K[:, None] * psi, w])


def modes(values):
    """Those of the field given by its values on a uniform grid of more than 2 M points a side."""
    n = len(values)
    return np.fft.fft2(values)[np.ix_(K % n, K % n)] / n**2


def initial_vorticity(ic, seed):
    """Modes of w at t = 0: the paper's, a user's (.npz with w on a uniform grid), or random."""
    if ic == "random":
        rng = np.random.default_rng(seed)
        k = np.hypot(K[:, None], K)
        # velocities with energy spectrum exp(-(ln k - ln 2)^2 / 2 s^2), s = 1/4, random phases
        size = np.where(k == 0, 0, np.exp(-((np.log(np.maximum(k, 0.5)) - math.log(2)) ** 2) / (4 * 0.25**2)))
        w = size * np.sqrt(np.maximum(k, 1)) * np.exp(2j * np.pi * rng.random(k.shape))
        w = w + w[::-1, ::-1].conj()  # real values
        fields = on_grid(velocity(w), 128)
        return w * 3 / np.hypot(fields[0], fields[1]).max()
    try:
        data = np.load(ic or Path(__file__).resolve().parent / "data" / "ns_torus_w0.npz")
        if not ic:
            w = np.zeros((2 * M + 1, 2 * M + 1), complex)
            k, c = data["k"].astype(int), data["c"]
            w[M + k[:, 0], M + k[:, 1]], w[M - k[:, 0], M - k[:, 1]] = c, c.conj()
            return w
        if np.iscomplexobj(data["w"]):
            fail(f"--ic: {ic} has complex w; store real values on a grid, not modes")
        values = np.asarray(data["w"], float)
    except KeyError:
        fail(f"--ic: {ic} has no array w")
    except Exception as e:
        fail(f"--ic: cannot read {ic or 'data/ns_torus_w0.npz'} ({e}); use random or a .npz file with w [x, y]")
    if values.ndim != 2 or values.shape[0] != values.shape[1] or len(values) <= 2 * M or not np.isfinite(values).all():
        fail(f"--ic: {ic} has w {values.shape}; w must be finite on a square grid of more than {2 * M} points a side")
    w = modes(values)
    w[M, M] = 0  # on a torus vorticity has mean zero
    fastest = np.hypot(*on_grid(velocity(w), 128)[:2]).max()
    if not 0 < fastest <= 30:
        fail(f"--ic: {ic} has speeds up to {fastest:.1e}; scale w so that they are at most 30 (the paper's flow: 3)")
    return w


def on_grid(series, n):
    """Values [fields, n, n] of the series on the grid x = 2 pi i / n."""
    e = np.exp(1j * np.outer(2 * np.pi * np.arange(n) / n, K))
    return (e @ series @ e.T).real


def derivatives_on_grid(series, order):
    """The grid's points "x" [GRID^2, 2], and there the series and its derivatives: "ab" is d^a/dx^a d^b/dy^b
    [GRID^2, fields], a + b <= order."""
    x = torch.as_tensor(2 * np.pi * np.arange(GRID) / GRID)
    out = {"x": torch.cartesian_prod(x, x)}
    for a in range(order + 1):
        for b in range(order + 1 - a):
            values = on_grid(series * (1j * K[:, None]) ** a * (1j * K) ** b, GRID)
            out[f"{a}{b}"] = torch.as_tensor(values.reshape(len(series), -1).T.copy())
    return {k: v.to(torch.get_default_dtype()) for k, v in out.items()}


# Reference ---------------------------------------------------------------------------------------


def solve(w, times, n, rate):
    """w [times, n, n]: pseudo-spectral, 2/3 rule, Runge-Kutta 4 with the viscous term as integrating factor and at
    least `rate` steps per unit of time."""
    from scipy import fft

    k, l = fft.fftfreq(n, 1 / n)[:, None], np.arange(n // 2 + 1)
    k2 = k**2 + l**2
    keep, over = (np.abs(k) < n / 3) & (l < n / 3), 1 / np.maximum(k2, 1)
    full = np.zeros((n, n), complex)
    full[np.ix_(K % n, K % n)] = w * n**2
    w, now, out = full[:, : n // 2 + 1] * keep, 0.0, []
    forth, back = lambda f: fft.rfft2(f, workers=-1), lambda f: fft.irfft2(f, (n, n), workers=-1)

    def N(w):
        """-u . grad w = (d_yy - d_xx) uv + d_xy (u^2 - v^2), as div u = 0."""
        u, v = back(1j * l * over * w), back(-1j * k * over * w)
        return keep * ((k * k - l * l) * forth(u * v) - k * l * forth(u * u - v * v))

    for t in times:
        steps = math.ceil((t - now) * rate - 1e-9)
        h = (t - now) / max(steps, 1)
        e, half = np.exp(-NU * k2 * h), np.exp(-NU * k2 * h / 2)
        for _ in range(steps):
            a = N(w)
            b = N(half * (w + h / 2 * a))
            c = N(half * w + h / 2 * b)
            d = N(e * w + h * half * c)
            w = e * w + h / 6 * (e * a + 2 * half * (b + c) + d)
        now = t
        out.append(back(w))
    return np.stack(out)


def reference(times, n=128, w0=None, folder=None, size=384, rate=320):
    """x, y [n], w [times, x, y], from the modes w0 (default: the paper's). Kept in `folder`. `size`: points a
    side of the solver. Measured up to T = 10: twice as many steps change w by at most 7e-7 (256 points a side), twice
    as many points by 1.3e-11 (160 steps per unit of time)."""
    w0 = initial_vorticity(None, 0) if w0 is None else w0
    if size % n:
        raise ValueError(f"reference: {n} points a side must divide the {size} of the solver")
    key = zlib.crc32(np.concatenate([np.ravel(w0).view(float), times, [n, size, rate]]).tobytes())

    def compute():
        print(f"reference: {len(times)} times, {size} x {size} points, {rate} steps per unit of time ..", flush=True)
        return {"w": solve(w0, times, size, rate)[:, :: size // n, :: size // n]}

    x = 2 * np.pi * np.arange(n) / n
    return x, x, cached(folder, f"reference_{key:08x}", {"w": (len(times), n, n)}, compute)["w"]


# Problem -----------------------------------------------------------------------------------------


def ansatz(net, hard_ic, scale):
    """What the network stands for: its fields, or with --hard-ic what they change by since t = 0: t * scale * network,
    where t runs from 0 to 1 over the window."""
    return (lambda z: z[:, :1] * (net(z) * scale)) if hard_ic else net


def residuals(formulation, hard_ic, rate=1.0):
    """residuals(net, batch) on points (t, x, y). With --hard-ic the batch holds the initial fields and their
    derivatives, as derivatives_on_grid() names them. t is time * rate. Numbers of the window, in the batch too so
    that all windows share one compiled step: scale_k of field k in the ansatz, and size_w, size_1, in which the
    residuals of w_t and of first derivatives are measured."""
    scales = lambda batch: torch.stack([batch["scale_0"], batch["scale_1"]])
    third = f"{rate!r}*tx-{NU}*xxx-{NU}*xyy {rate!r}*ty-{NU}*xxy-{NU}*yyy"  # of v and u: w_t - nu Delta w

    def uv(net, batch):
        q, q_x, q_y, q_xx, q_xy, q_yy, heat_x, heat_y = jet(ansatz(net, hard_ic, scales(batch)), batch["x"], "t x y",
                                                            f"x y xx xy yy {third}")
        if hard_ic:
            q, q_x, q_y = q + batch["00"], q_x + batch["10"], q_y + batch["01"]
            q_xx, q_xy, q_yy = q_xx + batch["20"], q_xy + batch["11"], q_yy + batch["02"]
            heat_x = heat_x - NU * (batch["30"] + batch["12"])
            heat_y = heat_y - NU * (batch["21"] + batch["03"])
        w_x, w_y = q_xx[:, 1] - q_xy[:, 0], q_xy[:, 1] - q_yy[:, 0]
        r = {"rw": (heat_x[:, 1] - heat_y[:, 0] + q[:, 0] * w_x + q[:, 1] * w_y) / batch["size_w"],
             "rc": (q_x[:, 0] + q_y[:, 1]) / batch["size_1"]}
        if hard_ic:
            return r
        q, q_x, q_y = jet(net, batch["x0"], "t x y", "x y")
        u, v, w = batch["q0"].unbind(1)
        return r | {"u_ic": q[:, 0] - u, "v_ic": q[:, 1] - v, "w_ic": q_x[:, 1] - q_y[:, 0] - w}

    def psi(net, batch):
        q, q_x, q_y, laplacian, q_t = jet(ansatz(net, hard_ic, scales(batch)), batch["x"], "t x y",
                                          f"x y xx+yy {rate!r}*t-{NU}*xx-{NU}*yy")
        if hard_ic:
            q, q_x, q_y, second = q + batch["00"], q_x + batch["10"], q_y + batch["01"], batch["20"] + batch["02"]
            laplacian, q_t = laplacian + second, q_t - NU * second
        r = {"rw": (q_t[:, 1] + q_y[:, 0] * q_x[:, 1] - q_x[:, 0] * q_y[:, 1]) / batch["size_w"],
             "rp": (laplacian[:, 0] + q[:, 1]) / batch["size_1"]}
        if hard_ic:
            return r
        q = net(batch["x0"]) - batch["q0"]
        return r | {"psi_ic": q[:, 0], "w_ic": q[:, 1]}

    return uv if formulation == "uv" else psi


def draw(generator, args, omega, known):
    """Uniform points sorted by time and, among the grid's, those of the initial losses; or with --hard-ic a lattice
    with its points in space moved to the grid's, where the initial fields are known."""
    if args.hard_ic:
        z = lattice(3, args.batch, generator)
        i, j = (z[:, 1:] * GRID).long().clamp(max=GRID - 1).unbind(1)
        at = {key: value[i * GRID + j] for key, value in known.items()}
        return at | {"x": torch.cat([z[:, :1].to(at["x"]), at["x"]], 1)}
    x = uniform(omega, args.batch, generator)
    k = torch.randint(len(known["x"]), (args.initial,), generator=generator, device=generator.device)
    return {"x": x[x[:, 0].argsort()], "x0": F.pad(known["x"][k], (1, 0)), "q0": known["00"][k]}


# Train and evaluate ------------------------------------------------------------------------------


def predict(net, args, initial, scale, t, n):
    """u, v, w or psi, w [fields, n, n] at time t of the window on a uniform grid."""
    like = next(net.parameters())
    x = torch.arange(n, device=like.device, dtype=like.dtype) * (2 * math.pi / n)
    z = F.pad(torch.cartesian_prod(x, x), (1, 0), value=t)
    with torch.no_grad():
        if args.formulation == "psi":
            q = ansatz(net, args.hard_ic, scale)(z)
        else:
            q, q_x, q_y = jet(ansatz(net, args.hard_ic, scale), z, "t x y", "x y")
            q = torch.cat([q, q_x[:, 1:] - q_y[:, :1]], 1)
    q = q.T.reshape(-1, n, n)
    return q + torch.as_tensor(on_grid(initial, n)).to(q) if args.hard_ic else q


def hand_over(end, formulation):
    """Modes of the next initial fields from the last ones on a grid; psi follows from w."""
    return stream(modes(end[-1])) if formulation == "psi" else np.stack([modes(f) for f in end])


def sizes(initial, length, args):
    """The numbers that residuals() wants in the batch: how much the initial fields change by advection over the window
    (psi: half of what u does, as k = 2), how fast w does, and a third of w; all 1 without --hard-ic."""
    scale, size = (1.0, 1.0), (1.0, 1.0)
    if args.hard_ic:
        uvw = velocity(initial[-1])
        f, f_x, f_y = (on_grid(part, 96) for part in (uvw, 1j * K[:, None] * uvw, 1j * K * uvw))
        rms = lambda f: np.sqrt(np.mean(f**2, axis=(1, 2))).tolist()
        u, v, w = rms(f[0] * f_x + f[1] * f_y)
        scale, size = ((u / 2, w) if args.formulation == "psi" else (u, v)), (w, rms(f)[2] / 3)
        scale = [length * s for s in scale]
    return {"scale_0": scale[0], "scale_1": scale[1], "size_w": size[0], "size_1": size[1]}


def steps_of(args):
    """Steps of each window: args.steps on average, less from window to window, by a factor e over args.fade. The flow
    multiplies early errors, so that the early windows are worth more steps."""
    share = [math.exp(-k * T / args.windows / args.fade) if args.fade else 1.0 for k in range(args.windows)]
    return [max(1, round(args.steps * s * args.windows / sum(share))) for s in share]


def name(args):
    first = f"sfli-{args.sfli}" if args.sfli else "baseline"
    return first if not args.ic else f"{first}-{Path(args.ic).stem}" + (f"-{args.seed}" if args.ic == "random" else "")


def train_window(args, k, steps, initial, w, omega, points, gamma, before):
    """Train the network of window k (from 0) from the modes `initial`, starting with --warm from the network `before`.
    w [TIMES + 1, x, y] is the reference in the window. -> network, history, errors of w at its TIMES, and the function
    predict(t, n)."""
    length = T / args.windows
    known = derivatives_on_grid(initial if args.formulation == "psi" or not args.hard_ic else initial[:2],
                                (2 if args.formulation == "psi" else 3) if args.hard_ic else 0)
    known = {key: value.to(args.device) for key, value in known.items()}
    numbers = sizes(initial, length, args)
    scale = torch.tensor([numbers["scale_0"], numbers["scale_1"]], device=args.device)

    def errors(net):
        return [relative_l2(predict(net, args, initial, scale, j / TIMES, 64)[-1].reshape(-1), w[j].reshape(-1))
                for j in range(1, TIMES + 1)]

    def evaluate(net):
        e = errors(net)
        return {"rel_l2": e[-1], "rel_l2_window": sum(e) / len(e)}

    stretched = dict(warmup=args.warmup * steps / args.steps, decay_every=args.decay_every * steps / args.steps)
    a = argparse.Namespace(**vars(args) | stretched | dict(steps=steps))
    terms = ["rw", "rp" if args.formulation == "psi" else "rc"]  # both share the smaller of their causal weights
    nets, history = run(a, network(args, omega, gamma, out=2, periods=PERIODS, rwf=args.rwf),
                        lambda g: draw(g, args, omega, known), residuals(args.formulation, args.hard_ic, 1 / length),
                        evaluate, points, volume(omega), part=f"window{k + 1}", start=before if args.warm else None,
                        weighting="grad_norm" if args.causal else "fixed",
                        causal=dict(terms=terms, tol=1.0, chunks=CHUNKS) if args.causal else None,
                        constants=lambda step: numbers)
    predicted = lambda t, n: predict(nets[0], args, initial, scale, t, n).double().cpu().numpy()
    return nets[0], history, errors(nets[0]), predicted


def fit(args, w0):
    """Train the windows one after the other. -> rows of errors over time, and x, w and predicted w [x, y] at T."""
    folder, length = folder_of(args), T / args.windows
    times = [round(length * (k + j / TIMES), 10) for k in range(args.windows) for j in range(1, TIMES + 1)]
    small = dict(size=64, rate=40) if args.preset == "smoke" else {}
    x, _, w = reference([0.0, *times], 64, w0, folder, **small)
    w = torch.as_tensor(w, dtype=torch.get_default_dtype(), device=args.device)
    omega = [(0.0, 1.0), (0.0, 2 * math.pi), (0.0, 2 * math.pi)]  # time from 0 to 1 over the window, as in jaxpi
    points = uniform(omega, 2500, torch.Generator().manual_seed(3)).to(args.device)  # for the eps-rank
    gamma = gamma_of(args, GAMMA, omega, points, volume(omega), Periodic(3, PERIODS))
    initial = stream(w0) if args.formulation == "psi" else velocity(w0)
    rows, seconds, ranks, net = [{"t": 0.0, "rel_l2": 0.0}], 0.0, [], None
    if world()[0] == 0:
        begin(run_folder(args), settings_of(args), args.resume)
    for k, steps in enumerate(steps_of(args)):
        inside = w[k * TIMES : (k + 1) * TIMES + 1]
        net, history, errors, predicted = train_window(args, k, steps, initial, inside, omega, points, gamma, net)
        seconds += history[-1]["seconds"]
        ranks.append((history[0]["eps_rank"], history[-1]["eps_rank"]))
        rows += [{"t": t, "rel_l2": e} for t, e in zip(times[k * TIMES :], errors)]
        if world()[0] == 0:
            write_rows(run_folder(args) / "errors.csv", rows)
        initial = hand_over(predicted(1.0, 96), args.formulation)
    paper = {"sfli-gauss": 8.99e-2, "baseline": 2.96e-1}.get(args.config)
    result = {"experiment": "ns_torus", "config": args.config, "preset": args.preset, "seed": args.seed,
              "rel_l2": rows[-1]["rel_l2"], "windows": args.windows, "steps": args.steps, "seconds": seconds,
              "eps_rank": ranks, "width": args.width, "argv": args.argv, "paper": paper}
    if world()[0] == 0:
        write_json(run_folder(args) / "result.json", result)
    print(f"RESULT ns_torus {args.config} rel_l2={rows[-1]['rel_l2']:.3e} eps_rank={ranks[0][0]}→{ranks[-1][1]}/"
          f"{args.width} seconds={seconds:.1f}", flush=True)
    return rows, (x, w[-1].cpu().numpy(), predicted(1.0, 64)[-1])


# Plot --------------------------------------------------------------------------------------------

LABELS = {"sfli-gauss": "SFLI", "baseline": "without SFLI"}


def plot(results, path):
    """Fig. 12: w at T, reference and predictions, their errors below; and the error over time."""
    fig, axes = figure(2, 1 + len(results), size=(4.2, 3.6))
    x, w, _ = next(iter(results.values()))[1]
    top = np.abs(w).max()

    def show(ax, field, title, **colors):
        fig.colorbar(ax.pcolormesh(x, x, field.T, shading="nearest", rasterized=True, **colors), ax=ax)
        ax.set(title=title, xlabel="x", ylabel="y", aspect="equal")

    show(axes[0, 0], w, f"w at t = {T:g}, reference", cmap="RdBu_r", vmin=-top, vmax=top)
    worst = max(np.abs(p - w).max() for _, (_, _, p) in results.values())
    for k, (label, (rows, (_, _, predicted))) in enumerate(results.items(), 1):
        shown = LABELS.get(label, label)
        show(axes[0, k], predicted, f"{shown}, error {rows[-1]['rel_l2']:.1e}", cmap="RdBu_r", vmin=-top, vmax=top)
        show(axes[1, k], np.abs(predicted - w), f"{shown}, absolute error", vmin=0, vmax=worst)
        axes[1, 0].plot([r["t"] for r in rows[1:]], [r["rel_l2"] for r in rows[1:]],
                        color="tab:red" if "sfli" in label else "black", label=shown)
    axes[1, 0].set(xlabel="t", ylabel="relative $L^2$ error of w", yscale="log")
    axes[1, 0].legend(fontsize=8)
    save_figure(fig, path)


def flags(cli):
    cli.add_argument("--ic", metavar="FILE", help="initial vorticity: random, or .npz with w [x, y] on a uniform grid")
    cli.add_argument("--windows", type=positive(int), help="time windows; --steps is per window, on average")
    cli.add_argument("--fade", type=positive(float), metavar="TIME",
                     help="steps per window fall by a factor e over this time; laptop 5, otherwise all alike")
    cli.add_argument("--arch", choices=["modified", "pirate", "mlp"], help="modified MLP, PirateNet or MLP")
    cli.add_argument("--layers", type=positive(int), help="layers, or residual blocks of the PirateNet")
    cli.add_argument("--initial", type=positive(int), help="points of the initial losses")
    cli.add_argument("--formulation", choices=["uv", "psi"],
                     help="network for u, v with third derivatives, or for psi, w with -Delta psi = w as a residual")
    cli.add_argument("--warm", action=argparse.BooleanOptionalAction, help="start windows from the last network")
    cli.add_argument("--hard-ic", action=argparse.BooleanOptionalAction, help="exact initial values: q0 + t * network")


@answered()
def main(argv=None):
    args = parse_args("ns_torus", __doc__, PRESETS, argv, flags)
    args.causal = not args.hard_ic and args.optimizer != "ng"  # and gradient-norm weights, RWF: the paper's means
    args.rwf = (1.0, 0.1) if args.causal else None
    if args.seeds > 1:
        fail("--seeds: windows are handed over one seed at a time; use --seeds 1 and one --seed after the other")
    if args.causal:
        check_chunks(args, CHUNKS)
    w0 = initial_vorticity(args.ic, args.seed)
    runs = configurations(args, [dict(sfli=kind) for kind in (None, "gauss")], name, second_order=True)
    results = {a.config: fit(a, w0) for a in runs}
    if not args.no_plot:
        plot(results, figure_folder(args, runs) / "fig_ns_torus.png")


if __name__ == "__main__":
    main()
