"""Gram matrix of a Gaussian layer: our path against plain products in blocks, in turn, minima.

    python tests/bench_gram.py            CPU: 1e6 points, 256 neurons, d = 2; on a CUDA machine the Triton paths too

Plain: the formula, axis by axis and in place, then phi^T phi, in blocks of points. Expanded: the same with the exponent
by one matrix product, the first half of what our path does; the second is the triangle. Run on an idle machine.
"""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kernels.gaussian_gram import CHUNK, chunks, expanded, gaussian_gram  # noqa: E402


def plain(x, w, b, chunk=CHUNK):
    w, b = w.double(), b.double()
    M = torch.zeros(len(w), len(w), dtype=torch.float64, device=x.device)
    for start in range(0, len(x), chunk):
        y = x[start : start + chunk].double()
        s = 0
        for k in range(x.shape[1]):
            z = torch.addcmul(b[:, k], y[:, k : k + 1], w[:, k])  # [P, n]
            s = z.square_() if k == 0 else s.addcmul_(z, z)
        phi = s.neg_().exp_()
        M.addmm_(phi.T, phi)
    return M


def plain_expanded(x, w, b):
    M = torch.zeros(len(w), len(w), dtype=torch.float64, device=x.device)
    for _, phi in chunks(x, expanded(w[None], b[None]), None):
        M.addmm_(phi[0], phi[0].T)
    return M


def compare(N, n, d, gamma, device, contenders, rounds=5):
    generator = torch.Generator().manual_seed(0)
    x, c = (2 * torch.rand(m, d, generator=generator) - 1 for m in (N, n))
    x, w, b = (t.to(device) for t in (x, torch.full((n, d), gamma), -gamma * c))
    times, first = {name: [] for name in contenders}, None
    for _ in range(rounds):
        for name, gram in contenders.items():
            start = time.perf_counter()
            M = gram(x, w, b)
            M[0, 0].item()  # waits for the device
            times[name].append(time.perf_counter() - start)
            first = M if name == "ours" else first  # "ours" comes first
            assert (M - first).abs().max() <= 1e-7 * M.max()
    best = {name: min(t) for name, t in times.items()}
    print(
        f"{device} N={N} n={n} d={d}: "
        + ", ".join(
            f"{name} {1e3 * t:.0f} ms" + ("" if name == "ours" else f" ({t / best['ours']:.2f}x)")
            for name, t in best.items()
        )
    )


def main():
    torch.set_flush_denormal(True)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    contenders = {"ours": gaussian_gram, "plain": plain, "expanded": plain_expanded}
    for n in (64, 128, 256):
        compare(10**6, n, 2, (n**0.5 - 1) / 2, "cpu", contenders)
    if not torch.cuda.is_available():
        return print("no CUDA device: the Triton paths were not timed")
    for n, d in ((64, 2), (128, 2), (256, 2), (512, 2), (256, 50)):
        large = lambda x, w, b: plain(x, w, b, chunk=65536)
        compare(10**6, n, d, (n ** (1 / d) - 1) / 2, "cuda", {"ours": gaussian_gram, "plain": large})


if __name__ == "__main__":
    main()
