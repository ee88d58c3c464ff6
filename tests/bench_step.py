"""Milliseconds per training step: our loop against plain PyTorch with nested autograd, step by step in turn.

    python tests/bench_step.py                                      the table of the README
    python tests/bench_step.py ac --peer "python peer_jax.py"       and a peer printing min=...ms, before and after
    python tests/bench_step.py seeds                                five stacked seeds against five runs
    python tests/bench_step.py sfli                                 SFLI's first layer against the standard one

Run on an idle machine; only the ratios mean anything. Both sides train the same network on the same problem; ours is
train() with everything it does, compiled; plain is the loop one writes by hand: torch.autograd.grad with
create_graph=True for every derivative, torch.optim.Adam as it comes.
"""

import argparse
import copy
import functools
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import exp_high_dim  # noqa: E402
import exp_ns_torus  # noqa: E402
import exp_parabolic  # noqa: E402
from common import MLP, ModifiedMLP, Periodic, PirateNet, jet, sfli, train, uniform  # noqa: E402
from kernels import cpu  # noqa: E402


def grad(y, x):
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


# Each problem: network, sample(generator), residuals with jets, residuals with nested autograd.


def fit():
    """Example 1: MLP 3 x 100, batch 250, no derivatives."""
    omega = [(-1.0, 1.0)] * 2
    f = lambda x: torch.cos(x[:, 0]) * torch.cos(x[:, 1]) + torch.cos(10 * x[:, 0]) * torch.cos(10 * x[:, 1])
    residuals = lambda net, batch: {"fit": net(batch["x"])[:, 0] - f(batch["x"])}
    return (
        sfli(MLP(2, 100, 3), omega, gamma=math.sqrt(10)),
        lambda g: {"x": uniform(omega, 250, g)},
        residuals,
        residuals,
    )


def ac(batch=1024):
    """Allen-Cahn: PirateNet 3 x 256, second derivatives, 512 initial points."""
    omega = [(0.0, 1.0), (-1.0, 1.0)]
    x0 = torch.stack([torch.zeros(512), torch.linspace(-1, 1, 512)], 1)
    u0 = x0[:, 1] ** 2 * torch.cos(math.pi * x0[:, 1])

    def ours(net, batch):
        u, heat = jet(net, batch["x"], "t x", "t-1e-4*xx")  # u_t - 1e-4 u_xx
        return {"ic": net(x0)[:, 0] - u0, "res": (heat + 5 * u**3 - 5 * u)[:, 0]}

    def nested(net, batch):
        x = batch["x"].requires_grad_()
        u = net(x)[:, 0]
        du = grad(u, x)
        u_xx = grad(du[:, 1], x)[:, 1]
        return {"ic": net(x0)[:, 0] - u0, "res": du[:, 0] - 1e-4 * u_xx + 5 * u**3 - 5 * u}

    net = PirateNet(3, 256, 3, rwf=(1.0, 0.1), embed=Periodic(2, {1: 2.0}))
    return sfli(net, omega, gamma=math.sqrt(10)), lambda g: {"x": uniform(omega, batch, g)}, ours, nested


def ldc(batch=1024, nu=1 / 3200):
    """Lid-driven cavity: PirateNet 6 x 256, three outputs, Laplacians, 4 x 256 wall points."""
    omega = [(0.0, 1.0)] * 2
    s, zero, one = torch.linspace(0, 1, 256), torch.zeros(256), torch.ones(256)
    walls = torch.cat([torch.stack(w, 1) for w in [(s, one), (s, zero), (zero, s), (one, s)]])
    lid = torch.cat([1 - torch.cosh(50 * (s - 0.5)) / math.cosh(25), torch.zeros(768)])

    def assemble(net, u, v, u_x, v_x, p_x, u_y, v_y, p_y, lap_u, lap_v):
        q = net(walls)
        return {
            "lid": q[:, 0] - lid,
            "wall": q[:, 1],
            "ru": u * u_x + v * u_y + p_x - nu * lap_u,
            "rv": u * v_x + v * v_y + p_y - nu * lap_v,
            "rc": u_x + v_y,
        }

    def ours(net, batch):
        q, q_x, q_y, lap = jet(net, batch["x"], "x y", "x y xx+yy")
        return assemble(net, *q[:, :2].unbind(1), *q_x.unbind(1), *q_y.unbind(1), *lap[:, :2].unbind(1))

    def nested(net, batch):
        x = batch["x"].requires_grad_()
        u, v, p = net(x).unbind(1)
        du, dv, dp = grad(u, x), grad(v, x), grad(p, x)
        lap = lambda d: grad(d[:, 0], x)[:, 0] + grad(d[:, 1], x)[:, 1]
        return assemble(net, u, v, du[:, 0], dv[:, 0], dp[:, 0], du[:, 1], dv[:, 1], dp[:, 1], lap(du), lap(dv))

    net = sfli(PirateNet(2, 256, 6, out=3, rwf=(1.0, 0.1)), omega, gamma=10.0)
    return net, lambda g: {"x": uniform(omega, batch, g)}, ours, nested


