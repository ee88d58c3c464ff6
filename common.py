"""Structured first-layer initialization (SFLI): initializers, networks, derivatives, eps-rank, training.

Tang, Yang, Zhao, Zhu, "Structured First-Layer Initialization Pre-Training Techniques to Accelerate
Training Process Based on eps-Rank"; equation and example names below are the paper's.

Copy this file into your own project; it needs torch and nothing else beside it:

    from common import sfli
    net = sfli(net, [(-1, 1), (-1, 1)])      # net: an nn.Sequential on the square [-1, 1]^2

Sections: SFLI - Networks - Derivatives - eps-rank - Natural gradient - Training - Command line and output.
"""
import argparse
import atexit
import contextlib
import csv
import ctypes
import gc
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

# ------------------------------------------------------------------------------------------------
# SFLI (Section 3.1): F_i(x) = sigma(gamma (alpha_i . x + c_i)), stored as w = gamma alpha, b = gamma c
# ------------------------------------------------------------------------------------------------

KINDS = ("gauss", "tanh", "cos", "hat")


class FirstLayer(nn.Module):
    """First hidden layer with its activation: sigma(W x + b), or for "gauss" the radial
    F_i(x) = exp(-sum_k (w_ik x_k + b_ik)^2) with w, b [n, d]; w and b are what is trained."""

    def __init__(self, kind, weight, bias):
        super().__init__()
        self.kind, self.weight, self.bias = kind, nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x):
        if self.kind != "gauss":
            z = F.linear(x, self.weight, self.bias)
            return hat(z) if self.kind == "hat" else getattr(torch, self.kind)(z)
        # One product with the expanded square. It cancels gamma^2 |x|^2, for which float32 has too few digits (relative
        # error 6e-4 for gamma = 50, and 1.5e-5 for w x + b without expanding): hence float64 around a thin product.
        s = squared_distance(x, self.weight, self.bias).to(self.weight.dtype)
        # Below exp(-40) = 4e-18 a bump adds nothing to a sum of O(1) terms in either precision, but left
        # alone its tails are subnormal numbers, on which CPUs multiply matrices a hundred times slower.
        return torch.exp(-s) * (s < 40)

    def extra_repr(self):
        return f"{self.kind}, {self.weight.shape[1]} -> {self.weight.shape[0]}"


def hat(z):
    return F.relu(1 - torch.abs(z))


def shape_parameter(n, domain, C=1.0):
    """gamma = C (n^(1/d) - 1) / |Omega|^(1/d), eq. (choice)."""
    if n < 2:
        raise ValueError("gamma: eq. (choice) is zero for one neuron; widen the layer or give gamma")
    d = len(domain)
    return C * (n ** (1 / d) - 1) / volume(domain) ** (1 / d)


def volume(domain):
    return math.prod(hi - lo for lo, hi in domain)


def uniform(domain, n, generator=None, dtype=None):
    """n points drawn uniformly from the box [(lo, hi), ...] -> [n, d], on the generator's device."""
    device = "cpu" if generator is None else generator.device
    lo, hi = torch.tensor(domain, dtype=dtype or torch.get_default_dtype(), device=device).T
    return lo + (hi - lo) * torch.rand(n, len(domain), generator=generator, dtype=lo.dtype, device=device)


