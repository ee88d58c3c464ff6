"""Structured first-layer initialization (SFLI): initializers, networks, derivatives, eps-rank, training.

Tang, Yang, Zhao, Zhu, "Structured First-Layer Initialization Pre-Training Techniques to Accelerate Training Process
Based on eps-Rank"; numbers of sections, equations and examples below are the paper's.

Copy this file into your own project; it needs torch and nothing else beside it:

    from common import sfli
    net = sfli(net, [(-1, 1), (-1, 1)])      # net: an nn.Sequential on the square [-1, 1]^2

Sections: SFLI - Networks - Derivatives - eps-rank - Training; kernels/ beside it adds loss weights, checkpoints, ng.
No setting of PyTorch is changed; on a CPU torch.set_flush_denormal(True) at the start of your program helps Gaussians.
"""
import contextlib
import copy
import functools
import importlib
import math
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

# SFLI (Section 3.1): F_i(x) = sigma(gamma (alpha_i . x + c_i)), stored as w = gamma alpha, b = gamma c ----------------

KINDS = ("gauss", "tanh", "cos", "hat")
ACTIVATIONS = tuple(getattr(nn, name) for name in (  # what sfli() takes for one: the elementwise ones of torch.nn
    "CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid Mish PReLU RReLU ReLU ReLU6 SELU "
    "SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Threshold").split())

class Refused(ValueError):
    """A wrong argument. The message starts with its name, "gamma: ..", and ends with the remedy."""

class FirstLayer(nn.Module):
    """First hidden layer with its activation: sigma(W x + b), or for "gauss" F_i(x) = exp(-sum_k (w_ik x_k + b_ik)^2)
    with w, b [n, d]; w and b are what is trained."""

    def __init__(self, kind, weight, bias):
        super().__init__()
        self.kind, self.weight, self.bias = kind, nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x):
        if self.kind != "gauss":
            z = F.linear(x, self.weight, self.bias)
            return F.relu(1 - torch.abs(z)) if self.kind == "hat" else getattr(torch, self.kind)(z)
        # The expanded square cancels gamma^2 |x|^2, for which float32 has too few digits: a thin product in float64.
        s = squared_distance(x, self.weight, self.bias).to(self.weight.dtype)
        # Below exp(-40) = 4e-18 a bump adds nothing to a sum of O(1) terms, but left alone its tails are subnormal
        # numbers, on which CPUs multiply matrices many times slower.
        return torch.exp(-s) * (s < 40)

    def get_extra_state(self):
        return torch.tensor(KINDS.index(self.kind))  # so that state_dict() tells the activation

    def _load_from_state_dict(self, saved, prefix, *args):
        kind = KINDS[saved.pop(f"{prefix}_extra_state", KINDS.index(self.kind))]  # parameters alone do not tell
        if kind != self.kind:
            raise Refused(f"kind: the saved first layer is {kind}, this one is {self.kind}; build it as {kind}")
        super()._load_from_state_dict(saved, prefix, *args)

    def extra_repr(self):
        return f"{self.kind}, {self.weight.shape[1]} -> {self.weight.shape[0]}"

def shape_parameter(n, domain, C=1.0):
    """gamma = C (n^(1/d) - 1) / |Omega|^(1/d), Eq. (3.3)."""
    if n < 2:
        raise Refused("gamma: Eq. (3.3) is zero for one neuron; widen the layer or give gamma")
    return C * (n ** (1 / len(domain)) - 1) / volume(domain) ** (1 / len(domain))

def volume(domain):
    return math.prod(hi - lo for lo, hi in domain)

def uniform(domain, n, generator=None, dtype=None):
    """n points drawn uniformly from the box [(lo, hi), ...] -> [n, d], on the generator's device."""
    device = "cpu" if generator is None else generator.device
    lo, hi = torch.tensor(domain, dtype=dtype or torch.get_default_dtype(), device=device).T
    return lo + (hi - lo) * torch.rand(n, len(domain), generator=generator, dtype=lo.dtype, device=device)