def ns(batch=1024):
    """Torus: modified MLP 4 x 256 for u and v, third derivatives, 1024 initial points, weights and causality apart."""
    args = argparse.Namespace(batch=batch, initial=1024, hard_ic=False, formulation="uv")
    omega = [(0.0, 2.0)] + [(0.0, 2 * math.pi)] * 2
    known = exp_ns_torus.derivatives_on_grid(exp_ns_torus.velocity(exp_ns_torus.initial_vorticity(None, 0)), 0)
    ones = dict.fromkeys(("scale_0", "scale_1", "size_w", "size_1"), torch.tensor(1.0))

    def nested(net, batch):
        def fields(x):
            u, v = net(x).unbind(1)
            du, dv = grad(u, x), grad(v, x)
            return u, v, dv[:, 1] - du[:, 2], du[:, 1] + dv[:, 2]

        x, x0 = batch["x"].requires_grad_(), batch["x0"].requires_grad_()
        u, v, w, div = fields(x)
        dw = grad(w, x)
        laplacian = grad(dw[:, 1], x)[:, 1] + grad(dw[:, 2], x)[:, 2]
        u0, v0, w0, _ = fields(x0)
        return {
            "rw": dw[:, 0] + u * dw[:, 1] + v * dw[:, 2] - exp_ns_torus.NU * laplacian,
            "rc": div,
            "u_ic": u0 - batch["q0"][:, 0],
            "v_ic": v0 - batch["q0"][:, 1],
            "w_ic": w0 - batch["q0"][:, 2],
        }

    net = ModifiedMLP(5, 256, 4, out=2, rwf=(1.0, 0.1), embed=Periodic(3, {1: 2 * math.pi, 2: 2 * math.pi}))
    ours = exp_ns_torus.residuals("uv", False)
    draw = lambda g: exp_ns_torus.draw(g, args, omega, known) | ones
    return sfli(net, omega, gamma=math.sqrt(1.5)), draw, ours, nested


def parabolic(d):
    """Example 7 in d dimensions: MLP 4 x 128, 512 interior, 256 initial, 32 d boundary points, a Laplacian."""

    def nested(net, batch):
        z = batch["inside"].requires_grad_()
        u = net(z)[:, 0]
        du = grad(u, z)
        laplacian = sum(grad(du[:, k], z)[:, k] for k in range(d))
        return {
            "res": du[:, -1] - laplacian + u - exp_parabolic.source(batch["inside"]),
            "ic": net(batch["initial"])[:, 0] - exp_parabolic.exact(batch["initial"]),
            "bc": net(batch["boundary"])[:, 0] - exp_parabolic.exact(batch["boundary"]),
        }

    net = sfli(MLP(d + 1, 128, 4), exp_parabolic.box(d))
    return net, lambda g: exp_parabolic.draw(g, d, 512), exp_parabolic.residuals, nested


def bench(problem, steps):
    """Minimum ms per step of ours and of plain, and the share of our time inside matrix products."""
    torch.manual_seed(0)
    net, sample, ours, nested = problem()
    hand = copy.deepcopy(net)
    opt = torch.optim.Adam(hand.parameters(), 1e-3)
    profiled = steps - 5  # the last steps are profiled instead of timed
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    mine, plain, state = [], [], {"step": 0, "left": None}

    def timed_sample(generator):
        """Called at the start of every step of train(): close the last one, take one by hand, open the next."""
        step, now = state["step"], time.perf_counter()
        if state["left"] and step < profiled:
            mine.append(now - state["left"])
        if step < profiled:
            start = time.perf_counter()
            loss = sum((r**2).mean() for r in nested(hand, sample(generator)).values())
            opt.zero_grad()
            loss.backward()
            opt.step()
            plain.append(time.perf_counter() - start)
        if step == profiled:
            profiler.start()
        state["step"], state["left"] = step + 1, time.perf_counter()
        return sample(generator)

    train(net, timed_sample, ours, steps, compile=cpu.compile_options("cpu"))
    profiler.stop()
    events = profiler.key_averages()
    keys = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::_linear_pointwise")
    products = sum(e.self_cpu_time_total for e in events if e.key in keys)
    share = products / sum(e.self_cpu_time_total for e in events)
    return 1e3 * min(mine), 1e3 * min(plain), share


