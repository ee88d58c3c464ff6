"""Seconds per natural-gradient step on the Allen-Cahn residual, split into its parts; minimum over the steps.

    python tests/bench_ng.py

Run on an idle machine. The rate of J J^T is its half, n^2 P operations for n rows and P parameters, per second, in
units of the best float64 product of square matrices (2 n^3 operations) of PyTorch and numpy, measured in turn with it.
"""

import argparse
import math
import sys
import time
from pathlib import Path

import numpy
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import MLP, Periodic, jet, sfli, uniform  # noqa: E402
from kernels import natural_gradient as ng  # noqa: E402

OMEGA = [(0.0, 1.0), (-1.0, 1.0)]


def residuals(net, batch):
    u, heat = jet(net, batch["x"], "t x", "t-1e-4*xx")
    u0 = batch["x0"][:, 1] ** 2 * torch.cos(math.pi * batch["x0"][:, 1])
    return {"ic": net(batch["x0"])[:, 0] - u0, "res": (heat + 5 * u**3 - 5 * u)[:, 0]}


def timed(times, name, f):
    def call(*args):
        start = time.perf_counter()
        out = f(*args)
        times.setdefault(name, []).append(time.perf_counter() - start)
        return out

    return call


def bench(width, rows, steps):
    """Minimum seconds of each part, number of parameters, evaluations of the line search per step."""
    torch.manual_seed(0)
    net = sfli(MLP(3, width, 4, embed=Periodic(2, {1: 2.0})), OMEGA, gamma=math.sqrt(10))
    generator = torch.Generator().manual_seed(0)
    times, initial = {}, rows // 5
    opt = ng.NaturalGradient(net, residuals)
    scale = lambda r: {k: torch.full_like(v, len(v) ** -0.5) for k, v in r.items()}
    plain = ng.gram, ng.jacobian
    ng.gram, ng.jacobian = timed(times, "gram", plain[0]), timed(times, "jacobian", plain[1])
    backward, step = timed(times, "backward", opt.direction), timed(times, "line search", opt.step)
    A = torch.randn(2048, 2048)
    products = [timed(times, f"product by {library.__name__}", library.matmul) for library in (torch, numpy)]
    for _ in range(steps):
        x0 = uniform(OMEGA, initial, generator)
        products[0](A, A), products[1](A.numpy(), A.numpy())
        backward({"x": uniform(OMEGA, rows - initial, generator), "x0": x0 * torch.tensor([0.0, 1.0])}, scale)
        step()
    ng.gram, ng.jacobian = plain
    lowest = {name: min(t) for name, t in times.items()}
    lowest["solve"] = min(
        b - j - g for b, j, g in zip(*(times[k][-steps + 1 :] for k in ("backward", "jacobian", "gram")))
    )
    return lowest, sum(p.numel() for p in net.parameters())


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--smoke", action="store_true", help="small sizes that say nothing about speed")
    sizes = ((8, 60, 4),) if cli.parse_args().smoke else ((50, 1000, 15), (80, 2500, 6))
    torch.set_default_dtype(torch.float64)
    torch.set_flush_denormal(True)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float64, minimum seconds per step")
    head = ("Jacobian", "J J^T", "solve", "line search")
    print(f"{'J':>14} " + " ".join(f"{name:>11}" for name in head) + "  Jacobian / J J^T  rate of J J^T")
    for width, rows, steps in sizes:
        t, P = bench(width, rows, steps)
        rate = rows**2 * P / t["gram"] / (2 * 2048**3 / min(t["product by torch"], t["product by numpy"]))
        parts = " ".join(f"{t[k]:11.4f}" for k in ("jacobian", "gram", "solve", "line search"))
        print(f"{f'{rows} x {P}':>14} {parts}  {t['jacobian'] / t['gram']:16.2f}  {rate:13.0%}", flush=True)
    speeds = {k: 2 * 2048**3 / t[f"product by {k}"] for k in ("torch", "numpy")} | {"J J^T": rows**2 * P / t["gram"]}
    print("10^9 operations per second: " + ", ".join(f"{k} {v / 1e9:.0f}" for k, v in speeds.items()))


if __name__ == "__main__":
    main()