def sfli(net, domain, kind="gauss", gamma=None, C=1.0, generator=None):
    """Give `net` a structured first layer on the box `domain` = [(lo, hi), ...] and return it.

    nn.Sequential     a new one, in which the first Linear and the activation behind it are replaced;
                      modules before that Linear (an embedding) stay and are applied to the centres.
    nn.Linear         the layer to assign back, `self.first = sfli(self.first, domain)`. It contains its
                      activation: drop the one that your forward() applied to the old layer.
    network of below  the first layer (MLP, ResNet) or both encoders (ModifiedMLP, PirateNet), in place.

    gamma defaults to eq. (choice) with the layer's width and C. Draws come from `generator`."""
    try:
        domain = [(float(lo), float(hi)) for lo, hi in domain]
    except (TypeError, ValueError):
        raise ValueError(f"domain: {domain!r} is no list [(lo, hi), ...], one pair per axis") from None
    for k, (lo, hi) in enumerate(domain):
        if not lo < hi:
            raise ValueError(f"domain: axis {k} is ({lo:g}, {hi:g}); each axis needs lo < hi")
    if kind not in KINDS:
        raise ValueError(f"kind: {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    if gamma is not None and not gamma > 0 or not C > 0:
        raise ValueError("gamma and C must be positive")
    if isinstance(net, (nn.Linear, Dense)):
        return _first_layer(net, lambda x: x, domain, kind, gamma, C, generator)
    if isinstance(net, nn.Sequential):
        at = next((k for k, m in enumerate(net) if isinstance(m, (nn.Linear, Dense))), None)
        if at is None or at + 1 == len(net) or next(net[at + 1].parameters(), None) is not None:
            raise ValueError("net: the Sequential needs a Linear followed by an activation")
        layer = _first_layer(net[at], net[:at], domain, kind, gamma, C, generator)
        return nn.Sequential(*net[:at], layer, *net[at + 2:])
    if not hasattr(net, "sfli_layers"):
        raise ValueError(f"net: {type(net).__name__} is no Sequential, no Linear and no network of common.py; "
                         "call sfli on its first Linear and assign the result back")
    for name in net.sfli_layers:
        layer = getattr(net, name)[0]
        setattr(net, name, _first_layer(layer, net.embed, domain, kind, gamma, C, generator))
    return net


def _first_layer(old, embed, domain, kind, gamma, C, generator):
    like = next(old.parameters())
    n, d = old.out_features, old.in_features
    gamma = shape_parameter(n, domain, C) if gamma is None else gamma
    # Centres and shifts live where data can be: draw in the physical domain, then embed.
    with torch.no_grad():
        x = embed(uniform(domain, max(n, 1024), generator, torch.float64).to(like)).double()  # [max(n, 1024), d]
    if x.shape[1] != d:
        raise ValueError(f"domain: {len(domain)} axes make {x.shape[1]} inputs, but the layer takes {d}")
    if kind == "gauss":
        w, b = torch.full((n, d), gamma, dtype=torch.float64), -gamma * x[:n]
    else:
        draw = dict(generator=generator, dtype=torch.float64, device="cpu" if generator is None else generator.device)
        alpha, u = torch.randn(n, d, **draw).to(x), torch.rand(n, **draw).to(x)
        if kind != "cos":
            alpha = alpha / alpha.norm(dim=1, keepdim=True)  # uniform on the unit sphere
        # The paper's c_i >= 0, "uniform in an interval with respect to Omega": measured from the middle of the
        # domain, c_i is uniform on [0, max_x |alpha_i . (x - middle)|], so that every hyperplane
        # alpha_i . (x - middle) + c_i = 0 meets the domain; the signs of alpha_i serve both sides.
        middle = (x.amin(0) + x.amax(0)) / 2
        c = u * ((x - middle) @ alpha.T).abs().amax(0)  # [n]
        w, b = gamma * alpha, gamma * (c - alpha @ middle)
    return FirstLayer(kind, w.to(like), b.to(like))


# ------------------------------------------------------------------------------------------------
# Networks: y = beta . y_L with y_L the features of the last hidden layer
# ------------------------------------------------------------------------------------------------


class Dense(nn.Module):
    """W x + b, Xavier-normal W, b = 0. With rwf = (mu, sigma): random weight factorization
    W = diag(g) V, g = exp(mu + sigma N(0, 1)), with g and V trained instead of W."""

    def __init__(self, d, n, rwf=None):
        super().__init__()
        self.in_features, self.out_features = d, n
        w = torch.randn(n, d) * math.sqrt(2 / (n + d))
        self.bias = nn.Parameter(torch.zeros(n))
        self.g = None
        if rwf is not None:
            mu, sigma = rwf
            self.g = nn.Parameter(torch.exp(mu + sigma * torch.randn(n, 1)))
            w = w / self.g.detach()
        self.weight = nn.Parameter(w)

    def forward(self, x):
        return F.linear(x, self.weight if self.g is None else self.g * self.weight, self.bias)


def layer(d, n, rwf=None):
    return nn.Sequential(Dense(d, n, rwf), nn.Tanh())


class Periodic(nn.Module):
    """Exact periodicity: x_k -> cos(2 pi x_k / P_k), sin(2 pi x_k / P_k) for the axes in `periods`
    = {axis: period}, the other axes unchanged, in the order of the axes."""

    def __init__(self, d, periods):
        super().__init__()
        self.d, self.periods = d, dict(periods)
        if not all(0 <= k < d and p > 0 for k, p in self.periods.items()):
            raise ValueError(f"periods: {self.periods} must map axes 0..{d - 1} to positive periods")

    def forward(self, x):
        columns = []
        for k in range(self.d):
            x_k = x[..., k : k + 1]
            if k in self.periods:
                z = x_k * (2 * math.pi / self.periods[k])
                columns += [torch.cos(z), torch.sin(z)]
            else:
                columns.append(x_k)
        return torch.cat(columns, -1)


class FourierFeatures(nn.Module):
    """The competitor's encoder: x -> [cos(B x), sin(B x)], B ~ scale N(0, 1), trained like jaxpi's."""

    def __init__(self, d, n, scale=1.0):
        super().__init__()
        self.B = nn.Parameter(scale * torch.randn(n // 2, d))

    def forward(self, x):
        z = F.linear(x, self.B)
        return torch.cat([torch.cos(z), torch.sin(z)], -1)


class MLP(nn.Module):
    """y_1 = first(x), y_l = tanh(W_l y_{l-1} + b_l), eq. (st::NN); `embed` maps x to `d` inputs."""

    sfli_layers = ("first",)

    def __init__(self, d, n, L, out=1, rwf=None, embed=None):
        super().__init__()
        self.embed = nn.Identity() if embed is None else embed
        self.first = layer(d, n, rwf)
        self.blocks = nn.ModuleList(layer(n, n, rwf) for _ in range(L - 1))
        self.out = Dense(n, out, rwf)

    def hidden(self, x):
        """Features of every hidden layer, first to last."""
        y = [self.first(self.embed(x))]
        for block in self.blocks:
            y.append(block(y[-1]))
        return y

    def forward(self, x):
        return self.out(self.hidden(x)[-1])

    def compile(self, **options):
        """Compile the parts: the blocks share their code, so this takes a fraction of compiling the whole."""
        for part in (self.first, *self.blocks):
            part.compile(**options)


class ResNet(MLP):
    """y_1 = first(x), y_l = y_{l-1} + tanh(W_l y_{l-1} + b_l)."""

    def hidden(self, x):
        y = [self.first(self.embed(x))]
        for block in self.blocks:
            y.append(y[-1] + block(y[-1]))
        return y


class Gated(nn.Module):
    """One layer of eq. (modifiedMLP): z = tanh(W y + b), z U + (1 - z) V, as V + z (U - V)."""

    def __init__(self, d, n, rwf=None):
        super().__init__()
        self.dense = Dense(d, n, rwf)

    def forward(self, y, D, V):
        return V + torch.tanh(self.dense(y)) * D


class ModifiedMLP(MLP):
    """Encoders U, V, then L gated layers, eq. (encoder) and (modifiedMLP)."""

    sfli_layers = ("U", "V")

    def __init__(self, d, n, L, out=1, rwf=None, embed=None):
        nn.Module.__init__(self)
        self.embed = nn.Identity() if embed is None else embed
        self.U, self.V, self.first = layer(d, n, rwf), layer(d, n, rwf), Gated(d, n, rwf)
        self.blocks = self.make_blocks(n, L, rwf)
        self.out = Dense(n, out, rwf)

    def make_blocks(self, n, L, rwf):
        return nn.ModuleList(Gated(n, n, rwf) for _ in range(L - 1))

    def encode(self, x):
        x = self.embed(x)
        V = self.V(x)
        D = self.U(x) - V
        return self.first(x, D, V), D, V

    def hidden(self, x):
        y, D, V = self.encode(x)
        y = [y]
        for block in self.blocks:
            y.append(block(y[-1], D, V))
        return y

    def compile(self, **options):
        self.encode = torch.compile(self.encode, **options)
        for block in self.blocks:
            block.compile(**options)


class PirateBlock(nn.Module):
    """Eq. (residualblock): two gated layers, one plain, adaptive skip alpha h + (1 - alpha) y, alpha = 0."""

    def __init__(self, n, rwf=None):
        super().__init__()
        self.f, self.g, self.h = Gated(n, n, rwf), Gated(n, n, rwf), layer(n, n, rwf)
        self.alpha = nn.Parameter(torch.zeros(()))

    def forward(self, y, D, V):
        h = self.h(self.g(self.f(y, D, V), D, V))
        return torch.lerp(y, h, self.alpha)


class PirateNet(ModifiedMLP):
    """Encoders and one gated layer, then L residual blocks, eq. (st::pnet). Its last line reads
    y = beta . y_L; we take y_{L+1}, or the last block would have no effect."""

    def make_blocks(self, n, L, rwf):
        return nn.ModuleList(PirateBlock(n, rwf) for _ in range(L))


# ------------------------------------------------------------------------------------------------
# Derivatives: collapsed Taylor mode. A Jet carries a function's value and the wanted derivatives
# through the network at once; a linear layer is one matrix product over all of them.
# ------------------------------------------------------------------------------------------------


def jet(f, x, variables, derivatives):
    """Value and derivatives of f at x [B, d], each [B, out]:

        u, u_t, u_x, u_xx = jet(net, x, "t x", "t x xx")
        u, u_t, laplacian = jet(net, x, "t x1 x2 x3", "t x1x1+x2x2+x3x3")
        u, heat = jet(net, x, "t x", "t-0.1*xx")

    `variables` names the columns of x (a letter, then digits if you like). `derivatives` lists products of these
    names, up to third order, or linear combinations of them: a combination costs one channel, not one per term.
    f is any module or function made of the operations in RULES; it sees a Jet where it expects a tensor."""
    plan = _plan(variables, derivatives)
    if x.shape[-1] != plan.d:
        raise ValueError(f"variables: {variables!r} names {plan.d} columns, x has {x.shape[-1]}")
    eye = torch.eye(plan.d, dtype=x.dtype, device=x.device)
    seed = [x] + [eye[group].unsqueeze(1) if group else sum(_scale(eye[v], m) for v, m in c) if c else None
                  for c, group in zip(plan.seeds, plan.groups[1:])]
    y = f(Jet(seed, plan, is_input=not Tape.open))
    return [y.full(0)] + [sum(_scale(y.full(c), m) for c, m in channels) for channels in plan.outputs]


class Plan:
    """Channel list of a jet and the rules on it. A channel is a linear combination of terms, a term a sorted tuple of
    variable numbers: "xx+yy" is (((0, 0), 1), ((1, 1), 1)). Products need the proper parts of every term as channels
    of their own; the combination itself appears only linearly, which is why it needs no more than one channel.
    Variables of which only the sum of second derivatives is used, as in a Laplacian, are a group: their first
    derivatives are one channel [variables, B, n]. Operations stay few and large in any dimension."""

    def __init__(self, variables, derivatives):
        number = {v: k for k, v in enumerate(variables.split())}
        wanted = []
        for entry in derivatives.split():
            term_pattern = r"([+-]?)(?:(\d+\.?\d*(?:e-?\d+)?)\*)?((?:[A-Za-z]\d*)+)"
            if not re.fullmatch(f"(?:{term_pattern})(?:(?=[+-]){term_pattern})*", entry):
                raise ValueError(f"derivatives: {entry!r} is no sum of products of {variables!r}, like xx+yy or t-2*xx")
            terms = {}
            for sign, factor, product in re.findall(term_pattern, entry):
                names = re.findall(r"[A-Za-z]\d*", product)
                if not set(names) <= set(number) or len(names) > 3:
                    raise ValueError(f"derivatives: {product!r} is no product of one to three of {variables!r}")
                term = tuple(sorted(number[v] for v in names))
                terms[term] = terms.get(term, 0) + float(sign + (factor or "1"))
            wanted.append(tuple(sorted(terms.items())))
        roles = {}
        for v in number.values():
            uses = [(e, term == (v, v), m) for e, entry in enumerate(wanted) for term, m in entry if v in term]
            roles.setdefault(tuple(uses) if uses and all(square for _, square, _ in uses) else v, []).append(v)
        group = {members[0]: members for members in roles.values()}  # the first one stands for all
        wanted = [tuple((term, m) for term, m in entry if set(term) <= set(group)) for entry in wanted]
        alone = {((s, 1),) for entry in wanted for term, _ in entry for s, _ in splits(term)}
        alone |= {((term, 1),) for entry in wanted if len(entry) == 1 for term, _ in entry}
        sums = {entry for entry in wanted if not all(((term, 1),) in alone for term, _ in entry)}
        channels = [()] + sorted(alone | sums, key=lambda c: (max(len(term) for term, _ in c), c))
        at = {c: k for k, c in enumerate(channels)}
        self.d = len(number)
        self.groups = [None] * len(channels)
        for v, members in group.items():
            if len(members) > 1:
                self.groups[at[(((v,), 1),)]] = members
        self.seeds = [[(term[0], m) for term, m in c if len(term) == 1] for c in channels[1:]]
        self.outputs = [[(at[e], 1)] if e in at else [(at[((term, 1),)], m) for term, m in e] for e in wanted]
        self.order = max([len(term) for c in channels for term, _ in c], default=0)
        # chain[c]: f(z)_c = f'(z) z_c + sum of  m f^(k)(z) z_i1 .. z_ik   (Faa di Bruno, k >= 2)
        # leibniz[c]: (a b)_c = a b_c + a_c b + sum of  m a_i b_j
        self.chain, self.leibniz = [], []
        for c in channels:
            chain, leibniz = {}, {}
            for term, m in c:
                for blocks in partitions(term):
                    if len(blocks) > 1:
                        key = tuple(sorted(at[((block, 1),)] for block in blocks))
                        chain[key] = chain.get(key, 0) + m
                for s, rest in splits(term):
                    key = at[((s, 1),)], at[((rest, 1),)]
                    leibniz[key] = leibniz.get(key, 0) + m
            self.chain.append(tuple(chain.items()))
            self.leibniz.append(tuple(leibniz.items()))


_plans = {}


def _plan(variables, derivatives):
    key = variables, derivatives
    if key not in _plans:
        _plans[key] = Plan(variables, derivatives)
    return _plans[key]


_plan._dynamo_marked_constant = True  # what torch.compiler.assume_constant_result sets, without importing the compiler


def splits(term):
    """Every way to split the factors of a term into two non-empty parts (s, rest)."""
    n = len(term)
    pick = lambda mask: tuple(term[k] for k in range(n) if mask >> k & 1)
    return [(pick(mask), pick(~mask)) for mask in range(1, 2**n - 1)]


def partitions(term):
    """Every set partition of the factors of a term, as a list of lists of sorted tuples."""
    if not term:
        return [[]]
    head, out = term[0], []
    for blocks in partitions(term[1:]):
        out.append([(head,)] + blocks)
        out += [blocks[:k] + [tuple(sorted((head,) + blocks[k]))] + blocks[k + 1 :] for k in range(len(blocks))]
    return out


def _plus(a, b):
    return b if a is None else a if b is None else a + b


def _times(a, b):
    return None if a is None or b is None else a * b


def _summed(group, product):
    """A product of two channels; that of a group's sums over its variables."""
    return product.sum(0) if group and product is not None else product


def _scale(a, m):
    return a if a is None or m == 1 else m * a


def _pointwise(taylor):
    """Rule for y = f(z), given taylor(z, order) -> [f(z), f'(z), ...]; None stands for zero."""

    def rule(a, *args, **kwargs):
        z, plan = a.channels, a.plan
        f = taylor(z[0], plan.order)
        y = [f[0]] + [_times(f[1], c) for c in z[1:]]
        for c, terms in enumerate(plan.chain):
            factor = [None] * 4  # of f^(k)
            for channels, m in terms:
                product = z[channels[0]]
                for k in channels[1:]:
                    product = _times(product, z[k])
                product = _summed(plan.groups[channels[0]], product)
                factor[len(channels)] = _plus(factor[len(channels)], _scale(product, m))
            for k in range(2, plan.order + 1):
                y[c] = _plus(y[c], _times(f[k], factor[k]))
        return Jet(y, plan)

    return rule


def _tanh(z, order):
    y = torch.tanh(z)
    f1 = 1 - y * y
    f2 = -2 * y * f1
    return [y, f1, f2, -2 * (f1 * f1 + y * f2) if order > 2 else None]


def _sigmoid(z, order):
    y = torch.sigmoid(z)
    f1 = y * (1 - y)
    f2 = f1 * (1 - 2 * y)
    return [y, f1, f2, f2 * (1 - 2 * y) - 2 * f1 * f1 if order > 2 else None]


def _sin(z, order):
    s, c = torch.sin(z), torch.cos(z)
    return [s, c, -s, -c]


def _cos(z, order):
    s, c = torch.sin(z), torch.cos(z)
    return [c, -s, -c, s]


def _power(p):
    def taylor(z, order):
        f, factor = [], 1.0
        for k in range(order + 1):
            f.append(None if factor == 0 else factor * z ** (p - k))
            factor *= p - k
        return f

    return taylor


def _add(a, b):
    if not isinstance(a, Jet):
        a, b = b, a
    if isinstance(b, Jet):
        return Jet([_plus(p, q) for p, q in zip(a.channels, b.channels)], a.plan)
    return Jet([a.channels[0] + b] + a.channels[1:], a.plan)


def _neg(a):
    return a.map(lambda c: -c)


def _sub(a, b):
    return _add(a, _neg(b) if isinstance(b, Jet) else -b)


def _mul(a, b):
    if not isinstance(a, Jet):
        a, b = b, a
    if not isinstance(b, Jet):
        return a.map(lambda c: c * b)
    x, y = a.channels, b.channels
    z = [x[0] * y[0]]
    for c in range(1, len(x)):
        z_c = _plus(_times(x[0], y[c]), _times(x[c], y[0]))
        for (i, j), m in a.plan.leibniz[c]:
            z_c = _plus(z_c, _scale(_summed(a.plan.groups[i], _times(x[i], y[j])), m))
        z.append(z_c)
    return Jet(z, a.plan)


def _lerp(a, b, weight):
    return _add(a, _mul(_sub(b, a), weight))


def _div(a, b):
    return _mul(a, _pow(b, -1) if isinstance(b, Jet) else 1 / b)


def _pow(a, p):
    return _pointwise(_power(p))(a)


def _matmul(a, w):
    """a @ w for a constant w: one product over all channels where they have the value's shape. Their rows are put one
    below the other: [channels, batch, n] stacked over seeds inductor takes for a channels-last image and transposes."""
    if not isinstance(a, Jet) or isinstance(w, Jet):
        raise NotImplementedError("jet: a matrix product takes the jet on the left and a constant on the right")
    v = a.channels[0]
    if w.shape[-1] < 8 or w.dim() > 2 or any(c.shape[-v.dim() :] != v.shape for c in a.channels if c is not None):
        return a.map(lambda c: torch.matmul(c, w))  # also at the output, where not every channel is read
    at = [k for k, c in enumerate(a.channels) if c is not None]
    parts, channels = [a.channels[k].reshape(-1, v.shape[-1]) for k in at], [None] * len(a.channels)
    for k, c in zip(at, torch.matmul(torch.cat(parts), w).split([len(c) for c in parts])):
        channels[k] = c.reshape(*a.channels[k].shape[:-1], *w.shape[1:])
    return Jet(channels, a.plan)


def _linear(a, weight, bias=None):
    y = _matmul(a, weight.mT)
    return y if bias is None else _add(y, bias)


def squared_distance(x, w, b):
    """sum_k (w_ik x_k + b_ik)^2 in float64 by one product with the expanded square; derivatives of it, in which less
    cancels, in the precision of w (float32, gamma = 50: wrong by 4e-6 of them at most). In the input of the network
    itself the first derivatives of a group are unit vectors: that in x_k is 2 w_ik^2 x_k + 2 w_ik b_ik, as a product of
    depth two, which inductor leaves in one piece; its fused elementwise code takes five times longer."""
    by_product = lambda x, w, b: F.linear(torch.cat([x * x, x], -1), torch.cat([w * w, 2 * w * b], -1), (b * b).sum(-1))
    if not isinstance(x, Jet):
        return by_product(x.double(), w.double(), b.double())
    plan, v = x.plan, x.channels[0]
    short = x.is_input and any(plan.groups)
    s = by_product(Jet([None if group else c for c, group in zip(x.channels, plan.groups)], plan) if short else x, w, b)
    if w.dtype != torch.float64:
        s.channels[0] = by_product(v.double(), w.double(), b.double())
    for k, group in enumerate(plan.groups):
        if group and short:
            w_k, b_k, v_k = w.mT[group], b.mT[group], v.mT[group]  # [variables, n] and [variables, batch]
            factors = torch.stack([2 * w_k * w_k, 2 * w_k * b_k], 1)  # [variables, 2, n]
            s.channels[k] = torch.stack([v_k, torch.ones_like(v_k)], -1) @ factors
            for c, terms in enumerate(plan.chain):
                for m in [m for used, m in terms if used == (k, k)]:
                    s.channels[c] = _plus(s.channels[c], 2 * m * (w_k * w_k).sum(0))
    return s


def _getitem(a, index):
    index = index if isinstance(index, tuple) else (index,)
    return Jet([None if c is None else a.full(k)[(slice(None), *index) if a.plan.groups[k] else index]
                for k, c in enumerate(a.channels)], a.plan)


def _cat(parts, dim=0):
    plan = next(a.plan for a in parts if isinstance(a, Jet))
    jets = [a if isinstance(a, Jet) else Jet([a] + [None] * (len(plan.chain) - 1), plan) for a in parts]
    dim = dim if dim < 0 else dim - jets[0].channels[0].dim()
    return Jet([None if all(a.channels[k] is None for a in jets) else torch.cat([a.full(k) for a in jets], dim)
                for k in range(len(plan.chain))], plan)


_exp = lambda z, order: [torch.exp(z)] * 4
_relu = lambda z, order: [torch.relu(z), (z > 0).to(z.dtype), None, None]
_abs = lambda z, order: [torch.abs(z), torch.sign(z), None, None]

RULES = {
    "linear": _linear, "matmul": _matmul, "add": _add, "sub": _sub, "mul": _mul, "div": _div, "neg": _neg,
    "rsub": lambda a, b: _sub(b, a), "pow": _pow, "square": lambda a: _mul(a, a), "cat": _cat, "lerp": _lerp,
    "tanh": _pointwise(_tanh), "sigmoid": _pointwise(_sigmoid), "sin": _pointwise(_sin), "cos": _pointwise(_cos),
    "exp": _pointwise(_exp), "relu": _pointwise(_relu), "abs": _pointwise(_abs),
    "silu": lambda a, **kwargs: _mul(a, RULES["sigmoid"](a)),
}


class Jet:
    """Channels of a jet: [0] the value [B, n], then one per entry of its plan; a channel is a tensor that
    broadcasts against the value, or None for zero."""

    def __init__(self, channels, plan, is_input=False):
        self.channels, self.plan, self.is_input = channels, plan, is_input

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        rule = RULES.get(func.__name__)
        if rule is None:
            raise NotImplementedError(f"jet: no rule for {func.__name__}; there are rules for {', '.join(RULES)}")
        return rule(*args, **(kwargs or {}))

    def full(self, k):
        """Channel k, expanded to the shape of the value, with the variables of a group in front."""
        v, c, group = self.channels[0], self.channels[k], self.plan.groups[k]
        shape = v.shape if group is None else (len(group), *v.shape)
        return v.new_zeros(shape) if c is None else c.expand(shape)

    def map(self, f):
        return Jet([None if c is None else f(c) for c in self.channels], self.plan)

    def to(self, *args):
        return self.map(lambda c: c.to(*args))

    # Operators are the rule functions themselves: torch.compile traces that without graph breaks.
    __add__ = __radd__ = _add
    __mul__ = __rmul__ = _mul
    __sub__, __neg__, __truediv__, __pow__, __matmul__, __getitem__ = _sub, _neg, _div, _pow, _matmul, _getitem
    __rsub__ = lambda self, other: _sub(other, self)
    __rtruediv__ = lambda self, other: _div(other, self)
    __lt__ = lambda self, other: self.channels[0] < other


# ------------------------------------------------------------------------------------------------
# eps-rank (Section 2): number of eigenvalues > eps of M = integral over Omega of phi phi^T dx
# ------------------------------------------------------------------------------------------------


def features(net, x):
    """Outputs [N, n] of every hidden layer, first to last: of a network of this file or an nn.Sequential
    (there: what enters each Linear but the first)."""
    if hasattr(net, "hidden"):
        return net.hidden(x)
    if not isinstance(net, nn.Sequential):
        raise ValueError(f"net: {type(net).__name__} has no hidden(x) that lists the outputs of its hidden layers")
    out, seen = [], False
    for module in net:
        if isinstance(module, (nn.Linear, Dense)):
            out += [x] if seen else []
            seen = True
        x, seen = module(x), seen or isinstance(module, FirstLayer)
    return out


def gram_spectrum(phi, measure=1.0):
    """Eigenvalues, largest first, of the Gram matrix of features phi [N, n] at N points spread uniformly over
    the domain: measure / N * phi^T phi. The product is float64 even where phi is float32: accumulated in
    float32 it has a noise floor of 1e-9..1e-5 of the largest eigenvalue, which would count as rank."""
    phi = phi.detach().double()
    return torch.linalg.eigvalsh(phi.T @ phi * (measure / len(phi))).flip(0)


@torch.no_grad()
def gaussian_spectrum(layers, x, measure=1.0):
    """The same [K, n] for K Gaussian FirstLayers of one width at once, without storing their features where the
    folder kernels/ of the repository is at hand."""
    try:
        from kernels.gaussian_gram import gaussian_gram
    except ImportError:
        return torch.stack([gram_spectrum(layer(x), measure) for layer in layers])
    w, b = (torch.stack([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
    return torch.linalg.eigvalsh(gaussian_gram(x, w, b) * (measure / len(x))).flip(-1)


@torch.no_grad()
def eps_rank(net, x, eps=1e-6, measure=1.0, layer=-1):
    """eps-rank of the features of hidden layer `layer` at the points x: an index, "all" for a list of all of them, or
    "first" for a list of the layers that SFLI shapes (the first, or the encoders U and V).

    The paper states neither eps nor the quadrature. Ours: eps = 1e-6, equal weights on x, and
    measure = |Omega| where d <= 3, else 1 (2^50 would swamp any threshold)."""
    count = lambda spectrum: (spectrum > eps).sum(-1).tolist()
    if layer == "first":
        layers, z = [getattr(net, name) for name in net.sfli_layers], net.embed(x)
        if all(isinstance(f, FirstLayer) and f.kind == "gauss" for f in layers):
            return count(gaussian_spectrum(layers, z, measure))
        return [count(gram_spectrum(f(z), measure)) for f in layers]
    layers = features(net, x)
    if layer != "all":
        return count(gram_spectrum(layers[layer], measure))
    known = eps_rank(net, x, eps, measure, "first") if getattr(net, "sfli_layers", None) == ("first",) else []
    return known + [count(gram_spectrum(phi, measure)) for phi in layers[len(known) :]]


def scan_gamma(n, domain, x, eps=1e-6, measure=1.0, embed=None, generator=None, enough=0.9):
    """Shape parameter for n Gaussians by looking at the rank: gamma of eq. (choice) for C = 0.5, 0.6, .. 2.0, all
    with the centres that `generator` draws, their eps-ranks at the points x in one batched call.

    Rank grows with gamma, but narrow bumps share no information: taken is the smallest C whose rank is at least
    `enough` n (the gamma of the paper's Examples 1 and 2 are at 0.83 and 0.90), or the highest rank where none is.
    Prints the table; returns gamma."""
    embed = nn.Identity() if embed is None else embed
    generator = torch.Generator() if generator is None else generator
    z, state = embed(x), generator.get_state()
    candidates = [k / 10 for k in range(5, 21)]
    like, layers = nn.Linear(z.shape[1], n, device=z.device), []
    for C in candidates:
        generator.set_state(state)
        layers.append(_first_layer(like, embed, domain, "gauss", None, C, generator))
    generator.set_state(state)
    spectra = gaussian_spectrum(layers, z, measure)  # [16, n]
    ranks = (spectra > eps).sum(-1).tolist()
    best = next((k for k, r in enumerate(ranks) if r >= enough * n), ranks.index(max(ranks)))
    table = sorted({1e-4, 1e-6, 1e-8, 1e-10, eps}, reverse=True)
    print(f"{'C':>4} {'gamma':>8}  first-layer rank of {n} at eps = " + ", ".join(f"{e:g}" for e in table))
    for k, C in enumerate(candidates):
        counts = " ".join(f"{int((spectra[k] > e).sum()):6}" for e in table)
        print(f"{C:4.1f} {shape_parameter(n, domain, C):8.4g}  {counts}{'   <- chosen' if k == best else ''}")
    return shape_parameter(n, domain, candidates[best])


def grid(domain, n):
    """n^d cell midpoints of the box `domain` -> [n^d, d]: equal-weight quadrature points for d <= 3."""
    axes = [lo + (hi - lo) * (torch.arange(n) + 0.5) / n for lo, hi in domain]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(domain))


# ------------------------------------------------------------------------------------------------
# Natural gradient: Gauss-Newton in function space, d = J^T (J J^T + lam I)^-1 r, with J = d r / d theta
# ------------------------------------------------------------------------------------------------


class NaturalGradient:
    """theta <- theta - eta d,  d = J^T (J J^T + lam I)^-1 r: the Gauss-Newton step in function space by the Woodbury
    identity (ENGD-W, arXiv 2505.12149). r stacks all residuals, each scaled by sqrt(weight / count), so |r|^2 is the
    loss that the other optimisers minimise. With momentum mu it is SPRING (arXiv 2401.10190): d minimises
    |J d - r|^2 + lam |d - mu d_old|^2.

    eta: halved from `lr`, at most TRIES times, until the loss falls on the same batch. lam: divided by 1.5 after a
    step that needed no halving, doubled after more than two; a step that never falls is rejected, doubles lam and
    forgets d_old. What happened is in the history: damping, eta, and the number of steps rejected so far."""

    TRIES = 12

    def __init__(self, net, residuals, lr=1.0, damping=1e-3, momentum=0.0):
        if not 0 < damping < math.inf or not 0 <= momentum < 1:
            raise ValueError(f"--damping must be positive and 0 <= --momentum < 1, got {damping:g} and {momentum:g}")
        self.net, self.residuals, self.params = net, residuals, list(net.parameters())
        if any(p.dtype != torch.float64 for p in self.params):
            raise ValueError("--optimizer ng computes in float64; use --dtype float64 (in your own code: net.double())")
        self.momentum, self.param_groups = momentum, [{"lr": lr}]
        self.damping, self.eta, self.rejected, self.d, self.J, self.jacobian = damping, 0.0, 0, None, None, None

    def state_dict(self):
        return self.report() | {"d": self.d}

    def load_state_dict(self, state):
        vars(self).update(state)

    def report(self):
        return {"damping": self.damping, "eta": self.eta, "rejected": self.rejected}

    def backward(self, batch, scale):
        """Direction d for this batch; scale(r) -> {name: [B]} are the factors of the rows. Returns r."""
        if self.jacobian is None:
            self.J, self.jacobian = self.choose(batch)
        r, factor, J = self.jacobian(self.residuals, self.net, batch, scale, self.J)
        self.batch, self.factor = batch, factor
        R = torch.cat([factor[k] * r[k] for k in r])
        self.loss = (R @ R).item()
        wide = J.shape[0] <= J.shape[1]  # J^T (J J^T + lam)^-1 = (J^T J + lam)^-1 J^T: whichever is smaller
        G = gram(J if wide else J.T)
        if not G.diagonal().isfinite().all():
            raise ValueError("--optimizer ng: the Jacobian of the residuals is not finite; try a smaller --gamma, and "
                             "look for a square root or a division in the residuals")
        old = torch.zeros_like(J[0]) if self.d is None else self.momentum * self.d.to(J)
        b = R - J @ old if self.momentum else R
        while True:  # rounding may leave J J^T indefinite by 1e-16 of its size: more damping then
            G.diagonal().add_(self.damping)
            L, failed = torch.linalg.cholesky_ex(G)
            if not failed:
                break
            G.diagonal().sub_(self.damping)
            self.damping *= 10
        solve = lambda b: torch.cholesky_solve(b[:, None], L)[:, 0]
        self.d = old + (J.T @ solve(b) if wide else solve(J.T @ b))
        return r

    @torch.no_grad()
    def step(self):
        def move(eta):
            for p, p_0, d in zip(self.params, theta, self.d.split([p.numel() for p in self.params])):
                p.copy_(p_0 - eta * d.view_as(p))

        theta = [p.clone() for p in self.params]
        eta = top = self.param_groups[0]["lr"]
        for _ in range(self.TRIES):
            move(eta)
            r = self.residuals(self.net, self.batch)
            if sum((self.factor[k] * r[k]).square().sum().item() for k in r) < self.loss:  # not where it is nan
                break
            eta /= 2
        else:
            move(0.0)
            eta, self.d, self.rejected = 0.0, None, self.rejected + 1
        self.eta = eta
        if eta == top:
            self.damping = max(self.damping / 1.5, 1e-13)
        elif eta < top / 4:
            self.damping *= 2

    def size(self, batch):
        """Rows and columns of J; refuses what does not fit NG_BYTES."""
        P = sum(p.numel() for p in self.params)

        def check(R):
            size = 8 * (R * P + min(R, P) ** 2)
            if size > NG_BYTES:
                raise ValueError(f"--batch: J has {R} rows x {P} parameters, {size / 1e9:.1f} GB with its Gram matrix, "
                                 f"over the limit of {NG_BYTES / 1e9:g} GB; use fewer points, a smaller --width, or "
                                 "another --optimizer")
            return R, P

        check(max((len(v) for v in batch.values() if v.dim()), default=0))  # before the residuals take as much memory
        with torch.no_grad():
            return check(sum(len(v) for v in self.residuals(self.net, batch).values()))

    def choose(self, batch):
        """Buffer for J and the way to fill it: jacobian() where v^T J is the gradient of v . r for a random v, else
        torch.func, many times slower, for modules whose parameters do not enter through linear or lerp."""
        R, P = self.size(batch)
        print(f"natural gradient: J {R} x {P} in float64, {8e-6 * R * P:.0f} MB", flush=True)
        J = torch.empty(R, P, dtype=torch.float64, device=self.params[0].device)
        with contextlib.suppress(NotImplementedError):
            g = torch.Generator(J.device).manual_seed(0)
            r = self.residuals(self.net, batch)
            v = {k: torch.rand(len(r[k]), generator=g, dtype=J.dtype, device=J.device) for k in r}
            jacobian(self.residuals, self.net, batch, lambda r: v, J)
            total = sum((v[k] * r[k]).sum() for k in r)
            grads = torch.autograd.grad(total, self.params, allow_unused=True, materialize_grads=True)
            difference = J.sum(0) - torch.cat([g.flatten() for g in grads])
            if not difference.norm() > 1e-9 * math.sqrt(R) * J.norm():  # rounding; nan is for backward() to report
                return J, jacobian
        print("natural gradient: a module that jacobian() does not know; torch.func takes over, slowly", flush=True)
        return None, jacobian_by_func


NG_BYTES = 4e9  # limit for J and its Gram matrix


def gram(A):
    """Lower triangle of A A^T (what Cholesky reads), by blocks of rows: little more than half the work."""
    n = len(A)
    G, block = A.new_zeros(n, n), -(-n // 8)
    for i in range(0, n, block):
        torch.mm(A[i : i + block], A[: i + block].T, out=G[i : i + block, : i + block])
    return G


class Tape(torch.overrides.TorchFunctionMode):
    """Records every operation through which parameters meet samples: linear(a, W, b) and lerp(y, h, alpha)."""

    open = False  # squared_distance() takes no short cut past linear() meanwhile

    def __init__(self):
        super().__init__()
        self.records = []  # (channels of the input, W or alpha, b, channels of the output)

    def __enter__(self):
        Tape.open = True
        return super().__enter__()

    def __exit__(self, *error):
        Tape.open = False
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name not in ("linear", "lerp"):
            return out
        if isinstance(out, Jet):  # gradients per sample want a row per sample, also where all rows are equal
            out = Jet([None if c is None else out.full(k) for k, c in enumerate(out.channels)], out.plan)
        if name == "linear":
            a, W, b = [*args, *(kwargs or {}).values(), None][:3]
        else:
            (y, h, W), b = args, None
            a = h - y
        channels = lambda a: a.channels if isinstance(a, Jet) else [a]
        self.records.append((channels(a), W, b, channels(out)))
        return out


def jacobian(residuals, net, batch, scale, J):
    """r {name: [B]}, its factors scale(r), and J [rows, parameters] = d (factor * r) / d theta of all residuals, one
    below the other, in the order of net.parameters(), written to the buffer J if its size fits.

    Every residual depends on its own sample alone, so one backward pass of sum r gives, at the output of each linear
    map, the gradients of all samples side by side; with the map's input they make the rows of J, summed over the
    channels of a jet. One backward pass per name."""
    params = list(net.parameters())
    first, P = {}, 0
    for p in params:
        first[p], P = P, P + p.numel()
    with Tape() as tape:
        r = residuals(net, batch)
    with torch.no_grad():
        factor = scale({k: v.detach() for k, v in r.items()})
        R = sum(len(v) for v in r.values())
        J = J if J is not None and J.shape == (R, P) else params[0].new_empty(R, P)
        outputs = [c for *_, out in tape.records for c in out if c is not None]
        row = 0
        for k, v in r.items():
            grads = iter(torch.autograd.grad(v, outputs, factor[k], retain_graph=True, allow_unused=True))
            block = {p: J[row : row + len(v), first[p] : first[p] + p.numel()] for p in params}
            row += len(v)
            written = set()

            def put(p, g):  # [B, *p.shape]
                block[p].add_(g.flatten(1)) if p in written else block[p].copy_(g.flatten(1))
                written.add(p)

            for a, W, b, out in tape.records:
                delta = [None if c is None else next(grads) for c in out]
                used = [(d, c) for d, c in zip(delta, a) if d is not None]
                used = [(e, f) for d, c in used for e, f in (zip(d, c) if d.dim() > 2 else [(d, c)])]  # groups apart
                if not used:
                    continue
                if W.dim() not in (0, 2) or any(d.dim() != 2 or len(d) != len(v) for d, _ in used):
                    raise NotImplementedError("jacobian: a residual per sample and maps of [B, n] are wanted")
                at_b = torch.zeros_like(used[0][0]) if delta[0] is None else delta[0]
                if W.dim() == 0:
                    put(W, sum((d * c).sum(1, keepdim=True) for d, c in used))
                    continue
                plain = W in block and (b is None or b in block)
                to = block[W].unflatten(1, W.shape) if plain else v.new_empty(len(v), *W.shape)
                add = plain and W in written
                used = [(d.unsqueeze(2), c.expand(len(v), -1).unsqueeze(1)) for d, c in used]
                size = max(1, 2**18 // W.numel())  # rows at a time, so that all channels meet them in the cache
                for lo in range(0, len(v), size):
                    part = to[lo : lo + size]
                    for i, (d, c) in enumerate(used):
                        d, c = d[lo : lo + size], c[lo : lo + size]
                        part.addcmul_(d, c) if i or add else torch.mul(d, c, out=part)
                if plain:
                    written.add(W)
                    if b is not None:
                        put(b, at_b)
                else:  # W is made of parameters (factorized weights, a Gaussian layer): chain rule
                    made, by = ([W], [to]) if b is None else ([W, b], [to, at_b])
                    chain = torch.autograd.grad(made, params, by, retain_graph=True, allow_unused=True,
                                                is_grads_batched=True)
                    for p, g in zip(params, chain):
                        if g is not None:
                            put(p, g)
            for p in set(params) - written:
                block[p].zero_()
    return {k: v.detach() for k, v in r.items()}, factor, J


def jacobian_by_func(residuals, net, batch, scale, J):
    """The same for any module, by one backward pass per row (torch.func.jacrev)."""
    with torch.no_grad():
        r = residuals(net, batch)
        factor = scale(r)

    def stacked(p):
        r = residuals(lambda x: torch.func.functional_call(net, p, (x,)), batch)
        return torch.cat([factor[k] * r[k] for k in r])

    J = torch.func.jacrev(stacked, chunk_size=64)(dict(net.named_parameters()))
    return r, factor, torch.cat([d.detach().reshape(len(d), -1) for d in J.values()], 1)


# ------------------------------------------------------------------------------------------------
# Training: sample -> named residuals -> squared, averaged, weighted -> optimiser
# ------------------------------------------------------------------------------------------------


def train(nets, sample, residuals, steps, *, lr=1e-3, warmup=0, decay=1.0, decay_every=1000, optimizer="adam",
          damping=1e-3, momentum=0.0, weights=None, weighting="fixed", causal=None, pseudo_time=False, constants=None,
          evaluate=None, seeds=None, compile=False, folder=None, config=None, resume=False, save_seconds=None,
          save_steps=None, stop=None, together=True):
    """Train one network, or several at once (one per seed), and return the history: a list of rows.

    sample(generator) -> batch, a dict of tensors [B, ...], drawn anew every step.
    residuals(net, batch) -> {name: r [B]}, per-point residuals, never squares. The loss is
        sum over names of weight * mean(r^2).
    weighting: "fixed" keeps `weights` ({name: w}, default 1); "grad_norm" and "ntk" rebalance them.
    causal: {"terms": [names], "tol": 1.0, "chunks": 32} weights these terms by time; their rows must be
        sorted by time.
    pseudo_time: for a residual given as a pair (r, q) minimise r + lam (q - q now) instead, a step of size 1 / lam
        of implicit Euler for q_t = -r. It leaves the loss alone and changes its gradient. lam, 1 at first, follows
        |change of r| / |change of q| over a step, within [0.01, 100]. Without it q is ignored.
    constants(step) -> {name: number} joins the batch, say the viscosity of a curriculum.
    optimizer: "adam", "soap", or "ng", natural gradient, for one float64 network; there lr is the longest step, 1 at
        the start, damping the first lam and momentum SPRING's.
    lr rises linearly over `warmup` steps, then falls by `decay` per `decay_every` steps.
    evaluate(net) -> {name: number}, joins the history about 100 times a run.
    Several nets train as one: parameters are stacked, the residuals vmapped, the losses summed; each
        keeps its own draws and its own weights. The nets given hold the trained parameters at the end.
    folder: history.csv and checkpoint.pt go there, the latter every save_seconds (120) and every save_steps steps;
        the one before is kept. resume continues from that checkpoint, bit for bit on a CPU, and refuses one whose
        `config` differs.
    stop() -> bool is asked after every step; if true, the checkpoint is written and Stopped raised.
    together: under torchrun every process draws its own points, gradients and weights are averaged
        (DistributedDataParallel), and the first process alone writes. False: this process trains by itself."""
    nets = list(nets) if isinstance(nets, (list, tuple)) else [nets]
    seeds = list(range(len(nets))) if seeds is None else list(seeds)
    device = next(nets[0].parameters()).device
    torch.set_flush_denormal(True)  # subnormal numbers (tails of Gaussians) are slow on CPUs
    keep_memory()
    params, over_members = _members(nets)
    member_pairs, residuals = over_members(_pairs(residuals)), _stepped(residuals)
    member_residuals = over_members(residuals)
    values = {name: p.detach() for name, p in params.items()}  # the same storage, without autograd
    ng = optimizer == "ng"
    if ng and (len(nets) > 1 or compile):
        raise ValueError("--optimizer ng trains one network, uncompiled; use --seeds 1 and --compile off")
    opt = (NaturalGradient(nets[0], residuals, lr, damping, momentum) if ng
           else make_optimizer(optimizer, list(params.values()), lr))
    rank, ranks = world() if together else (0, 1)
    if ranks > 1 and (ng or len(nets) > 1):
        raise ValueError("torchrun: several processes train one network by adam or soap; use --seeds 1 and another "
                         "--optimizer, or one process")
    average = averaged if ranks > 1 else lambda x: x
    generators = [torch.Generator(device).manual_seed(1000003 * seed + 1 + 7919 * rank) for seed in seeds]
    every = max(1, steps // 100)
    rebalance = max(1, min(1000, steps // 20))

    def objective(p, batch, w):
        r = member_residuals(p, batch)  # {name: [S, B]}
        c = causal_weights(r, **causal, average=average) if causal else {}
        losses = {k: (c.get(k, 1) * r[k] ** 2).mean(1) for k in r}  # {name: [S]}
        return sum((w[k] * losses[k]).sum() for k in losses), losses

    def draw():
        batches = [sample(g) | {k: torch.tensor(v, device=device) for k, v in constants(step).items()}
                   if constants else sample(g) for g in generators]
        batches = [b | {f"lam_{k}": v[s] for k, v in lam.items()} for s, b in enumerate(batches)]
        return batches[0] if len(nets) == 1 else {k: torch.stack([b[k] for b in batches]) for k in batches[0]}

    # Compile the whole step, gradient included; of large networks the repeated parts, which takes less time to compile
    # and 4 to 20% more per step (PirateNet 3 and 6 x 256, modified MLP 4 x 256, one trial).
    eager = (lambda: torch.compiler.set_stance("force_eager")) if compile else contextlib.nullcontext
    whole = compile and ranks == 1 and (len(nets) > 1 or sum(p.numel() for p in values.values()) < WHOLE_STEP)
    if compile:
        torch.compiler.reset()  # the runs of --all would fill the compiler's list of variants and end up uncompiled
        slow = device.type == "cpu" and half_speed_mkl()
        options = dict(dynamic=False, options={"post_grad_custom_post_pass": by_onednn()} if slow else None)
    if whole:
        compiled = torch.compile(torch.func.grad_and_value(objective, has_aux=True), **options)
    elif compile:
        nets[0].compile(**options)

    loss = lambda batch, w: objective(params, batch, w)
    if ranks > 1:
        on = [device] if device.type == "cuda" else None
        loss = nn.parallel.DistributedDataParallel(_Loss(nets[0], loss), on)

    def row_factors(r, w):
        """What makes |factor * r|^2 the loss: sqrt(weight * causal weight / count), {name: [B]}."""
        c = causal_weights({k: v.unsqueeze(0) for k, v in r.items()}, **causal) if causal else {}
        return {k: torch.sqrt(w[k] * c.get(k, torch.ones_like(v)) / len(v)).expand(1, len(v))[0] for k, v in r.items()}

    def backward(batch, w):
        if ng:
            r = opt.backward(batch, lambda r: row_factors(r, w))
            one = row_factors(r, {k: torch.ones_like(v) for k, v in w.items()})
            losses = {k: (one[k] * r[k]).square().sum(0, keepdim=True) for k in r}
        elif whole:
            grads, (total, losses) = compiled(values, batch, w)
            for name, p in params.items():
                p.grad = grads[name].contiguous()  # fused Adam walks through memory, whatever the strides
        else:
            opt.zero_grad()
            total, losses = loss(batch, w)
            total.backward()
            losses = {k: average(v.detach()) for k, v in losses.items()}
        return losses

    step, seconds, history, sums, count = 0, 0.0, [], {}, 0
    w, lam = None, {}  # {name: [S]}, once the names are known
    path = None if folder is None else Path(folder) / "checkpoint.pt"
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    if resume:
        state = load_checkpoint(path, config)
        with torch.no_grad():
            for name, p in params.items():
                p.copy_(state["params"][name])
        opt.load_state_dict(state["optimizer"])
        for g, s in zip(generators, state["generators"][rank]):
            g.set_state(s.cpu())
        w, lam = ({k: v.to(device) for k, v in state[name].items()} for name in ("weights", "lam"))
        sums = {k: v.to(device) for k, v in state["sums"].items()}
        step, seconds, history, count = state["step"], state["seconds"], state["history"], state["count"]
    start = saved = time.perf_counter()
    bar = progress(steps, step)
    # For the estimate of the time: ends of the first steps without evaluations, seconds of one, of all evaluations.
    ticks, looking, looked = [], 0.0, 0.0
    while step <= steps:
        record = step % every == 0 or step == steps
        batch = draw()
        if w is None:
            with torch.no_grad(), eager():
                r = member_residuals(params, batch)
            for k in r:
                if r[k].dim() != 2:
                    raise ValueError(f"residuals: {k!r} is {list(r[k].shape[1:])}; one number per point is wanted, [B]")
            if unknown := set(weights or {}) - set(r):
                raise ValueError(f"weights: {sorted(unknown)} are no residuals; there are {sorted(r)}")
            w = {k: torch.full_like(r[k][:, 0], (weights or {}).get(k, 1.0)) for k in r}
            if pseudo_time:
                with torch.no_grad(), eager():
                    lam = {k: torch.ones_like(w[k]) for k in member_pairs(params, batch)}
                continue  # draw again, with lam
        if weighting != "fixed" and step % rebalance == 0:
            with eager():
                new = balanced(gradient_sizes(weighting, member_residuals(params, batch), params, causal, generators,
                                              average, ranks))
            w = {k: 0.9 * w[k] + 0.1 * new[k] for k in w}
        for group in opt.param_groups:
            group["lr"] = learning_rate(step, lr, warmup, decay, decay_every)
        losses = backward(batch, w)
        sums = {k: sums[k] + v if sums else v for k, v in losses.items()}
        count += 1
        if device.type == "cpu" or record:  # elsewhere looking costs a synchronisation
            bad = [k for k, v in losses.items() if not v.isfinite().all()]
            if bad:
                raise FloatingPointError(f"the loss of {', '.join(bad)} is not finite at step {step}; try a smaller "
                                         "--lr, a smaller --gamma, or --dtype float64")
        if record:
            now = seconds + time.perf_counter() - start
            if causal:
                with torch.no_grad(), eager():
                    c = causal_weights(member_residuals(params, batch), **causal, average=average)
                    c = c[causal["terms"][0]]  # [S, B]
            for s, net in enumerate(nets):
                means = {k: v[s].item() / count for k, v in sums.items()}
                row = {"step": step, "seed": seeds[s], "loss": sum(w[k][s].item() * m for k, m in means.items())}
                row |= {f"loss_{k}": m for k, m in means.items()}
                row |= {f"weight_{k}": v[s].item() for k, v in w.items()} if weighting != "fixed" else {}
                row |= {f"lam_{k}": v[s].item() for k, v in lam.items()}
                row |= {"causal_mean": c[s].mean().item(), "causal_last": c[s, -1].item()} if causal else {}
                row |= {"lr": opt.param_groups[0]["lr"], "seconds": now} | (opt.report() if ng else {})
                if evaluate is not None:
                    with torch.no_grad(), eager():
                        row |= evaluate(net)
                history.append(row)
            sums, count = {}, 0
            if folder is not None and rank == 0:
                write_rows(Path(folder) / "history.csv", history)
            for i, last in enumerate(history[-len(nets) :]):
                best = min(row["loss"] for row in history[i :: len(nets)])
                if last["loss"] > DIVERGED * best:
                    term = max((k for k in last if k.startswith("loss_")), key=last.get)[5:]
                    raise FloatingPointError(f"the loss has diverged: {last['loss']:.1e} at step {step}, most of it "
                                             f"{term}, after {best:.1e}; try a smaller --lr or a smaller --gamma")
            looking = seconds + time.perf_counter() - start - now
            looked += looking
            if bar:
                shown = ("loss", "rel_l2", "eps_rank", "damping", "eta")
                bar.set_postfix({k: f"{row[k]:.3g}" for k in shown if k in row}, refresh=False)
        if step < steps:
            look = lam and step % 20 == 0
            with torch.no_grad(), eager():
                before = member_pairs(params, batch) if look else {}
            opt.step()
            with torch.no_grad(), eager():
                after = member_pairs(params, batch) if look else {}
            for k in after:
                r, q = (new - old for new, old in zip(after[k], before[k]))  # [S, B]
                ratio = (average(r.square().mean(1)) / average(q.square().mean(1)).clamp(min=1e-30)).sqrt()
                lam[k] = 0.9 * lam[k] + 0.1 * ratio.clamp(0.01, 100.0)
            if bar:
                bar.update()
        step += 1
        if len(ticks) < 20:
            ticks.append(time.perf_counter() - looked)
            if len(ticks) == 20:
                usual = sorted(b - a for a, b in zip(ticks, ticks[1:]))[9]  # the first steps compile
                minutes = ((steps - step) * usual + (steps - step) // every * looking) / 60
                if minutes > 1:
                    print(f"{1e3 * usual:.3g} ms per step, {steps - step} steps to go: about "
                          + (f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"), flush=True)
        stopping = stop is not None and stop() and step <= steps
        due = time.perf_counter() - saved > (CHECKPOINT_SECONDS if save_seconds is None else save_seconds)
        if ranks > 1:  # all of them must agree, and need not at every step
            votes = torch.tensor([due, stopping], dtype=torch.float32, device=device)
            due, stopping = (averaged(votes) > 0).tolist() if step % 10 == 0 else (False, False)
        if path is not None and (due or stopping or step > steps or save_steps and step % save_steps == 0):
            states = [[g.get_state() for g in generators]] * ranks
            if ranks > 1:
                torch.distributed.all_gather_object(states, states[0])
            if rank == 0:
                save_checkpoint(path, {
                    "config": config, "step": step, "seconds": seconds + time.perf_counter() - start,
                    "history": history, "params": values, "optimizer": opt.state_dict(), "generators": states,
                    "weights": w, "lam": lam, "sums": sums, "count": count})
            saved = time.perf_counter()
        if stopping:
            raise Stopped(f"stopped after step {step - 1} of {steps}")
    if bar:
        bar.close()
    return history


CHECKPOINT_SECONDS = 120.0
DIVERGED = 1e6  # a loss so many times its best has diverged
WHOLE_STEP = 200_000  # below so many parameters torch.compile takes the whole step, above the repeated block


def keep_memory():
    """Let large arrays that one step frees serve the next. glibc hands them back to the system, and fetching them page
    by page takes a tenth to a quarter of a step on a CPU (Example 7)."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(-4, 0)  # M_MMAP_MAX: no array by mmap
            mallopt(-1, -1)  # M_TRIM_THRESHOLD: never trim the heap


def half_speed_mkl():
    """On an AMD CPU with AVX-512 MKL, by which PyTorch multiplies matrices, reaches half of oneDNN's rate (on Zen 5)."""
    with contextlib.suppress(OSError):
        cpu = Path("/proc/cpuinfo").read_text()
        return "AuthenticAMD" in cpu and "avx512f" in cpu and torch.backends.mkldnn.is_available()
    return False


def by_onednn():
    """A pass for torch.compile that leaves products of float32 matrices to oneDNN, PyTorch's other library, where the
    left one lies row by row: two of three in a step, each in half of MKL's time on such a CPU."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    if not hasattr(torch.ops.sfli, "mm"):
        one = lambda a, b: torch.ops.mkldnn._linear_pointwise(a, b.mT, None, "none", [], "")
        by_onednn.library = library = torch.library.Library("sfli", "DEF")  # lasts as long as it is referred to
        library.define("mm(Tensor a, Tensor b) -> Tensor")
        library.impl("mm", lambda a, b: one(a, b) if a.dim() == 2 else torch.stack(list(map(one, a, b))), "CPU")
        library.impl("mm", lambda a, b: a.new_empty(*a.shape[:-1], b.shape[-1]), "Meta")
    aten, mm = torch.ops.aten, torch.ops.sfli.mm.default

    class ByOneDNN(CustomGraphPass):
        def __call__(self, graph):
            for node in graph.nodes:
                if node.kwargs or node.target not in (aten.mm.default, aten.bmm.default, aten.addmm.default):
                    continue
                *bias, a, b = node.args
                left, right = a.meta["val"], b.meta["val"]
                thin = min(left.shape[-1], right.shape[-1]) < 32
                if thin or left.dtype != torch.float32 or left.stride(-1) != 1:
                    continue
                if not bias:
                    node.target = mm
                    continue
                with graph.inserting_before(node):
                    product = graph.call_function(mm, (a, b))
                product.meta = dict(node.meta)
                node.target, node.args = aten.add.Tensor, (product, *bias)

        def uuid(self):
            return get_hash_for_files((__file__,))

    return ByOneDNN()


def world():
    """Rank of this process and the number of processes: (0, 1) but under torchrun."""
    d = torch.distributed
    return (d.get_rank(), d.get_world_size()) if d.is_available() and d.is_initialized() else (0, 1)


def averaged(x):
    """Mean of x over the processes."""
    x = x.clone()
    torch.distributed.all_reduce(x)
    return x / torch.distributed.get_world_size()


def gathered(rows):
    """The rows of all processes, those of the first one first."""
    parts = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, rows)
    return sum(parts, [])


class _Loss(nn.Module):
    """The objective as a module, for DistributedDataParallel."""

    def __init__(self, net, loss):
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, batch, w):
        return self.loss(batch, w)


def _members(nets):
    """Parameters {name: tensor}, stacked [S, ...] for S > 1 networks, and over_members, which turns residuals (net,
    batch) -> {name: [B]} into (params, batch) -> {name: [S, B]}."""
    call = lambda net, p: lambda x: torch.func.functional_call(net, p, (x,))
    if len(nets) == 1:
        net, params = nets[0], dict(nets[0].named_parameters())
        add = lambda v: tuple(map(add, v)) if isinstance(v, tuple) else v.unsqueeze(0)

        def over_members(residuals):
            return lambda p, batch: {k: add(v) for k, v in
                                     residuals(net if p is params else call(net, p), batch).items()}

        return params, over_members
    params, _ = torch.func.stack_module_state(nets)
    for s, net in enumerate(nets):
        for name, p in net.named_parameters():
            p.data = params[name].data[s]  # a view: the nets follow the stacked parameters
    return params, lambda residuals: torch.func.vmap(lambda p, batch: residuals(call(nets[0], p), batch))


def _pairs(residuals):
    """Those residuals that are pairs (r, q)."""
    return lambda net, batch: {k: v for k, v in residuals(net, batch).items() if isinstance(v, tuple)}


def _stepped(residuals):
    """Residuals, with r + lam (q - q now) for pairs (r, q) where the batch has a lam for them, r otherwise."""

    def stepped(net, batch):
        out = {}
        for k, v in residuals(net, batch).items():
            r, q = v if isinstance(v, tuple) else (v, None)
            lam = None if q is None else batch.get(f"lam_{k}")
            out[k] = r if lam is None else r + lam * (q - q.detach())
        return out

    return stepped


def make_optimizer(name, params, lr):
    if name == "adam":
        return torch.optim.Adam(params, lr, fused=True)
    try:
        from pytorch_optimizer import SOAP
    except ImportError:
        raise ValueError("--optimizer soap: the package is missing; pip install pytorch-optimizer") from None
    return SOAP(params, lr, betas=(0.9, 0.999), weight_decay=0.0, precondition_frequency=10)


def learning_rate(step, lr, warmup, decay, decay_every):
    if step < warmup:
        return lr * (step + 1) / warmup
    return lr * decay ** ((step - warmup) / decay_every)


def causal_weights(r, terms, tol=1.0, chunks=32, average=lambda x: x):
    """w_i = exp(-tol sum_{j<i} L_j), L_j the mean square of time chunk j, the smallest over `terms`; constants
    for the gradient. {name: [S, B]}; rows sorted by time, B a multiple of chunks."""
    weight = None
    for k in terms:
        S, B = r[k].shape
        if B % chunks:
            raise ValueError(f"--batch: {B} points do not split into {chunks} causal chunks; use multiples of {chunks}")
        L = average(r[k].detach().square().reshape(S, chunks, -1).mean(2))  # [S, chunks]
        w_k = torch.exp(-tol * (L.cumsum(1) - L))
        weight = w_k if weight is None else torch.minimum(weight, w_k)
    return {k: weight.repeat_interleave(r[k].shape[1] // chunks, 1) for k in terms}


def gradient_sizes(scheme, r, params, causal, generators, average=lambda x: x, ranks=1):
    """{name: [S]}. "grad_norm": norm of the gradient of the term's loss (Wang, Teng, Perdikaris 2021). "ntk": mean over
    its points of |d r_i / d theta|^2 (Wang, Yu, Perdikaris 2022), estimated without bias and without per-point
    Jacobians by |grad sum_i v_i r_i|^2 / B with random signs v."""
    c = causal_weights(r, **causal, average=average) if causal else {}
    sizes, factor = {}, 1 if scheme == "grad_norm" else math.sqrt(ranks)  # signed sums add up over processes
    for k in r:
        scaled = r[k] * c[k].sqrt() if k in c else r[k]  # [S, B]
        if scheme == "grad_norm":
            target = scaled.square().mean(1).sum()
        else:
            B = scaled.shape[1]
            v = torch.stack([torch.randint(0, 2, (B,), generator=g, device=g.device) for g in generators])
            target = ((2 * v - 1) * scaled).sum() / math.sqrt(B)
        grads = torch.autograd.grad(target, list(params.values()), retain_graph=True, allow_unused=True)
        square = sum((factor * average(d)).square().reshape(len(scaled), -1).sum(1)
                     for d in grads if d is not None)
        sizes[k] = square.sqrt() if scheme == "grad_norm" else square
    return sizes


def balanced(sizes):
    """Weights that make weight * size equal for all terms, normalised as in jaxpi: mean(sizes) / size."""
    mean = sum(sizes.values()) / len(sizes)
    return {k: mean / (v + 1e-12 * mean) for k, v in sizes.items()}


def progress(steps, start):
    """A progress bar with loss, error, rank and the time left; None where stderr is no terminal or tqdm is absent."""
    with contextlib.suppress(ImportError):
        if sys.stderr.isatty():
            from tqdm import tqdm

            return tqdm(total=steps, initial=min(start, steps), dynamic_ncols=True, unit="step")


class Stopped(Exception):
    """Training was asked to stop and has written its checkpoint."""


def previous(path):
    return path.with_name(f"{path.stem}_previous{path.suffix}")


def save_checkpoint(path, state):
    """Write the checkpoint; the one before stays as checkpoint_previous.pt. At no moment is there none of the name."""
    buffer = io.BytesIO()  # so that a full disk is an OSError
    torch.save(state, buffer)

    def write(tmp):
        tmp.write_bytes(buffer.getvalue())
        if path.exists():
            try:
                atomically(previous(path), lambda link: os.link(path, link))  # a second name, not a move
            except OSError:  # a file system without hard links: a kill before the next rename leaves the previous one
                os.replace(path, previous(path))

    atomically(path, write)


def load_checkpoint(path, config):
    """The state in `path`, or where that cannot be read in the one before."""
    if path is None or not (path.exists() or previous(path).exists()):
        raise ValueError(f"--resume: there is no checkpoint {path}; run without --resume first")
    errors = []
    for file in (path, previous(path)):
        try:
            state = torch.load(file, weights_only=True, map_location="cpu")
            found = state["config"]
            break
        except Exception as e:
            errors.append(f"{file} cannot be read ({type(e).__name__})")
    else:
        raise ValueError(f"--resume: {errors[0]}; run without --resume")
    if found != config:
        differs = [k for k in {**(found or {}), **(config or {})} if (found or {}).get(k) != (config or {}).get(k)]
        raise ValueError(f"--resume: {file} is of another configuration ({', '.join(differs)} differ); "
                         "use the same flags, or another --out")
    if errors:
        print(f"{errors[0]}; continuing from {file.name}", flush=True)
    return state


def atomically(path, write):
    """write(temporary path), then rename: `path` is always whole, the old one or the new one."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(tmp)
        os.replace(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise


def write_rows(path, rows):
    def write(tmp):
        with open(tmp, "w", newline="") as f:
            out = csv.DictWriter(f, list(rows[0]))
            out.writeheader()
            out.writerows(rows)

    atomically(path, write)


# ------------------------------------------------------------------------------------------------
# Command line and output
# ------------------------------------------------------------------------------------------------


def fail(message, status=2):
    """One line on stderr, naming the flag and the remedy; exit status 2 for bad input."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(status)


@contextlib.contextmanager
def reported(folder, plot=True):
    """What a run into `folder` may end with, in one line: bad input, a full disk (status 2), divergence (status 1), and
    Ctrl-C or SIGTERM (130, 143) after the step under way. Yields stop() for train(). Refuses a folder in use; after
    a divergence draws the history up to there."""
    signals, old = [], {}

    def note(number, frame):
        signals.append(number)
        signal.signal(number, old[number])  # a second one is not waited for

    if threading.current_thread() is threading.main_thread():
        old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with locked(folder):
            yield lambda: bool(signals)
    except ValueError as e:
        fail(e)
    except OSError as e:
        fail(f"--out: cannot write to {folder} ({e.strerror}); choose another folder or make room")
    except FloatingPointError as e:
        if plot:
            plot_history(folder)
        fail(f"{Path(folder).name}: {e}", status=1)
    except Stopped as e:
        again = sys.argv if "--resume" in sys.argv else [*sys.argv, "--resume"]
        fail(f"{Path(folder).name}: {e}; continue with: python {shlex.join(again)}", status=128 + signals[0])
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def locked(folder):
    """Hold `folder`, which need not exist yet, against other runs; the system lets go when the process ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        fcntl = None
    if fcntl is None or world()[0] > 0:
        yield
        return
    new = [p for p in (Path(folder), *Path(folder).parents) if not p.exists()]
    Path(folder).mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--out: another run is writing to {folder}; wait for it, or use another --out") from None
        yield
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):
            for p in new:
                p.rmdir()  # if nothing was written


def positive(kind):
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < math.inf:
            wanted = "integer" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"must be a positive {wanted}, got {text!r}")
        return value

    return parse


def natural(text):
    if not text.isdecimal() or len(text) > 12:
        raise argparse.ArgumentTypeError(f"must be an integer from 0 to 10^12, got {text!r}")
    return int(text)


def fraction(text):
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be a number in [0, 1), got {text!r}")
    return value


def parse_args(description, presets, argv=None, extra=None):
    """The flags shared by all scripts. `presets` = {"paper": {...}, "laptop": {...}, "smoke": {...}} fills what the
    command line leaves open, its entries "all" and "ng" what is otherwise with --all and --optimizer ng;
    extra(parser) adds the script's own flags."""
    cli = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.error = fail
    flag = cli.add_argument
    flag("--sfli", nargs="?", const="gauss", choices=KINDS, help="structured first layer; without a value: gauss")
    flag("--all", action="store_true", help="every configuration of the figure or table, and the figure")
    flag("--preset", default="auto", choices=["auto", *presets], help="auto: paper on CUDA, laptop on a CPU")
    flag("--steps", type=positive(int), help="training steps; the schedule is stretched with them")
    flag("--batch", type=positive(int), help="points per step")
    flag("--width", type=positive(int), help="neurons per hidden layer")
    flag("--lr", type=positive(float), help="initial learning rate; with ng: the longest step")
    flag("--optimizer", choices=["adam", "soap", "ng"],
         help="soap needs the package pytorch-optimizer; ng is natural gradient (one seed, float64)")
    flag("--damping", type=positive(float), help="first damping lambda of ng (default 1e-3); it adapts")
    flag("--momentum", type=fraction, help="SPRING momentum of ng, in [0, 1) (default 0)")
    flag("--seed", type=natural, default=0, help="first seed (default 0)")
    flag("--seeds", type=positive(int), help="number of seeds, trained at once (default 1; 5 in the tables)")
    flag("--gamma", type=lambda text: text if text == "auto" else positive(float)(text),
         help="shape parameter of SFLI (default: the paper's table); auto: chosen by the rank of the Gaussian layer")
    flag("--C", type=positive(float), help="take gamma = C (n^(1/d) - 1) / |Omega|^(1/d) instead")
    flag("--eps", type=positive(float), default=1e-6, help="threshold of the eps-rank (default 1e-6)")
    flag("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto)")
    flag("--dtype", choices=["float32", "float64"], help="precision (default float32; with ng always float64)")
    flag("--compile", default="auto", choices=["auto", "on", "off"],
         help="torch.compile; auto: from 2000 steps on, on a CPU where a C++ compiler and Python.h are found")
    flag("--out", default="runs", help="results go to OUT/experiment/config/ (default runs)")
    flag("--resume", action="store_true", help="continue from the checkpoints in OUT")
    flag("--save-seconds", type=positive(float), help="a checkpoint every so many seconds (default 120)")
    flag("--save-steps", type=positive(int), help="and every so many steps (default: by time alone)")
    flag("--no-plot", action="store_true", help="no figures")
    if extra:
        extra(cli)
    args = cli.parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else list(argv)
    if args.all and args.sfli:
        fail("--all runs every configuration; drop --sfli")
    if args.gamma and args.C:
        fail("--gamma and --C exclude each other; drop one")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    join_world(args)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", args.device):
        fail(f"--device: {args.device!r} is unknown; use auto, cpu, cuda or cuda:N")
    if args.device != "cpu" and int((args.device + ":0").split(":")[1]) >= torch.cuda.device_count():
        fail(f"--device {args.device}: PyTorch sees {torch.cuda.device_count()} CUDA devices; use --device cpu")
    if args.preset == "auto":
        args.preset = "laptop" if args.device == "cpu" else "paper"
        print(f"preset {args.preset} (device {args.device}; choose with --preset {'|'.join(presets)})")
    preset = dict(warmup=0, decay=1.0, decay_every=1000, dtype="float32", seeds=1) | presets[args.preset]
    of_ng = preset.pop("ng", {})
    of_all = preset.pop("all", {})
    preset |= of_all if args.all else {}
    if (args.optimizer or preset["optimizer"]) == "ng":
        preset |= dict(lr=1.0, warmup=0, decay=1.0, dtype="float64", damping=1e-3, momentum=0.0) | of_ng
    elif args.damping or args.momentum is not None:
        fail("--damping and --momentum belong to natural gradient; add --optimizer ng")
    for key in ("warmup", "decay_every"):
        preset[key] *= (args.steps or preset["steps"]) / preset["steps"]
    for key, value in preset.items():
        if getattr(args, key, None) is None:
            setattr(args, key, value)
    if 1 < args.seeds < world()[1]:
        fail(f"--seeds: {args.seeds} seeds do not occupy {world()[1]} processes; use as many at least, or one")
    if args.optimizer == "soap":
        if args.seeds > 1:
            fail("--optimizer soap preconditions one network; use --seeds 1 or --optimizer adam")
        try:
            make_optimizer("soap", [torch.zeros(1, requires_grad=True)], 1e-3)
        except ValueError as e:
            fail(e)
    if args.optimizer == "ng":
        if world()[1] > 1:
            fail("--optimizer ng runs in one process; start it without torchrun")
        if args.seeds > 1:
            fail("--optimizer ng trains one network at a time; use --seeds 1 and one --seed after the other")
        if args.dtype != "float64":
            fail("--optimizer ng computes in float64; drop --dtype float32")
        if args.compile == "on":
            fail("--optimizer ng is not compiled; drop --compile on")
        args.compile = "off"
    if args.compile == "auto":
        args.compile = "on" if args.steps >= 2000 and (args.device != "cpu" or cpu_can_compile()) else "off"
    torch.set_default_dtype(getattr(torch, args.dtype))
    torch.set_flush_denormal(True)  # before the first parallel operation, see train()
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # consoles that cannot print the arrow in the last line
    return args


def join_world(args):
    """Under torchrun: join the other processes, each on its own GPU; all but the first are silent."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks == 1 or not torch.distributed.is_available():
        return
    if args.device.startswith("cuda"):
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
        atexit.register(leave_world)
    if world()[0] > 0:
        args.no_plot, sys.stdout = True, open(os.devnull, "w")


def leave_world():
    """Gloo's threads must end before the interpreter, or they abort it now and then: DistributedDataParallel, which
    holds the group, is left in cycles of references."""
    gc.collect()
    torch.distributed.destroy_process_group()


def cpu_can_compile():
    """What torch.compile needs on a CPU: a C++ compiler and the Python headers that its kernels include."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    return bool(compiler) and (Path(sysconfig.get_path("include")) / "Python.h").exists()


def run(args, experiment, config, build, sample, residuals, evaluate, points, measure, gamma=None, paper=None,
        **options):
    """Train `build(generator)` for args.seeds seeds in args.out/experiment/config/, write config.json, history.csv,
    result.json and checkpoint.pt there, print the RESULT line; return the trained nets and the history.

    The network is drawn from torch's own generator, seeded with the seed; `generator` is for SFLI, so that with and
    without SFLI all later layers are the same. evaluate(net) gives rel_l2 at least; the eps-rank at `points` of every
    hidden layer is added to it. `options` go to train()."""
    folder, (rank, ranks) = Path(args.out) / experiment / config, world()
    seeds = list(range(args.seed, args.seed + args.seeds))
    settings = {"experiment": experiment, "config": config, "seeds": seeds, "gamma": gamma, "processes": ranks}
    split = ranks > 1 and args.seeds > 1  # under torchrun: each process its own seeds, in a folder of its own
    mine, place = (seeds[rank::ranks], folder / f"process{rank}") if split else (seeds, folder)
    settings = settings_of(args, "sfli", "C_grid", "search_steps", "search_seeds") | settings
    resume = args.resume and has_checkpoint(place)
    ng = {k: getattr(args, k) for k in ("damping", "momentum")} if args.optimizer == "ng" else {}

    def measured(net):
        ranks = eps_rank(net, points, args.eps, measure, layer="all")
        encoders = eps_rank(net, points, args.eps, measure, layer="first") if len(net.sfli_layers) > 1 else []
        return (evaluate(net) | {"eps_rank": ranks[-1]} | {f"eps_rank_{k}": r for k, r in enumerate(ranks, 1)}
                | {f"eps_rank_{name}": r for name, r in zip(net.sfli_layers, encoders)})

    with reported(folder, not args.no_plot) as stop:
        nets = []
        for seed in mine:
            torch.manual_seed(seed)
            nets.append(build(sfli_generator(seed)).to(args.device))
        if ng:  # refuse before anything is written
            constants = options.get("constants", lambda step: {})(0)
            constants = {k: torch.tensor(v, device=args.device) for k, v in constants.items()}
            NaturalGradient(nets[0], _stepped(residuals), **ng).size(sample(torch.Generator(args.device)) | constants)
        if not resume and (rank == 0 or split):
            place.mkdir(parents=True, exist_ok=True)
            atomically(place / "config.json", lambda tmp: tmp.write_text(json.dumps(settings, indent=1)))
            for old in ("checkpoint.pt", "checkpoint_previous.pt", "result.json", "history.csv"):
                (place / old).unlink(missing_ok=True)
        history = train(nets, sample, residuals, args.steps, lr=args.lr, warmup=args.warmup, decay=args.decay,
                        decay_every=args.decay_every, optimizer=args.optimizer, **ng, evaluate=measured, seeds=mine,
                        compile=args.compile == "on", folder=place, config=settings, resume=resume,
                        save_seconds=args.save_seconds, save_steps=args.save_steps, stop=stop, together=not split,
                        **options)
        if split:
            history = sorted(gathered(history), key=lambda row: (row["step"], row["seed"]))
            if rank == 0:
                write_rows(folder / "history.csv", history)
    first, last = history[: len(seeds)], history[-len(seeds) :]
    seconds = last[0]["seconds"]
    result = {
        "experiment": experiment, "config": config, "preset": args.preset, "seeds": seeds, "steps": args.steps,
        "rel_l2": [row["rel_l2"] for row in last], "rel_l2_mean": sum(row["rel_l2"] for row in last) / len(seeds),
        "eps": args.eps, "eps_rank_initial": [row["eps_rank"] for row in first],
        "eps_rank_final": [row["eps_rank"] for row in last], "width": args.width, "seconds": seconds,
        "steps_per_second": args.steps / seconds, "device": args.device, "dtype": args.dtype,
        "torch": torch.__version__, "commit": commit(), "argv": args.argv, "gamma": gamma, "paper": paper,
        "processes": ranks,
    }
    if rank == 0:
        atomically(folder / "result.json", lambda tmp: tmp.write_text(json.dumps(result, indent=1)))
    print(f"eps-rank: last hidden layer, eps = {args.eps:g}, M = {measure:g} x mean over {len(points)} points")
    low, high = (sum(result[k]) / len(seeds) for k in ("eps_rank_initial", "eps_rank_final"))
    print(f"RESULT {experiment} {config} rel_l2={result['rel_l2_mean']:.3e} "
          f"eps_rank={low:.4g}→{high:.4g}/{args.width} seconds={seconds:.1f}", flush=True)
    return nets, history


def shape(args, kind, table, domain, points, measure, embed=None):
    """gamma for sfli(): --gamma, or None (eq. (choice)) where --C is given, or the paper's table. --gamma auto scans
    the Gaussian layer of the first seed at `points` (scan_gamma) and leaves the other kinds of --all to the table."""
    if kind is None and not args.all and (args.gamma or args.C):
        fail("--gamma and --C shape the first layer of SFLI; add --sfli or --all")
    if kind and args.C and args.width < 2:
        fail("--C: eq. (choice) makes gamma zero for one neuron; widen with --width or give --gamma")
    if kind is None or args.C:
        return None
    if args.gamma != "auto":
        return args.gamma or table[kind]
    if kind != "gauss" and not args.all:
        fail(f"--gamma auto looks at Gaussians; give a number for --sfli {kind}")
    if args.width < 2:
        fail("--gamma auto needs at least two neurons; widen with --width")
    if kind != "gauss":
        return table[kind]
    return scan_gamma(args.width, domain, points, args.eps, measure, embed, sfli_generator(args.seed))


def sfli_generator(seed):
    return torch.Generator().manual_seed(1000003 * seed + 2)


def settings_of(args, *skip):
    """What a checkpoint must agree with: all flags but those that choose among runs or leave them alone, and `skip`."""
    skip = ("out", "resume", "no_plot", "all", "argv", "dims", "save_seconds", "save_steps", *skip)
    return {k: v for k, v in vars(args).items() if k not in skip}


def configurations(args, experiment, choices, name):
    """The runs of a script: args alone, or with --all one for each of `choices`; name(args) is for --resume."""
    runs = [argparse.Namespace(**vars(args) | choice) for choice in (choices if args.all else [{}])]
    check_resume(args, experiment, [name(a) for a in runs])
    return runs


def check_fourier(args):
    if args.fourier and (args.sfli or args.all):
        fail("--fourier replaces SFLI; drop --sfli or --all")
    if args.fourier and args.width % 2:
        fail("--fourier needs an even --width: half cosines, half sines")


def check_resume(args, experiment, configs):
    """--resume needs something to resume; with --all the configurations that have not begun start anew."""
    folders = [Path(args.out) / experiment / config for config in configs]
    if args.resume and not any(map(has_checkpoint, folders)):
        fail(f"--resume: there is no checkpoint {folders[0] / 'checkpoint.pt'}; run without --resume first")


def has_checkpoint(folder):
    return any(Path(folder).glob("checkpoint*.pt")) or any(Path(folder).glob("process*/checkpoint*.pt"))


def cached(folder, name, compute):
    """The arrays {name: array} that compute() returns, kept as folder/name.npz. Under torchrun the first process goes
    first."""
    rank, ranks = world()
    if rank > 0:
        torch.distributed.barrier()
    data = _cached(None if folder is None else Path(folder) / f"{name}.npz", compute)
    if rank == 0 and ranks > 1:
        torch.distributed.barrier()
    return data


def _cached(path, compute):
    import numpy as np

    if path is not None and path.exists():
        with contextlib.suppress(Exception), np.load(path) as data:  # what cannot be read is computed anew
            return dict(data)
    data = compute()
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            buffer = io.BytesIO()
            np.savez(buffer, **data)
            atomically(path, lambda tmp: tmp.write_bytes(buffer.getvalue()))
        except OSError as e:
            fail(f"--out: cannot write {path} ({e.strerror}); choose another folder or make room")
    return data


def relative_l2(y, f):
    return (torch.linalg.norm(y - f) / torch.linalg.norm(f)).item()


def table(folder, rows):
    """Write and print rows [{column: cell}] as folder/table.csv and table.md. A cell is a number, or a pair (values
    over the seeds, the paper's number or None), shown as mean +- std, paper, ratio."""
    long, short = [], []
    for row in rows:
        wide, line = {}, {}
        for key, cell in row.items():
            if not isinstance(cell, tuple):
                wide[key] = line[key] = cell
                continue
            values, paper = torch.tensor(cell[0], dtype=torch.float64), cell[1]
            mean, std = values.mean().item(), values.std(correction=0).item()
            wide |= {f"{key}_mean": mean, f"{key}_std": std, f"{key}_paper": paper, f"{key}_seeds": len(values)}
            beside = f" (paper {paper:.2e}, ratio {mean / paper:.2f})" if paper else ""
            line[key] = f"{mean:.2e} ± {std:.1e}{beside}"
        long.append(wide)
        short.append(line)
    text = "".join("| " + " | ".join(map(str, cells)) + " |\n"
                   for cells in [list(short[0]), ["---"] * len(short[0]), *(line.values() for line in short)])
    with reported(folder):
        atomically(Path(folder) / "table.md", lambda tmp: tmp.write_text(text))
        write_rows(Path(folder) / "table.csv", long)
    print(text, end="")


COLORS = {"baseline": "black", "gauss": "tab:blue", "tanh": "tab:orange", "cos": "tab:green", "hat": "tab:red"}


def figure(rows, columns, size=(4.0, 3.2)):
    """Figure and array of axes, drawn without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=(size[0] * columns, size[1] * rows), squeeze=False, layout="constrained")


def curve(ax, history, key, label=None, log=True, **style):
    """Plot history[key] against the step: the mean over the seeds and the band from lowest to highest."""
    steps = sorted({row["step"] for row in history})
    values = [[row[key] for row in history if row["step"] == step] for step in steps]
    mean = [sum(v) / len(v) for v in values]
    (line,) = ax.plot(steps, mean, label=label, **style)
    if len(values[0]) > 1:
        ax.fill_between(steps, list(map(min, values)), list(map(max, values)), color=line.get_color(), alpha=0.2, lw=0)
    ax.set_xlabel("step")
    ax.locator_params(axis="x", nbins=5)
    if log:
        ax.set_yscale("log")


def plot_history(folder):
    """history.csv of a run that ended early: loss, error and eps-rank against the step."""
    with contextlib.suppress(OSError, ImportError):
        with open(Path(folder) / "history.csv", newline="") as f:
            history = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(f)]
        keys = [k for k in ("loss", "rel_l2", "eps_rank") if history and k in history[0]]
        if keys:
            fig, axes = figure(1, len(keys))
            for ax, key in zip(axes[0], keys):
                curve(ax, history, key, log=key != "eps_rank")
                ax.set_ylabel(key)
            save_figure(fig, Path(folder) / "fig_history.png")


def plot_dimensions(rows, path):
    """Error against d from the rows of table(): mean and range over the seeds, crosses for the paper's numbers."""
    fig, axes = figure(1, 1, size=(5.2, 3.6))
    ax, dims = axes[0, 0], [row["d"] for row in rows]
    keys = [key for key, cell in rows[0].items() if isinstance(cell, tuple)]
    for key, color in zip(keys, ("black", "tab:blue", "tab:red")):
        values = [row[key][0] for row in rows]
        mean = [sum(v) / len(v) for v in values]
        spread = [[m - min(v) for m, v in zip(mean, values)], [max(v) - m for m, v in zip(mean, values)]]
        ax.errorbar(dims, mean, spread, marker="o", capsize=3, color=color, label=key)
        known = [(row["d"], row[key][1]) for row in rows if row[key][1]]
        ax.plot(*zip(*known) if known else ([], []), ls="", marker="x", color=color)
    ax.plot([], [], ls="", marker="x", color="gray", label="paper")
    ax.set(xlabel="d", ylabel="relative test error", xscale="log", yscale="log", xticks=dims, xticklabels=dims)
    ax.minorticks_off()
    ax.legend(fontsize=8)
    save_figure(fig, path)


def save_figure(fig, path):
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path, dpi=120)
    except OSError as e:
        fail(f"--out: cannot write {path} ({e.strerror}); choose another folder")
    print(f"figure {path}")


def commit():
    """The commit of this file's repository, or None where it has none."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        here = Path(__file__).resolve().parent
        return subprocess.run(["git", "-C", here, "describe", "--always", "--dirty"], check=True, capture_output=True,
                              text=True).stdout.strip() or None


def self_report():
    """python common.py: what this machine has, what works on it, and how fast it is."""
    from importlib import metadata

    def version(package):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
        return "absent"

    packages = ("torch", "numpy", "scipy", "matplotlib", "triton", "tqdm", "pytorch-optimizer")
    print(f"python {sys.version.split()[0]}, " + ", ".join(f"{p} {version(p)}" for p in packages))
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = ", ".join(torch.cuda.get_device_name(k) for k in range(cuda)) or "no CUDA device"
    print(f"{os.cpu_count()} CPU cores, {torch.get_num_threads()} threads; {gpus}")
    print(f"--preset auto is {'paper' if cuda else 'laptop'}")
    device = "cuda" if cuda else "cpu"
    try:
        if not (cuda or cpu_can_compile()):
            raise RuntimeError("it needs a C++ compiler and Python.h")
        x = torch.ones(3, device=device)
        assert torch.equal(torch.compile(lambda x: torch.tanh(x) + 1)(x), torch.tanh(x) + 1)
        print("torch.compile works")
    except Exception as e:
        print(f"torch.compile does not work ({str(e).splitlines()[0]}); runs train uncompiled")
    try:
        from kernels.gaussian_gram import gaussian_gram
    except ImportError as e:
        print(f"gaussian_gram: absent ({e}); the eps-rank goes the plain way")
    else:
        gaussian_gram(*(torch.rand(n, 2, device=device) for n in (64, 8, 8)))
        print(f"gaussian_gram works, {'by its Triton kernel' if cuda else 'on the CPU; the Triton kernel needs CUDA'}")
    net = sfli(PirateNet(2, 128, 2), [(0, 1), (-1, 1)]).to(device)
    times = []

    def sample(generator):
        times.append(time.perf_counter())
        return {"x": uniform([(0, 1), (-1, 1)], 512, generator)}

    def residuals(net, batch):
        u, heat = jet(net, batch["x"], "t x", "t-1e-4*xx")
        return {"res": (heat + u)[:, 0]}

    start = time.perf_counter()
    with contextlib.suppress(Stopped):
        train(net, sample, residuals, 500, stop=lambda: time.perf_counter() - start > 8)
    print(f"speed: {1e3 * min(b - a for a, b in zip(times, times[1:])):.1f} ms per step of a heat equation, PirateNet "
          "2 x 128, batch 512, uncompiled")


if __name__ == "__main__":
    self_report()