def stacked_ms(nets, sample, residuals, steps):
    """Minimum ms per step of these networks in one train()."""
    at = []  # sample is called once per network and step
    train(nets, lambda g: at.append(time.perf_counter()) or sample(g), residuals, steps,
          compile=cpu.compile_options("cpu"))
    return 1e3 * min(b - a for a, b in zip(at[:: len(nets)], at[len(nets) :: len(nets)]))


def seeds(n=5, d=10):
    """ms per step of n networks of Table 1 in one train(), and n times that of one network, in turn."""
    sample = lambda g: {"x": uniform([(-1.0, 1.0)] * d, 1000, g)}
    nets = lambda n: [sfli(MLP(d, 128, 3), [(-1.0, 1.0)] * d) for _ in range(n)]
    ms = lambda n: stacked_ms(nets(n), sample, exp_high_dim.residuals, 400)
    runs = [(ms(n), n * ms(1)) for _ in range(3)]
    return min(a for a, _ in runs), min(b for _, b in runs)


def first_layer(n=5, d=10):
    """ms per step of n networks of Table 2 in one train(), with SFLI and with the standard first layer, in turn."""
    sample = lambda g: exp_parabolic.draw(g, d, 512)
    nets = lambda: [MLP(d + 1, 128, 4) for _ in range(n)]
    structured = lambda: [sfli(net, exp_parabolic.box(d)) for net in nets()]
    runs = [[stacked_ms(make(), sample, exp_parabolic.residuals, 25) for make in (structured, nets)] for _ in range(3)]
    return min(a for a, _ in runs), min(b for _, b in runs)


def peer_ms(command, name):
    out = subprocess.run([*command.split(), name], capture_output=True, text=True, check=True).stdout
    return float(re.search(r"min=([\d.]+)ms", out).group(1))


def main():
    problems = {"fit": (fit, 3000), "ac": (ac, 40), "ldc": (ldc, 40), "ns": (ns, 30)}
    problems |= {f"parabolic{d}": (functools.partial(parabolic, d), 25) for d in exp_parabolic.DIMS}
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("problem", nargs="*", help="fit, ac, ldc, ns, parabolic5, 10, 20, 50, seeds, sfli (default: all)")
    cli.add_argument("--peer", help="command that is given ac, ldc or ns and prints min=...ms")
    args = cli.parse_args()
    if unknown := set(args.problem) - {*problems, "seeds", "sfli"}:
        cli.error(f"problem: {', '.join(unknown)} unknown; choose from {', '.join(problems)}, seeds, sfli")
    torch.set_flush_denormal(True)
    cpu.keep_memory()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, minimum ms per step")
    print(f"{'problem':12} {'ours':>8} {'nested':>8} {'ratio':>6} {'peer':>8} {'ratio':>6}  in matrix products")
    for name in args.problem or [*problems, "seeds", "sfli"]:
        if name == "sfli":
            with_it, without = first_layer()
            print(f"five seeds, parabolic, d = 10: SFLI {with_it:.0f}, standard {without:.0f}, {with_it / without:.2f}")
            continue
        if name == "seeds":
            stacked, apart = seeds()
            print(f"five seeds, d = 10: stacked {stacked:.2f}, one by one {apart:.2f}, ratio {apart / stacked:.2f}")
            continue
        peer = args.peer and name in ("ac", "ldc", "ns")
        before = peer_ms(args.peer, name) if peer else math.inf
        mine, plain, share = bench(*problems[name])
        ms = min(before, peer_ms(args.peer, name)) if peer else None
        beside = f"{ms:8.1f} {ms / mine:6.2f}" if peer else f"{'-':>8} {'-':>6}"
        print(f"{name:12} {mine:8.2f} {plain:8.2f} {plain / mine:6.2f} {beside}  {share:.0%}", flush=True)


if __name__ == "__main__":
    main()
