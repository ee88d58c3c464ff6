"""Loss weights: balanced by gradients, and causal in time.

common.train(weighting="grad_norm" or "ntk") and train(causal=..) take them from here.
"""
import math

import torch

from common import Refused

PROBES = 16  # random sign vectors per NTK trace: averaged before the weight divides by it, which is biased otherwise


def rebalanced(scheme, problem, state, batch):
    """The weights of `state`, moved by a tenth towards those that balance the terms on this batch."""
    new = balanced(gradient_sizes(scheme, problem, batch, state.generators))
    return {k: 0.9 * state.weights[k] + 0.1 * new[k] for k in new}


def balanced(sizes):
    """Weights that make weight * size equal for all terms, as in jaxpi: mean / (size + 1e-5 mean); 1 where all sizes
    are zero."""
    mean = sum(sizes.values()) / len(sizes)
    return {k: torch.where(mean > 0, mean / (v + 1e-5 * mean), 1.0) for k, v in sizes.items()}


def gradient_sizes(scheme, problem, batch, generators):
    """{name: [S]}. "grad_norm": norm of the gradient of the term's loss (Wang, Teng, Perdikaris 2021). "ntk": mean over
    its points of |d r_i / d theta|^2 (Wang, Yu, Perdikaris 2022), estimated without bias and without per-point
    Jacobians by |grad sum_i v_i r_i|^2 / B with random signs v, PROBES of them."""
    with problem.eager():
        r, sizes = problem.residuals(problem.params, batch), {}
    c, many = problem.causality(r), problem.processes.count
    for k in r:
        scaled = r[k] * c[k].sqrt() if k in c else r[k]  # [S, B]
        B = scaled.shape[1]
        if scheme == "grad_norm":
            sizes[k] = squared_gradient(problem, scaled.square().mean(1)).sqrt()
            continue
        sizes[k] = torch.zeros_like(scaled[:, 0])
        for _ in range(PROBES):
            v = torch.stack([torch.randint(0, 2, (B,), generator=g, device=g.device) for g in generators])
            signed = ((2 * v - 1) * scaled).sum(1) / math.sqrt(B / many)  # signed sums add up over processes
            sizes[k] += squared_gradient(problem, signed) / PROBES
    return sizes


def squared_gradient(problem, target):
    """|d target_s / d theta_s|^2 for each network s: [S] -> [S]. Zero for a term without parameters."""
    square = torch.zeros_like(target.detach())
    if target.requires_grad:
        params = list(problem.params.values())
        for d in torch.autograd.grad(target.sum(), params, retain_graph=True, allow_unused=True):
            if d is not None:
                square += problem.processes.average(d).square().reshape(len(target), -1).sum(1)
    return square


def causal_weights(r, terms, tol=1.0, chunks=32, average=lambda x: x):
    """w_i = exp(-tol sum_{j<i} L_j), L_j the mean square of time chunk j, the smallest over `terms`; constants for the
    gradient. {name: [S, B]}; rows sorted by time, B a multiple of chunks."""
    weight = None
    for k in terms:
        S, B = r[k].shape
        if B % chunks:
            raise Refused(f"batch: {B} points do not split into {chunks} causal chunks; use multiples of {chunks}")
        L = average(r[k].detach().square().reshape(S, chunks, -1).mean(2))  # [S, chunks]
        w_k = torch.exp(-tol * (L.cumsum(1) - L))
        weight = w_k if weight is None else torch.minimum(weight, w_k)
    return {k: weight.repeat_interleave(r[k].shape[1] // chunks, 1) for k in terms}