def sfli(net, domain, kind="gauss", gamma=None, C=1.0, generator=None, layer=None):
    """Give `net` a structured first layer on the box `domain` = [(lo, hi), ...] and return it.

    nn.Sequential     a copy in which the first Linear is replaced, and the activation behind it by nn.Identity;
                      modules before that Linear (an embedding) stay and are applied to the centres.
    nn.Linear         the layer to assign back, `self.first = sfli(self.first, domain)`. It contains its activation:
                      drop the one that your forward() applied to the old layer, or keep it and use sfli_().
    network of below  the first layer (MLP, ResNet) or both encoders (ModifiedMLP, PirateNet), in place.
    any module        with layer="trunk.0" that Linear, in place, and the activation behind it in its Sequential.

    gamma defaults to Eq. (3.3) with the layer's width and C; "auto" (gauss, needs kernels/) chooses it by the rank.
    hat has no second derivative: not for equations of second order. Draws come from `generator`."""
    try:
        domain = [(float(lo), float(hi)) for lo, hi in domain]
    except (TypeError, ValueError):
        raise Refused(f"domain: {domain!r} is no list [(lo, hi), ...], one pair per axis") from None
    for k, (lo, hi) in enumerate(domain):
        if not -math.inf < lo < hi < math.inf:
            raise Refused(f"domain: axis {k} is ({lo:g}, {hi:g}); each axis needs finite lo < hi")
    if kind not in KINDS:
        raise Refused(f"kind: {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    if gamma not in (None, "auto") and not 0 < gamma < math.inf or not 0 < C < math.inf:
        raise Refused(f"gamma, C: {gamma} and {C} must be positive")
    draw = lambda old, embed: _first_layer(old, embed, domain, kind, gamma, C, generator)
    if isinstance(net, (nn.Linear, Dense)):
        return draw(net, nn.Identity())
    if hasattr(net, "_orig_mod") or layer is None and any(isinstance(m, FirstLayer) for m in net.modules()):
        raise Refused("net: compiled, or with a structured first layer already; call sfli once, before torch.compile")
    if layer is None and isinstance(net, MLP):
        for name in net.sfli_layers:
            setattr(net, name, draw(getattr(net, name)[0], net.embed))
        return net
    linears = [name for name, m in net.named_modules() if isinstance(m, (nn.Linear, Dense))]
    layer = linears[0] if layer is None and linears and isinstance(net, nn.Sequential) else layer
    if layer not in linears:
        raise Refused(f"layer: {layer!r} is no Linear followed by an activation; name the first Linear of this "
                      f"{type(net).__name__}, one of: {', '.join(linears) or 'none'}")
    return _replaced(net, layer.split("."), draw)

def _replaced(net, path, draw, before=()):
    """`net` with the Linear at `path` replaced. Sequentials on the way are copied, all other modules stay the same;
    `before`: what these Sequentials apply ahead of the Linear."""
    name, sequential = path[0], isinstance(net, nn.Sequential)
    at = list(net._modules).index(name)
    if sequential:
        before, net = (*before, *list(net)[:at]), copy.copy(net)
        net._modules = dict(net._modules)
    if path[1:]:
        setattr(net, name, _replaced(getattr(net, name), path[1:], draw, before if sequential else ()))
    elif sequential and at + 1 < len(net) and isinstance(net[at + 1], ACTIVATIONS):
        net[at], net[at + 1] = draw(net[at], nn.Sequential(*before)), nn.Identity()
    else:
        raise Refused(f"layer: {name!r} is not followed by an activation of torch.nn in a Sequential; put nn.Tanh() "
                      "there, or, where forward() applies one, call sfli_() on this Linear")
    return net

@torch.no_grad()
def sfli_(linear, domain, kind="tanh", gamma=None, C=1.0, generator=None):
    """Weight and bias of a structured first layer for an nn.Linear, in place, as torch.nn.init does: for a forward()
    that applies the activation, "tanh", "cos" or "sin", itself. For sin(30 z) divide both by 30 afterwards."""
    own = isinstance(linear, nn.Linear) and {"weight", "bias"} <= {name for name, _ in linear.named_parameters()}
    if kind not in ("tanh", "cos", "sin") or not own:
        raise Refused(f"linear, kind: tanh, cos or sin of an nn.Linear with its own weight and bias is wanted, not "
                      f"{kind!r} of {linear}; sfli() makes a layer of every kind")
    first = sfli(linear, domain, kind.replace("sin", "cos"), gamma, C, generator)
    linear.weight.copy_(first.weight)
    linear.bias.copy_(first.bias + (math.pi / 2 if kind == "sin" else 0))  # cos z = sin(z + pi / 2)
    return linear

def _first_layer(old, embed, domain, kind, gamma, C, generator):
    if isinstance(old, nn.LazyLinear):
        raise Refused("net: a LazyLinear has no width yet; pass a batch through the network first")
    like = next(old.parameters())
    n, d = old.out_features, old.in_features
    if gamma == "auto":
        if kind != "gauss":
            raise Refused(f"gamma: auto looks at the rank of Gaussians; give a number for {kind}")
        gamma = _kernel("gaussian_gram", "gamma: auto").scan_gamma(n, domain, embed=embed, generator=generator)
    gamma = shape_parameter(n, domain, C) if gamma is None else gamma
    # Centres and shifts live where data can be: draw in the physical domain, then embed.
    with torch.no_grad():
        x = uniform(domain, max(n, 1024), generator, torch.float64).to(like)
        z = embed(x).double()  # [max(n, 1024), d]
    if z.shape[1] != d:
        raise Refused(f"domain: {len(domain)} axes make {z.shape[1]} inputs, but the layer takes {d}")
    if kind == "gauss":
        w, b = torch.full((n, d), gamma, dtype=torch.float64), -gamma * z[:n]
    else:
        draw = dict(generator=generator, dtype=torch.float64, device="cpu" if generator is None else generator.device)
        alpha, u = torch.randn(n, d, **draw).to(z), torch.rand(n, **draw).to(z)
        if kind != "cos":
            alpha = alpha / alpha.norm(dim=1, keepdim=True)  # uniform on the unit sphere
        # The paper's c_i >= 0, "uniform in an interval with respect to Omega": measured from the middle of the
        # domain, c_i is uniform on [0, max_x |alpha_i . (x - middle)|], so that every hyperplane
        # alpha_i . (x - middle) + c_i = 0 meets the domain; the signs of alpha_i serve both sides.
        if torch.equal(z, x.double()):  # no embedding: the box itself
            lo, hi = z.new_tensor(domain).T
            middle, reach = (lo + hi) / 2, alpha.abs() @ (hi - lo) / 2  # [d], [n]
        else:
            middle = (z.amin(0) + z.amax(0)) / 2
            reach = ((z - middle) @ alpha.T).abs().amax(0)
        w, b = gamma * alpha, gamma * (u * reach - alpha @ middle)
    return FirstLayer(kind, w.to(like), b.to(like))

def _kernel(name, wanted):
    """A module of kernels/, which a copy of this file may lack."""
    try:
        return importlib.import_module(f"kernels.{name}")
    except ModuleNotFoundError:
        raise Refused(f"{wanted} is in kernels/{name}.py; copy the folder kernels/ beside common.py") from None

# Networks: y = beta . y_L with y_L the features of the last hidden layer ----------------------------------------------

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

def tanh_layer(d, n, rwf=None):
    return nn.Sequential(Dense(d, n, rwf), nn.Tanh())

class Periodic(nn.Module):
    """Exact periodicity: x_k -> cos(2 pi x_k / P_k), sin(2 pi x_k / P_k) for the axes in `periods`
    = {axis: period}, the other axes unchanged, in the order of the axes."""

    def __init__(self, d, periods):
        super().__init__()
        self.d, self.periods = d, dict(periods)
        if not all(0 <= k < d and p > 0 for k, p in self.periods.items()):
            raise Refused(f"periods: {self.periods} must map axes 0..{d - 1} to positive periods")

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
    """Random Fourier features, SFLI's competitor: x -> [cos(B x), sin(B x)], B ~ scale N(0, 1), trained as in jaxpi."""

    def __init__(self, d, n, scale=1.0):
        super().__init__()
        self.B = nn.Parameter(scale * torch.randn(n // 2, d))

    def forward(self, x):
        z = F.linear(x, self.B)
        return torch.cat([torch.cos(z), torch.sin(z)], -1)

class MLP(nn.Module):
    """y_1 = first(x), y_l = tanh(W_l y_{l-1} + b_l), Eq. (1.1); `embed` maps x to `d` inputs; `first`: width of y_1."""

    sfli_layers = ("first",)

    def __init__(self, d, n, L, out=1, rwf=None, embed=None, first=None):
        super().__init__()
        widths = [first or n] + [n] * (L - 1)
        if isinstance(self, ResNet) and widths[0] != n:
            raise Refused(f"first: a ResNet adds layers of width {n} to y_1; use MLP for another width there")
        self.embed = nn.Identity() if embed is None else embed
        self.first = tanh_layer(d, widths[0], rwf)
        self.blocks = nn.ModuleList(tanh_layer(k, n, rwf) for k in widths[:-1])
        self.out = Dense(widths[-1], out, rwf)

    def forward(self, x):
        y = self.first(self.embed(x))
        for block in self.blocks:
            y = block(y)
        return self.out(y)

class ResNet(MLP):
    """y_1 = first(x), y_l = y_{l-1} + tanh(W_l y_{l-1} + b_l)."""

    def forward(self, x):
        y = self.first(self.embed(x))
        for block in self.blocks:
            y = y + block(y)
        return self.out(y)

class Gated(nn.Module):
    """One layer of Eq. (3.5): z = tanh(W y + b), z U + (1 - z) V, as V + z (U - V)."""

    def __init__(self, d, n, rwf=None):
        super().__init__()
        self.dense = Dense(d, n, rwf)

    def forward(self, y, D, V):
        return V + torch.tanh(self.dense(y)) * D

class ModifiedMLP(MLP):
    """Encoders U, V, then L gated layers, Eqs. (3.4) and (3.5)."""

    sfli_layers = ("U", "V")

    def __init__(self, d, n, L, out=1, rwf=None, embed=None):
        nn.Module.__init__(self)
        self.embed = nn.Identity() if embed is None else embed
        self.U, self.V, self.gate = tanh_layer(d, n, rwf), tanh_layer(d, n, rwf), Gated(d, n, rwf)
        self.blocks = self.make_blocks(n, L, rwf)
        self.out = Dense(n, out, rwf)

    def make_blocks(self, n, L, rwf):
        return nn.ModuleList(Gated(n, n, rwf) for _ in range(L - 1))

    def forward(self, x):
        x = self.embed(x)
        V = self.V(x)
        D = self.U(x) - V
        y = self.gate(x, D, V)
        for block in self.blocks:
            y = block(y, D, V)
        return self.out(y)

class PirateBlock(nn.Module):
    """Eq. (3.6): two gated layers, one plain, adaptive skip alpha h + (1 - alpha) y, alpha = 0."""

    def __init__(self, n, rwf=None):
        super().__init__()
        self.f, self.g, self.h = Gated(n, n, rwf), Gated(n, n, rwf), tanh_layer(n, n, rwf)
        self.alpha = nn.Parameter(torch.zeros(()))

    def forward(self, y, D, V):
        h = self.h(self.g(self.f(y, D, V), D, V))
        return torch.lerp(y, h, self.alpha)

class PirateNet(ModifiedMLP):
    """Encoders and one gated layer, then L residual blocks, Eq. (3.7). Its last line reads
    y = beta . y_L; we take y_{L+1}, or the last block would have no effect."""

    def make_blocks(self, n, L, rwf):
        return nn.ModuleList(PirateBlock(n, rwf) for _ in range(L))

# Derivatives: collapsed Taylor mode, value and wanted derivatives through the network at once -------------------------

def jet(f, x, variables, derivatives):
    """Value and derivatives of f at x [B, d], each [B, out]:

        u, u_t, u_x, u_xx = jet(net, x, "t x", "t x xx")
        u, u_t, laplacian = jet(net, x, "t x1 x2 x3", "t x1x1+x2x2+x3x3")
        u, residual = jet(net, x, "t x", "t - 1/3*xx + 1e-4*xxxx")

    `variables` names the columns of x, `derivatives` lists products of these or linear combinations of them, which
    cost one channel each. f is any module or function; it sees a Jet where it expects a tensor, and a tuple of outputs
    gives a tuple of lists. What has no rule, here in RULES or in kernels/jets.py, is left to nested autograd."""
    plan = _plan(variables, derivatives, torch.is_grad_enabled())
    if x.shape[-1] != plan.d:
        raise Refused(f"variables: {variables!r} names {plan.d} columns, x has {x.shape[-1]}")
    eye = torch.eye(plan.d, dtype=x.dtype, device=x.device)
    seed = [x] + [eye[group].unsqueeze(1) if group else sum(_scale(eye[v], m) for v, m in c) if c else None
                  for c, group in zip(plan.seeds, plan.groups[1:])]
    read = lambda y: [y.full(0)] + [sum(_scale(y.full(c), m) for c, m in channels) for channels in plan.outputs]
    try:
        y = f(Jet(seed, plan, is_input=Jet.short_cuts))
        return tuple(read(_as_jet(v, plan)) for v in y) if isinstance(y, (tuple, list)) else read(_as_jet(y, plan))
    except (AttributeError, TypeError, RuntimeError, AssertionError) as missing:
        return _nested(f, x, eye, plan.wanted, str(missing).partition("\n")[0])

def _nested(f, x, eye, wanted, missing):
    """The same by one forward derivative inside the other: 2^n evaluations of f for order n."""
    if not Jet.short_cuts:
        raise NotImplementedError(missing)  # to kernels/natural_gradient.py, which takes another way then
    y = f(x)  # what is wrong with f itself raises here
    if isinstance(y, (tuple, list)):
        return tuple(_nested(lambda x, k=k: f(x)[k], x, eye, wanted, missing) for k in range(len(y)))
    _say(f"jet: {missing}; nested autograd takes over, slower")
    along = lambda g, v: lambda x: torch.func.jvp(g, (x,), (eye[v].expand_as(x),))[1]
    try:
        with _ByRules(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return [y] + [sum(m * functools.reduce(along, term, f)(x) for term, m in entry) for entry in wanted]
    except (AttributeError, RuntimeError) as error:
        raise Refused(f"f: {missing}, and nested autograd fails; use other operations") from error

class _ByRules(torch.overrides.TorchFunctionMode):
    """Leaves layer_norm, of which PyTorch's second forward derivatives are wrong, and random dropout to our rules."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        by = _rule(name) if name == "layer_norm" else RULES.get(name, func) if name == "dropout" else func
        return by(*args, **(kwargs or {}))

class Plan:
    """Channels of a jet and the rule of their products; jet(f, x, "t x y", "t-xx-yy") has

        wanted    [(((0,), 1), ((1, 1), -1), ((2, 2), -1))]: linear combinations of terms, sorted tuples of variables.
                  One channel is enough for each, but products need the proper parts of every term as channels too
        groups    x and y are used alike, as squares of one sum: a group [1, 2], for which x stands from here on
        channels  0: the value, 1: x, which is the group's first derivatives [2, B, n], 2: t-xx-yy
        leibniz   (a b)_2 = a b_2 + a_2 b - 2 a_1 b_1, where the product a_1 b_1 is summed over the group"""

    def __init__(self, variables, derivatives, grad=False):
        number = {v: k for k, v in enumerate(variables.split())}
        self.wanted = [_parse(entry, number) for entry in re.sub(r"\s*([-+*/])\s*", r"\1", derivatives).split()]
        groups, wanted = RULES["group"](self.wanted, len(number)) if "group" in RULES else ({}, self.wanted)
        single = {((s, 1),) for entry in wanted for term, _ in entry for s, _ in splits(term)}
        single |= {((term, 1),) for entry in wanted if len(entry) == 1 for term, _ in entry}
        sums = {entry for entry in wanted if not all(((term, 1),) in single for term, _ in entry)}
        channels = [()] + sorted(single | sums, key=lambda c: (max(len(term) for term, _ in c), c))
        at = {c: k for k, c in enumerate(channels)}
        self.d, self.grad = len(number), grad  # grad: whether autograd is on
        self.order = max([len(term) for c in channels for term, _ in c], default=0)
        self.groups = [groups.get(c) for c in channels]  # variables of each channel that is a group
        self.seeds = [[(term[0], m) for term, m in c if len(term) == 1] for c in channels[1:]]  # of x itself
        self.outputs = [[(at[e], 1)] if e in at else [(at[((term, 1),)], m) for term, m in e] for e in wanted]
        leibniz = [{} for _ in channels]  # (a b)_c = a b_c + a_c b + sum of m a_i b_j, as {(i, j): m}
        for pairs, channel in zip(leibniz, channels):
            for term, m in channel:
                for s, rest in splits(term):
                    pair = at[((s, 1),)], at[((rest, 1),)]
                    pairs[pair] = pairs.get(pair, 0) + m
        self.leibniz = [tuple(pairs.items()) for pairs in leibniz]

def _parse(entry, number):
    """"t-1/2*xx" -> (((0,), 1.0), ((1, 1), -0.5))"""
    name, factor = "|".join(sorted(number, key=len, reverse=True)), r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)"
    pattern = rf"([+-]?)(?:{factor}(?:/{factor})?\*)?((?:{name})+)"  # sign, factor, divisor, product
    if not re.fullmatch(f"(?:{pattern})(?:(?=[+-]){pattern})*", entry):
        raise Refused(f"derivatives: {entry!r} is no sum of products of {', '.join(number)}, like xx+yy or t-1/2*xx")
    terms = {}
    for sign, factor, divisor, product in re.findall(pattern, entry):
        term = tuple(sorted(number[v] for v in re.findall(name, product)))
        terms[term] = terms.get(term, 0) + float(sign + (factor or "1")) / float(divisor or 1)
    return tuple(sorted(terms.items()))

def splits(term):
    """Every way to split the factors of a term into two non-empty parts (s, rest)."""
    n = len(term)
    pick = lambda mask: tuple(term[k] for k in range(n) if mask >> k & 1)
    return [(pick(mask), pick(~mask)) for mask in range(1, 2**n - 1)]

# Constants to torch.compile, marked as torch.compiler.assume_constant_result does, but without importing the compiler.
def _plan(*key, plans={}):
    if key not in plans:
        with contextlib.suppress(ImportError):
            import kernels.jets  # noqa: F401
        plans[key] = Plan(*key)
    return plans[key]

def _say(line, said=set()):
    print(line, flush=True) if line not in said else None
    said.add(line)

_plan._dynamo_marked_constant = _say._dynamo_marked_constant = True

# Arithmetic of channels: tensors, or None for zero. A product of two channels of a group is summed over its variables.
_plus = lambda a, b: b if a is None else a if b is None else a + b
_times = lambda a, b: None if a is None or b is None else a * b
_scale = lambda a, m: a if a is None or m == 1 else m * a
_summed = lambda group, product: product.sum(0) if group and product is not None else product
_as_jet = lambda a, plan: a if isinstance(a, Jet) else Jet([a] + [None] * (len(plan.leibniz) - 1), plan)

def _add(a, b):
    if not isinstance(a, Jet):
        a, b = b, a
    if isinstance(b, Jet):
        return Jet([_plus(p, q) for p, q in zip(a.channels, b.channels)], a.plan)
    return Jet([a.channels[0] + b] + a.channels[1:], a.plan)

def _mul(a, b):
    if not isinstance(a, Jet):
        a, b = b, a
    if not isinstance(b, Jet):
        return a.map(lambda c: c * b)
    x, y = a.channels, b.channels
    z = [x[0] * y[0]] + [_plus(_times(x[0], q), _times(p, y[0])) for p, q in zip(x[1:], y[1:])]
    return Jet([_plus(*both) for both in zip(z, _cross_terms(x, y, a.plan))], a.plan)

def _cross_terms(x, y, plan, over=1):
    """Sum of m x_i y_j / over for each channel; of equal products, in a square, one, twice."""
    z = [None] * len(x)
    for c, pairs in enumerate(plan.leibniz):
        for (i, j), m in pairs:
            if x is not y or i <= j:
                product = _summed(plan.groups[i], _times(x[i], y[j]))
                z[c] = _plus(z[c], _scale(product, (2 * m if x is y and i < j else m) / over))
    return z

def _pointwise(taylor, a, inplace=False):
    """f(v + d) = f(v) + f'(v) d + f''(v) d^2 / 2 + ... for the value v and the rest d, of which powers above the order
    vanish, given taylor(v, order) -> [f(v), f'(v), ...]; None stands for zero."""
    if inplace:
        raise TypeError("no rule for inplace=True")
    z, plan = a.channels, a.plan
    f, power = taylor(z[0], plan.order), z
    y = [f[0]] + [_times(f[1], c) for c in z[1:]]
    for k in range(2, plan.order + 1):
        power = _cross_terms(power, z, plan, over=k)  # d^k / k!
        y = [_plus(c, _times(f[k], p)) for c, p in zip(y, power)]
    return Jet(y, plan)

def _tanh(z, order):
    f = [torch.tanh(z)]
    f.append(1 - f[0] * f[0])
    for n in range(1, order):  # f'' = -2 f f', differentiated by Leibniz
        products = [_scale(f[k] * f[n - k], math.comb(n - 1, k)) for k in range(n)]
        f.append(-2 * functools.reduce(_plus, products))
    return f

def _power(p, z, order):
    factors = [math.prod([p - i for i in range(k)]) for k in range(order + 1)]
    return [None if m == 0 else _scale(z ** (p - k), m) for k, m in enumerate(factors)]

_turns = lambda s, c, order: [s, c, -s, -c] * (order // 4 + 1)
_neg = lambda a: a.map(lambda c: -c)
_sub = lambda a, b: _add(a, _neg(b) if isinstance(b, Jet) else -b)
_pow = lambda a, p: _pointwise(functools.partial(_power, p), a)
_div = lambda a, b: _mul(a, _pow(b, -1) if isinstance(b, Jet) else 1 / b)
_linear = lambda a, weight, bias=None: _add(RULES["matmul"](a, weight.mT), 0 if bias is None else bias)

def _matmul(a, w):
    """a @ w for a constant w; kernels/jets.py has the other cases, and one product for all channels."""
    n = a.channels[0].shape[-1]
    return a.map(lambda c: torch.matmul(c.expand(*c.shape[:-1], n), w))

def squared_distance(x, w, b):
    """sum_k (w_ik x_k + b_ik)^2 = [w^2, 2 w b, |b|^2] . [x^2, x, 1] as one product; the value in float64, derivatives,
    in which less cancels, in the precision of w."""
    square = lambda x, w, b: F.linear(torch.cat([x * x, x], -1), torch.cat([w * w, 2 * w * b], -1), (b * b).sum(-1))
    if not isinstance(x, Jet):
        return square(x.double(), w.double(), b.double())
    s = RULES["by_unit_vectors"](square, x, w, b) if x.is_input and any(x.plan.groups) else square(x, w, b)
    if w.dtype != torch.float64:
        s.channels[0] = squared_distance(x.channels[0], w, b)
    return s

def _getitem(a, index):
    index = index if isinstance(index, tuple) else (index,)
    return Jet([None if c is None else a.full(k)[(slice(None), *index) if a.plan.groups[k] else index]
                for k, c in enumerate(a.channels)], a.plan)

def _cat(parts, dim=0):
    plan = next(a.plan for a in parts if isinstance(a, Jet))
    jets = [_as_jet(a, plan) for a in parts]
    dim = dim if dim < 0 else dim - jets[0].channels[0].dim()
    return Jet([None if all(a.channels[k] is None for a in jets) else torch.cat([a.full(k) for a in jets], dim)
                for k in range(len(plan.leibniz))], plan)

_of = lambda taylor: functools.partial(_pointwise, taylor)
RULES = {
    "linear": _linear, "matmul": _matmul, "add": _add, "sub": _sub, "mul": _mul, "div": _div, "neg": _neg, "pow": _pow,
    "square": lambda a: _mul(a, a), "cat": _cat, "lerp": lambda a, b, weight: _add(a, _mul(_sub(b, a), weight)),
    "tanh": _of(_tanh), "exp": _of(lambda z, order: [torch.exp(z)] * (order + 1)),
    "sin": _of(lambda z, order: _turns(torch.sin(z), torch.cos(z), order)),
    "cos": _of(lambda z, order: _turns(torch.cos(z), -torch.sin(z), order)),
    "relu": _of(lambda z, order: [torch.relu(z), (z > 0).to(z.dtype)] + [None] * (order - 1)),
    "abs": _of(lambda z, order: [torch.abs(z), torch.sign(z)] + [None] * (order - 1)),
    "sigmoid": lambda a, inplace=False: _add(_mul(RULES["tanh"](_mul(a, 0.5), inplace), 0.5), 0.5),
    "silu": lambda a, inplace=False: _mul(a, RULES["sigmoid"](a, inplace)),
    "to": lambda a, *args, **kwargs: a.map(lambda c: c.to(*args, **kwargs)),
}

def _rule(name):
    if name not in RULES:
        raise AttributeError(f"no rule for {name}" + ("" if "gelu" in RULES else " without kernels/ beside common.py"))
    return RULES[name]

class Jet:
    """Channels of a jet: [0] the value [B, n], then one per entry of its plan; a channel is a tensor that
    broadcasts against the value, or None for zero."""

    short_cuts = True  # kernels/natural_gradient.py, which must see every product, switches them off for a while
    __eq__ = __bool__ = None  # errors, until kernels/jets.py says otherwise

    def __init__(self, channels, plan, is_input=False):
        if plan.grad and not torch.is_grad_enabled():
            raise Refused("f: torch.no_grad or an autograd.Function hides derivatives; use detach or plain operations")
        if any(g and c is not None and c.dim() <= channels[0].dim() for c, g in zip(channels, plan.groups)):
            raise TypeError("no rule for more dimensions than a group expects")
        self.channels, self.plan, self.is_input = channels, plan, is_input

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return _rule(func.__name__)(*args, **(kwargs or {}))

    def __getattr__(self, name):  # the method form of a rule
        return functools.partial(_rule(name), self)

    def full(self, k):
        """Channel k, expanded to the shape of the value, with the variables of a group in front."""
        v, c, group = self.channels[0], self.channels[k], self.plan.groups[k]
        shape = v.shape if group is None else (len(group), *v.shape)
        return v.new_zeros(shape) if c is None else c.expand(shape)

    def map(self, f):
        return Jet([None if c is None else f(c) for c in self.channels], self.plan)

    # Operators are the rule functions themselves: torch.compile traces that without graph breaks.
    __add__ = __radd__ = _add
    __mul__ = __rmul__ = _mul
    __sub__, __neg__, __truediv__, __pow__, __matmul__, __getitem__ = _sub, _neg, _div, _pow, _matmul, _getitem
    __rsub__ = lambda self, other: _sub(other, self)
    __rtruediv__ = lambda self, other: _div(other, self)
    __lt__ = lambda self, other: self.channels[0] < other

# eps-rank (Section 2): number of eigenvalues > eps of M = integral over Omega of phi phi^T dx -------------------------

def gram_spectrum(phi, measure=1.0):
    """Eigenvalues, largest first, of the Gram matrix measure / N * phi^T phi of features phi [N, n] at N points spread
    uniformly over the domain; in float64 even where phi is float32, whose rounding would count as rank."""
    phi = phi.detach().double()
    if phi.dim() != 2 or not phi.isfinite().all():
        raise Refused(f"features: {list(phi.shape)}, {(~phi.isfinite()).sum()} not finite; numbers [N, n] are wanted")
    return torch.linalg.eigvalsh(phi.T @ phi * (measure / len(phi))).flip(0)

def eps_rank(net, x=None, eps=1e-6, measure=1.0, layer=-1):
    """eps-rank of features [N, n], of a FirstLayer at x, or of those that a network has at the points x in

    layer=-1, 0, ..        a hidden layer by number, the last unless told: what enters a Linear behind the first layer
    layer="trunk.1"        a module, by name or itself: what it returns (name the activation, not its Linear)
    layer=[0, "trunk.1"]   several in one pass: a list of ranks; "all": of every hidden layer; "first": of those that
                           SFLI shapes in a network of this file (the first, or the encoders U and V)

    The last dimension holds the features, the others are samples: points, tokens, nodes. Behind a convolution channels
    are features and positions samples. The network runs in eval mode; a tuple x is several arguments.

    The paper states neither eps nor the quadrature. Ours: eps = 1e-6, equal weights on x, and
    measure = |Omega| where d <= 3, else 1 (2^50 would swamp any threshold)."""
    rank = lambda phi: int((gram_spectrum(phi, measure) > eps).sum())
    if isinstance(net, FirstLayer) and net.kind == "gauss" and len(x) > 10**5:  # without storing the features
        gram = _kernel("gaussian_gram", "x: so many points").gaussian_gram
        M = gram(x, net.weight.detach(), net.bias.detach()) * (measure / len(x))
        return int((torch.linalg.eigvalsh(M) > eps).sum())
    if isinstance(net, (torch.Tensor, FirstLayer)):
        return rank(net if isinstance(net, torch.Tensor) else net(x))
    net = getattr(net, "_orig_mod", net)  # of torch.compile
    layer = list(net.sfli_layers) if layer == "first" and isinstance(net, MLP) else layer
    one = layer != "all" and not isinstance(layer, (list, tuple))
    phis = layer_features(net, x, [layer] if one else layer)
    return rank(phis[0]) if one else list(map(rank, phis))

@torch.no_grad()
def layer_features(net, x, layers="all"):
    """Features [N, n] of each of `layers`, as in eps_rank(), by hooks in one pass."""
    names, modes = {m: name for name, m in net.named_modules()}, {m: m.training for m in net.modules()}
    ends = (*net.blocks, net.out) if isinstance(net, MLP) else ()
    wanted, seen, hidden, found, axis = () if layers == "all" else layers, [], [], {}, {}

    def note(module, args, y):
        y = y[0] if isinstance(y, tuple) else y
        if module in ends or not ends and seen and isinstance(module, (nn.Linear, Dense)):
            hidden.append(args[0])
        seen.extend(module.parameters(recurse=False))
        if isinstance(module, nn.modules.conv._ConvNd):
            axis[y.dim()] = -1 - len(module.kernel_size)  # of its channels; activations and pooling leave them there
        elif isinstance(module, (nn.Linear, nn.LayerNorm, nn.MultiheadAttention)):
            axis.clear()
        if module in wanted or names[module] in wanted:
            found[module] = found[names[module]] = y.movedim(axis.get(y.dim(), -1), -1)

    hooks = [m.register_forward_hook(note) for m in names]
    try:
        net.eval()(*x if isinstance(x, tuple) else (x,))
    finally:
        for hook, (m, mode) in zip(hooks, modes.items()):
            hook.remove()
            m.training = mode
    found |= {k: hidden[k] for k in range(-len(hidden), len(hidden))}
    if missing := [k for k in wanted if k not in found]:
        raise Refused(f"layer: {missing} is not there, or not called; there are {len(hidden)} hidden layers, and the "
                      f"modules {', '.join(filter(None, names.values()))}")
    return [phi.flatten(0, -2) for phi in (hidden if layers == "all" else [found[k] for k in layers])]

def grid(domain, n):
    """n^d cell midpoints of the box `domain` -> [n^d, d]: equal-weight quadrature points for d <= 3."""
    axes = [lo + (hi - lo) * (torch.arange(n) + 0.5) / n for lo, hi in domain]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(domain))

# Training: sample -> named residuals -> squared, averaged, weighted -> optimiser --------------------------------------

@dataclass(frozen=True)
class Schedule:
    """Learning rate: rises linearly over `warmup` steps, then falls by the factor `decay` per `every` steps."""

    lr: float = 1e-3
    warmup: float = 0
    decay: float = 1.0
    every: float = 1000

    def __call__(self, step):
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        return self.lr * self.decay ** ((step - self.warmup) / self.every)

@dataclass(frozen=True)
class Save:
    """history.csv and checkpoint.pt go to `folder`, the latter every so many seconds, and steps if given; the last but
    one is kept. resume continues from it, bit for bit on a CPU, and refuses one whose `config` differs."""

    folder: str
    config: dict = None
    resume: bool = False
    seconds: float = 120.0
    steps: int = None

@dataclass
class State:
    """All that changes from step to step, which is all that a checkpoint holds."""

    params: dict  # {name: tensor}, [S, ...] for S > 1 networks; shares its memory with them
    buffers: dict
    optimizer: object
    generators: list  # one per network
    weights: dict = field(default_factory=dict)  # {name of a residual: [S]}
    lam: dict = field(default_factory=dict)  # pseudo-time, {name of a residual: [S]}
    sums: dict = field(default_factory=dict)  # losses added up since the last row of the history, {name: [S]}
    count: int = 0  # so many
    best: dict = field(default_factory=dict)  # with keep: parameters and buffers of the best row of each network so far
    step: int = 0
    seconds: float = 0.0
    history: list = field(default_factory=list)

class Alone:
    """The processes that train one network together: this one. cli.py has those of torchrun."""
    number, count = 0, 1
    average = staticmethod(lambda x: x)  # mean of a tensor over the processes
    average_gradients = staticmethod(lambda params: None)
    gather = staticmethod(lambda x: [x])  # x of every process

class Stopped(Exception):
    """Training was asked to stop and has written its checkpoint."""

def train(nets, sample, residuals, steps, *, lr=None, optimizer="adam", optimizer_options=None, weights=None,
          weighting="fixed", causal=None, pseudo_time=False, constants=None, evaluate=None, callback=None, keep=None,
          seeds=None, compile=False, save=None, stop=None, processes=Alone):
    """Train one network, or several at once (one per seed), and return the history: a list of rows.

    sample(generator) -> batch, a dict of tensors [B, ...], drawn anew every step.
    residuals(net, batch) -> {name: r [B]}, never squares; the loss is the sum over names of weight * mean(r^2). Every
        parameter of the module is trained, also one that is not of a layer, say an unknown coefficient net.k.
    lr: a number (1e-3), or a function of the step such as Schedule(1e-3, warmup=500, decay=0.9, every=1000).
    optimizer: "adam", "soap" (package pytorch-optimizer), "ng", natural gradient, for one float64 network, where lr (1)
        is the longest step, or your own, params -> torch.optim.Optimizer, whose rate stays unless there is an lr.
        optimizer_options go to it; those of ng are damping and momentum.
    weighting: "fixed" keeps `weights` ({name: w}, default 1); "grad_norm" and "ntk" rebalance them.
    causal: {"terms": [names], "tol": 1.0, "chunks": 32} weights these terms by time; their rows are sorted by it.
    pseudo_time: for a residual given as a pair (r, q) minimise r + lam (q - q now), a step of size 1 / lam of implicit
        Euler for q_t = -r. It leaves the loss alone and changes its gradient. Without it q is ignored.
    constants(step) -> {name: number} joins the batch, say the viscosity of a curriculum.
    evaluate(net) -> {name: number} joins the history, about 100 times a run. callback(step, row) is given every row.
    keep: a column of the history, say "loss" or "rel_l2"; the networks end as they were in its lowest row.
    nets: several train as one, stacked, each with its own draws and weights (`seeds`). compile: True, or its options.
    save: Save("runs/mine"). stop() -> bool is asked after every step; it raises Stopped, without save it returns."""
    nets = list(nets) if isinstance(nets, (list, tuple)) else [nets]
    seeds = list(range(len(nets))) if seeds is None else list(seeds)
    rate = lr if callable(lr) else Schedule((1.0 if optimizer == "ng" else 1e-3) if lr is None else lr)
    check_choices(nets, optimizer, weighting, compile, processes)
    files = None if save is None else _kernel("checkpoint", "save: writing checkpoints")
    balance = None if weighting == "fixed" else _kernel("weights", f"weighting: {weighting}")
    saved = files.load_checkpoint(save, steps) if save is not None and save.resume else None
    problem = Problem(nets, residuals, causal, processes)
    opt = make_optimizer(optimizer, problem, rate(0), optimizer_options or {})
    draws = [torch.Generator(problem.device).manual_seed(1000003 * s + 1 + 7919 * processes.number) for s in seeds]
    state = State(problem.values, problem.buffers, opt, draws)
    if saved is not None:
        files.unpack(state, saved, processes.number)
    batch = None if saved else first_batch(problem, state, sample, constants, weights or {}, pseudo_time)
    gradient = gradient_of(problem, opt, compile)
    every, rebalance = max(1, steps // 100), max(1, min(1000, steps // 20))
    clock = Clock(state, steps)
    while state.step <= steps:
        batch = draw(problem, state, sample, constants) if batch is None else batch
        if balance is not None and state.step % rebalance == 0:
            state.weights = balance.rebalanced(weighting, problem, state, batch)
        for group in opt.param_groups:
            group["lr"] = rate(state.step) if lr is not None or not callable(optimizer) else group["lr"]
        losses = gradient(problem, opt, batch, state.weights)
        state.sums = {k: state.sums[k] + v if state.sums else v for k, v in losses.items()}
        state.count += 1
        if processes.count == 1 and problem.device.type == "cpu":  # elsewhere looking costs: with the next row
            check_finite(state.step, losses)
        if state.step % every == 0 or state.step == steps:
            rows = rows_of(problem, state, seeds, batch, weighting, evaluate, clock.seconds())
            record(state, rows, keep, callback, save, processes)
        if state.step < steps:
            take_step(problem, state, batch)
        batch, state.step = None, state.step + 1
        clock.report(state)
        stopping = state.step <= steps and stop is not None and stop()
        if processes.count > 1:  # they agree, every tenth step
            stopping = state.step % 10 == 0 and any(processes.gather(stopping))
        if save is not None:
            files.save_if_due(state, save, clock, stopping or state.step > steps, processes)
        if stopping:
            if save is None:
                break
            raise Stopped(f"stopped after step {state.step - 1} of {steps}")
    for name, tensor in (problem.values | problem.buffers if keep else {}).items():
        tensor.copy_(state.best[name])
    return state.history

def check_choices(nets, optimizer, weighting, compile, processes):
    """What train() refuses before anything is drawn, moved or written."""
    for name, value, known in (("optimizer", optimizer, ("adam", "soap", "ng")),
                               ("weighting", weighting, ("fixed", "grad_norm", "ntk"))):
        if value not in known and not (name == "optimizer" and callable(value)):
            raise Refused(f"{name}: {value!r} is unknown; choose one of {', '.join(known)}")
    if optimizer in ("soap", "ng") and len(nets) > 1:
        raise Refused(f"seeds, optimizer: {optimizer} trains one network at a time; use one seed, or adam")
    if optimizer == "ng" and compile:
        raise Refused("compile, optimizer: ng is not compiled; train without compile")
    if processes.count > 1 and (optimizer == "ng" or len(nets) > 1):
        raise Refused("seeds, optimizer: several processes train one network, by adam or soap; use one process")

def make_optimizer(name, problem, lr, options):
    params = list(problem.params.values())
    if callable(name):
        return name(params, **options)
    if name == "adam":
        return torch.optim.Adam(params, lr, **dict(fused=True) | options)
    if name == "ng":
        ng = _kernel("natural_gradient", "optimizer: ng")
        return ng.NaturalGradient(problem.nets[0], problem.stepped, lr, **options)
    try:
        from pytorch_optimizer import SOAP
    except ImportError:
        raise Refused("optimizer: soap is in a package of its own; pip install pytorch-optimizer") from None
    return SOAP(params, lr, **dict(betas=(0.9, 0.999), weight_decay=0.0, precondition_frequency=10) | options)

class Bound(nn.Module):
    """f(net, batch) as a module, so that functional_call() puts parameters wherever f looks for them in net."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, f, batch):
        return f(self.net, batch)

class Problem:
    """What is minimised. S networks as one: `params` and `buffers` {name: tensor}, stacked [S, ...] where S > 1 (the
    networks then hold views of them; frozen parameters count as buffers), and residuals {name: [S, B]} of them."""

    def __init__(self, nets, residuals, causal=None, processes=Alone):
        self.nets, self.of_one, self.causal, self.processes = nets, residuals, causal, processes
        self.bound, self.sent = Bound(nets[0]), {}
        self.vmapped, self.own_grad = len(nets) > 1, False  # until residuals refuse vmap, or call torch.autograd.grad
        self.by_time = _kernel("weights", "causal: weighting by time").causal_weights if causal else None
        params, self.buffers = dict(nets[0].named_parameters()), dict(nets[0].named_buffers())
        if len(nets) > 1:
            params, self.buffers = torch.func.stack_module_state(nets)
            for s, net in enumerate(nets):
                for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
                    tensor.data = (params | self.buffers)[name].data[s]
        self.params = {name: p for name, p in params.items() if p.requires_grad}
        self.buffers |= {name: p.detach() for name, p in params.items() if not p.requires_grad}
        self.values = {name: p.detach() for name, p in self.params.items()}  # the same memory, without autograd
        self.device = next(iter(self.values.values())).device
        self.eager = contextlib.nullcontext  # a context in which nothing is compiled

    def over_members(self, f, params, batch):
        """f(net, batch) -> {name: [B]}, or pairs of these, for every network: {name: [S, B]}."""
        named = lambda p: {f"net.{k}": v for k, v in p.items()}
        call = lambda p, batch: torch.func.functional_call(self.bound, named(p), (f, batch))
        of = lambda s, tensors: {k: v[s] for k, v in tensors.items()}
        if self.vmapped:
            try:
                return torch.func.vmap(call, randomness="different")(params | self.buffers, batch)
            except RuntimeError:
                print("train: vmap does not take these residuals; the networks take turns, slowly", flush=True)
                self.vmapped = False
        if len(self.nets) > 1:
            members = [call(of(s, params | self.buffers), of(s, batch)) for s in range(len(self.nets))]
        else:
            members = [f(self.nets[0], batch) if params is self.params else call(params, batch)]
        stack = lambda parts: tuple(map(stack, zip(*parts))) if isinstance(parts[0], tuple) else torch.stack(parts)
        return {k: stack([one[k] for one in members]) for k in members[0]}

    def look(self, f, batch):
        """f for the networks as they are, detached, and without a graph but for residuals that look into it."""
        try:
            with torch.set_grad_enabled(self.own_grad), self.eager():
                out = self.over_members(f, self.params, batch)
        except RuntimeError:
            if self.own_grad:
                raise
            self.own_grad = True
            return self.look(f, batch)
        detach = lambda v: tuple(map(detach, v)) if isinstance(v, tuple) else v.detach()
        return {k: detach(v) for k, v in out.items()}

    def terms(self, net, batch):
        """{name: (r, q) or (r,)} of one network, each [B]."""
        flat = lambda v: v.squeeze(1) if v.dim() == 2 else v  # from [B, 1]
        return {k: tuple(map(flat, v if isinstance(v, tuple) else (v,))) for k, v in self.of_one(net, batch).items()}

    def stepped(self, net, batch):
        """Residuals of one network, with r + lam (q - q now) for pairs (r, q) where the batch has a lam for them."""
        out = {}
        for k, (r, *q) in self.terms(net, batch).items():
            lam = batch.get(f"lam_{k}")
            out[k] = r if lam is None or not q else r + lam * (q[0] - q[0].detach())
        return out

    def residuals(self, params, batch):
        return self.over_members(self.stepped, params, batch)

    def pairs(self, batch):
        """Those residuals that are pairs (r, q)."""
        return self.look(lambda net, b: {k: v for k, v in self.terms(net, b).items() if len(v) == 2}, batch)

    def causality(self, r):
        return self.by_time(r, **self.causal, average=self.processes.average) if self.causal else {}

    def objective(self, params, batch, w):
        """The loss of all networks together, and {name: mean(r^2) [S]}."""
        r = self.residuals(params, batch)
        c = self.causality(r)
        losses = {k: (c.get(k, 1) * r[k] ** 2).mean(1) for k in r}
        return sum((w[k] * losses[k]).sum() for k in losses), losses

# Three ways to a gradient: each (problem, opt, batch, weights) -> {name: loss [S]} leaves opt ready for opt.step().
def gradient_of(problem, opt, compile):
    """The way that train() takes, compiled as asked."""
    if isinstance(opt, torch.optim.LBFGS):
        raise Refused("optimizer: LBFGS wants a closure, which train() does not have; take ng, or a loop of your own")
    if hasattr(opt, "natural_gradient"):
        return lambda problem, opt, batch, w: opt.natural_gradient(problem, batch, w)
    if not compile:
        return gradient_by_autograd
    if problem.own_grad:
        raise Refused("compile: residuals that call torch.autograd.grad do not compile; use jet(), or no compile")
    options = dict(dynamic=False) | (compile if isinstance(compile, dict) else {})
    if torch.__version__ >= "2.13":  # before it all runs of a process share a limit of variants, and then go uncompiled
        options["isolate_recompiles"] = True
    problem.eager = lambda: torch.compiler.set_stance("force_eager")
    if problem.processes.count > 1:  # whose averages interrupt a compiled function
        problem.objective = torch.compile(problem.objective, **options)
        return gradient_by_autograd
    problem.compiled = torch.compile(torch.func.grad_and_value(problem.objective, has_aux=True), **options)
    return compiled_gradient

def gradient_by_autograd(problem, opt, batch, w):
    """Reverse mode through the networks as they are, compiled or not, averaged over the processes."""
    opt.zero_grad()
    total, losses = problem.objective(problem.params, batch, w)
    total.backward()
    problem.processes.average_gradients(problem.params.values())
    return {k: v.detach() for k, v in losses.items()}

def compiled_gradient(problem, opt, batch, w):
    """Value and gradient in one compiled function."""
    grads, (_, losses) = problem.compiled(problem.values, batch, w)
    for name, p in problem.params.items():
        p.grad = grads[name].contiguous()  # fused Adam walks through memory, whatever the strides
    return losses

# The parts of a step, in their order.
def draw(problem, state, sample, constants):
    """The batches of all networks, stacked where they are several, with the constants of the step and lam in them."""
    numbers, sent = constants(state.step) if constants else {}, problem.sent
    for k, v in numbers.items():
        if k not in sent or sent[k][0] != v:  # each sending makes a GPU wait
            sent[k] = v, torch.tensor(v, device=problem.device)
    numbers = {k: sent[k][1] for k in numbers}
    lam = lambda s: {f"lam_{k}": v[s] for k, v in state.lam.items()}
    batches = [sample(g) | numbers | lam(s) for s, g in enumerate(state.generators)]
    return batches[0] if len(batches) == 1 else {k: torch.stack([b[k] for b in batches]) for k in batches[0]}

def first_batch(problem, state, sample, constants, weights, pseudo_time):
    """The batch of step 0, which tells the names of the residuals: initial weights and lam. With pseudo-time that step
    wants another one, with lam in it: None."""
    batch = draw(problem, state, sample, constants)
    r = problem.look(problem.stepped, batch)
    for k in r:
        if r[k].dim() != 2:
            raise Refused(f"residuals: {k!r} is {list(r[k].shape[1:])}; one number per point is wanted, [B]")
    if unknown := set(weights) - set(r):
        raise Refused(f"weights: {sorted(unknown)} are no residuals; there are {sorted(r)}")
    pairs = problem.pairs(batch) if pseudo_time else {}
    if pseudo_time and not pairs:
        raise Refused(f"pseudo_time: no residual is a pair (r, q); there are {sorted(r)}")
    state.weights = {k: torch.full_like(r[k][:, 0], weights.get(k, 1.0)) for k in r}
    state.lam = {k: torch.ones_like(state.weights[k]) for k in pairs}
    return None if pseudo_time else batch

@torch.no_grad()
def rows_of(problem, state, seeds, batch, weighting, evaluate, seconds):
    """A row of the history for every network."""
    rows, sums = [], {k: problem.processes.average(v) for k, v in state.sums.items()}
    check_finite(state.step, sums)
    c = problem.causality(problem.look(problem.stepped, batch)) if problem.causal else {}
    with problem.eager():
        for s, net in enumerate(problem.nets):
            means = {k: v[s].item() / state.count for k, v in sums.items()}
            loss = sum(state.weights[k][s].item() * m for k, m in means.items())
            row = {"step": state.step, "seed": seeds[s], "loss": loss}
            row |= {f"loss_{k}": m for k, m in means.items()}
            row |= {f"weight_{k}": v[s].item() for k, v in state.weights.items()} if weighting != "fixed" else {}
            row |= {f"lam_{k}": v[s].item() for k, v in state.lam.items()}
            for w in list(c.values())[:1]:  # all terms have the same
                row |= {"causal_mean": w[s].mean().item(), "causal_last": w[s, -1].item()}
            row |= {"lr": state.optimizer.param_groups[0]["lr"], "seconds": seconds}
            row |= state.optimizer.report() if hasattr(state.optimizer, "report") else {}
            rows.append(row | (evaluate(net) if evaluate is not None else {}))
    return rows

def take_step(problem, state, batch):
    """opt.step(); every 20th time lam follows |change of r| / |change of q| over it, within [0.01, 100]."""
    look = state.lam and state.step % 20 == 0
    before = problem.pairs(batch) if look else {}
    state.optimizer.step()
    after = problem.pairs(batch) if look else {}
    for k in after:
        r, q = (problem.processes.average((new - old).square().mean(1)) for new, old in zip(after[k], before[k]))  # [S]
        state.lam[k] = 0.9 * state.lam[k] + 0.1 * (r / q.clamp(min=1e-30)).sqrt().clamp(0.01, 100.0)

def check_finite(step, losses):
    if bad := [k for k, v in losses.items() if not v.isfinite().all()]:
        raise FloatingPointError(f"the loss of {', '.join(bad)} is not finite at step {step}; try a smaller lr, a "
                                 "smaller gamma, or float64")

def record(state, rows, keep, callback, save, processes):
    """Append a row per network to the history and keep those that are the best so far; none may be far above it."""
    if keep is not None and keep not in rows[0]:
        raise Refused(f"keep: {keep!r} is no column of the history; there are {', '.join(rows[0])}")
    members, tensors = len(rows), state.params | state.buffers if keep else {}
    state.history, state.sums, state.count = state.history + rows, {}, 0
    state.best = state.best or {k: v.clone() for k, v in tensors.items()}
    if save is not None and processes.number == 0:
        _kernel("checkpoint", "save").write_rows(Path(save.folder) / "history.csv", state.history)
    for s, row in enumerate(rows):
        if callback is not None and processes.number == 0:
            callback(state.step, row)
        mine, of = state.history[s::members], lambda v: v[s] if members > 1 else v
        if keep is not None and row[keep] == min(r[keep] for r in mine):
            for k, v in tensors.items():
                of(state.best[k]).copy_(of(v))
        best = min(r["loss"] for r in mine)
        if row["loss"] > 1e6 * best:
            term = max((k for k in row if k.startswith("loss_")), key=row.get)[5:]
            raise FloatingPointError(f"the loss has diverged: {row['loss']:.1e} at step {row['step']}, most of it "
                                     f"{term}, after {best:.1e}; try a smaller lr or a smaller gamma")

class Clock:
    """Seconds of training, and, from the tenth on, a line at every tenth of the run and every two minutes."""

    def __init__(self, state, steps):
        self.before, self.first, self.steps = state.seconds, state.step, steps
        self.start = self.saved = self.told = time.perf_counter()
        self.tenth = 10 * state.step // max(1, steps)

    def seconds(self):
        return self.before + time.perf_counter() - self.start

    def report(self, state):
        now, tenth = time.perf_counter(), 10 * state.step // max(1, self.steps)
        if state.step < self.steps and now - self.start > 10 and (tenth > self.tenth or now - self.told > 120):
            self.told, self.tenth, row = now, tenth, state.history[-1]
            shown = [f"{k} {row[k]:.3g}" for k in ("loss", "rel_l2", "eps_rank", "damping", "eta") if k in row]
            left = (now - self.start) / (state.step - self.first) * (self.steps - state.step) / 60
            print(f"step {state.step} of {self.steps}: {', '.join(shown)}, {left:.1f} min to go", flush=True)
