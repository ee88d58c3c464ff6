"""The training loop: weights, schedules, stacked seeds, checkpoints, refusals."""

import copy
import csv
import json
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from conftest import ROOT

import common
from common import MLP, ModifiedMLP, PirateNet, Problem, Refused, Save, Schedule, jet, sfli, train, uniform
from kernels import checkpoint, cpu, weights
from kernels.weights import balanced, causal_weights, gradient_sizes

OMEGA = [(0.0, 1.0), (-1.0, 1.0)]


def sample(generator):
    x = uniform(OMEGA, 64, generator)
    return {"x": x[x[:, 0].argsort()], "x0": uniform([(0.0, 1e-9), (-1.0, 1.0)], 16, generator)}


def residuals(net, batch):
    """A heat equation: two terms, derivatives, time first."""
    u, u_t, u_xx = jet(net, batch["x"], "t x", "t xx")
    return {"ic": net(batch["x0"])[:, 0] - torch.sin(3 * batch["x0"][:, 1]), "res": (u_t - u_xx + u)[:, 0]}


def network(seed=0, width=10):
    torch.manual_seed(seed)
    return sfli(MLP(2, width, 2), OMEGA, generator=torch.Generator().manual_seed(seed)).to(torch.get_default_dtype())


def parameters(nets):
    return [p.detach().clone() for net in nets for p in net.parameters()]


needs_compiler = pytest.mark.skipif(not cpu.can_compile(), reason="no C++ compiler or no Python headers")

ALL = dict(weighting="ntk", causal=dict(terms=["res"], tol=1.0, chunks=8), lr=Schedule(1e-3, 5, 0.9, 10))


def test_loss_is_the_weighted_mean_square():
    net = network()
    generator = torch.Generator().manual_seed(1000003 * 4 + 1)
    r = residuals(net, sample(generator))
    history = train(net, sample, residuals, 1, weights={"ic": 5.0}, seeds=[4])
    want = 5 * (r["ic"] ** 2).mean() + (r["res"] ** 2).mean()
    assert history[0]["loss"] == pytest.approx(want.item(), rel=1e-5)
    assert history[0]["loss_ic"] == pytest.approx((r["ic"] ** 2).mean().item(), rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"betas": (0.5, 0.7), "eps": 1e-3}], ids=["usual", "options"])
def test_adam_steps_are_those_of_plain_pytorch(options, float64):
    """Twenty steps of the loop against twenty written by hand, with warm-up and decay, and with options for Adam."""
    mine, plain = network(), network()
    train(mine, sample, residuals, 20, lr=Schedule(1e-2, 4, 0.5, 8), optimizer_options=options, seeds=[0])
    opt = torch.optim.Adam(plain.parameters(), 1e-2, **options)
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        opt.param_groups[0]["lr"] = 1e-2 * ((step + 1) / 4 if step < 4 else 0.5 ** ((step - 4) / 8))
        loss = sum((r**2).mean() for r in residuals(plain, sample(generator)).values())
        opt.zero_grad()
        loss.backward()
        opt.step()
    for a, b in zip(parameters([mine]), parameters([plain])):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)


def test_learning_rate():
    assert [Schedule(1.0, 4, 0.9, 10)(s) for s in (0, 3, 4, 14)] == pytest.approx([0.25, 1.0, 1.0, 0.9])
    assert Schedule(1e-3)(10_000) == 1e-3
    rate = lambda **options: train(network(), sample, residuals, 1, **options)[0]["lr"]
    assert rate() == 1e-3 and rate(lr=0.0) == 0
    history = train(network(), sample, residuals, 3, lr=lambda step: 10.0 ** -(step + 3))
    assert [row["lr"] for row in history] == pytest.approx([1e-3, 1e-4, 1e-5, 1e-6])


@pytest.mark.parametrize("options", [{}, ALL, ALL | {"weighting": "grad_norm"}], ids=["plain", "ntk", "grad_norm"])
def test_stacked_seeds_equal_sequential_runs(options, float64):
    """Same draws per seed; float64 batched products round differently, by 1e-16 a step."""
    together, alone = [network(s) for s in range(3)], [network(s) for s in range(3)]
    stacked = train(together, sample, residuals, 20, seeds=[7, 8, 9], **options)
    single = [train(net, sample, residuals, 20, seeds=[7 + s], **options) for s, net in enumerate(alone)]
    for a, b in zip(parameters(together), parameters(alone)):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)
    for s in range(3):
        mine = [row["loss"] for row in stacked if row["seed"] == 7 + s]
        assert mine == pytest.approx([row["loss"] for row in single[s]], rel=1e-9)


class Scaled(nn.Module):
    """A network with a buffer of its own, different for every seed, and batch statistics."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(2, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))
        self.register_buffer("scale", torch.tensor(1.0 + seed))

    def forward(self, x):
        return self.scale * self.net(x)


def test_stacked_networks_keep_their_own_buffers(float64):
    fit = lambda net, b: {"fit": net(b["x"])[:, 0] - b["x"].prod(1)}
    together, alone = [Scaled(s) for s in range(3)], [Scaled(s) for s in range(3)]
    train(together, sample, fit, 20, seeds=[7, 8, 9])
    for s, net in enumerate(alone):
        train(net, sample, fit, 20, seeds=[7 + s])
    for a, b in zip(together, alone):
        for k, v in b.state_dict().items():
            assert torch.allclose(a.state_dict()[k], v, rtol=1e-9, atol=1e-11), k
    assert [net.scale.item() for net in together] == [1, 2, 3] and together[0].net[1].num_batches_tracked > 20


@pytest.mark.parametrize("Net", [ModifiedMLP, PirateNet])
def test_a_copy_of_a_compiled_network_has_its_own_weights(Net):
    net, x = Net(2, 8, 2), uniform(OMEGA, 5)
    train(net, sample, residuals, 3, compile={"backend": "eager"})
    twin, before = copy.deepcopy(net), net(x)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    assert torch.equal(twin(x), before) and not net(x).any() and before.all()


def pirate(seed):
    torch.manual_seed(seed)
    return PirateNet(2, 10, 1, rwf=(1.0, 0.1))


@needs_compiler
@pytest.mark.parametrize("build, seeds, options", [
    (network, 1, {}), (network, 3, {}),
    (pirate, 1, dict(weighting="grad_norm", evaluate=lambda net: {"v": net(torch.zeros(3, 2)).sum().item()})),
], ids=["mlp", "stacked", "pirate"])  # fmt: skip
def test_compiled_training_equals_eager(build, seeds, options, float64):
    eager, compiled = [build(s) for s in range(seeds)], [build(s) for s in range(seeds)]
    a = train(eager, sample, residuals, 5, **options)
    b = train(compiled, sample, residuals, 5, compile=True, **options)
    for p, q in zip(parameters(eager), parameters(compiled)):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-11)
    for row, other in zip(a, b, strict=True):
        assert row | {"seconds": 0} == pytest.approx(other | {"seconds": 0}, rel=1e-9)


def test_many_compiled_runs_in_one_process():
    """Runs do not count against each other's limit of variants; else the fourth would train uncompiled."""
    with torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=True):
        for seed in range(4):
            train(network(seed, 10 + seed), sample, residuals, 2, compile={"backend": "eager"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "seeds,options", [(1, {}), (1, ALL), (3, ALL), (1, {"optimizer": "soap"})], ids=["adam", "all", "stacked", "soap"]
)
def test_resume_bit_for_bit(seeds, options, dtype, tmp_path):
    """Interrupt after any step, resume from the checkpoint, again and again: parameters and history equal those of the
    uninterrupted run."""
    torch.set_default_dtype(dtype)
    if options.get("optimizer") == "soap":
        pytest.importorskip("pytorch_optimizer")
    make = lambda: [network(s) for s in range(seeds)]
    measure = lambda net: {"norm": sum(p.square().sum().item() for p in net.parameters())}
    whole, first = make(), 0
    want = train(whole, sample, residuals, 205, evaluate=measure, **options)  # 205: records every 2 steps
    for last in (1, 2, 57, 204):
        draws = iter(range(seeds * (last + 1 - first)))

        def interrupted(generator):
            if next(draws, None) is None:
                raise KeyboardInterrupt
            return sample(generator)

        save = Save(tmp_path, resume=first > 0, seconds=0.0)
        with pytest.raises(KeyboardInterrupt):
            train(make(), interrupted, residuals, 205, evaluate=measure, save=save, **options)
        first = last + 1
        assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == first
    nets, save = make(), Save(tmp_path, resume=True, seconds=0.0)
    got = train(nets, sample, residuals, 205, evaluate=measure, save=save, **options)
    assert all(torch.equal(a, b) for a, b in zip(parameters(nets), parameters(whole)))
    drop = lambda rows: [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    assert drop(got) == drop(want)
    with open(tmp_path / "history.csv") as f:
        assert len(list(csv.DictReader(f))) == len(want)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint.pt", "checkpoint_previous.pt", "history.csv"]


def test_batch_norm_resumes_bit_for_bit(tmp_path):
    """Its running means are buffers, which change with every step and are no parameters."""

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    fit = lambda net, b: {"fit": net(b["x"])[:, 0] - b["x"].prod(1)}
    whole, cut, resumed, asked = make(), make(), make(), []
    want = train(whole, sample, fit, 40)
    with pytest.raises(common.Stopped, match="stopped after step 16 of 40"):
        train(cut, sample, fit, 40, save=Save(tmp_path), stop=lambda: asked.append(1) or len(asked) > 16)
    kept = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["buffers"]
    assert set(kept) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert all(torch.equal(kept[k], cut.state_dict()[k]) for k in kept)
    got = train(resumed, sample, fit, 40, save=Save(tmp_path, resume=True))
    assert all(torch.equal(v, resumed.state_dict()[k]) for k, v in whole.state_dict().items())
    assert [row["loss"] for row in got] == [row["loss"] for row in want]


def test_checkpoints_of_other_runs_are_refused(tmp_path):
    """Damaged ones are in test_survive.py."""
    with pytest.raises(ValueError, match="no checkpoint"):
        train(network(), sample, residuals, 3, save=Save(tmp_path, resume=True))
    train(network(), sample, residuals, 3, save=Save(tmp_path, {"width": 10}))
    with pytest.raises(ValueError, match="another configuration .width differ"):
        train(network(), sample, residuals, 3, save=Save(tmp_path, {"width": 11}, resume=True))


def test_failing_write_keeps_the_last_checkpoint(tmp_path):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save_checkpoint(path, {"step": 1})

    def full_disk(tmp):
        tmp.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(Refused, match="folder: cannot write .*No space left"):
        checkpoint.atomically(path, full_disk)
    assert torch.load(path, weights_only=True) == {"step": 1} and len(list(tmp_path.iterdir())) == 1


def test_divergence_names_the_step_and_the_term():
    def explode(net, batch):
        r = residuals(net, batch)
        count[0] += 1
        return r | {"res": r["res"] * (float("nan") if count[0] > 9 else 1.0)}

    count = [0]
    with pytest.raises(FloatingPointError, match=r"loss of res is not finite at step 8; try a smaller lr"):
        train(network(), sample, explode, 50)


class Several(common.Alone):
    """Two processes with the same points, which count what they tell each other."""

    def __init__(self):
        self.count, self.averaged, self.gathered = 2, [], 0

    def average(self, x):
        self.averaged.append(x)
        return x

    def gather(self, x):
        self.gathered += 1
        return [x, x]


def test_processes_speak_only_where_they_must():
    """Losses are averaged with the 101 rows of two terms, not with the 1001 steps; votes every tenth step."""
    fit = lambda net, b: {"fit": net(b["x"])[:, 0], "ic": net(b["x0"])[:, 0]}
    processes, asked = Several(), []
    train(MLP(2, 4, 1), sample, fit, 1000, processes=processes, stop=lambda: asked.append(1) and False)
    assert len(processes.averaged) == 2 * 101 and processes.gathered == 100 and len(asked) == 1000


def test_processes_notice_divergence_together():
    """With the next row, of which all have the same losses; the evaluation of a broken network is not reached."""
    fit = lambda net, b: {"fit": net(b["x"])[:, 0] * (math.nan if next(count) > 13 else 1.0)}
    for processes, step in ((Several(), 20), (common.Alone, 13)):
        count, seen = iter(range(2000)), []
        with pytest.raises(FloatingPointError, match=f"loss of fit is not finite at step {step};"):
            train(MLP(2, 4, 1), sample, fit, 1000, processes=processes, evaluate=lambda net: seen.append(1) or {})
        assert len(seen) == 2  # steps 0 and 10


def test_constants_are_sent_when_they_change(monkeypatch):
    sent, make = [], torch.tensor
    note = lambda args, options: sent.append(args) if set(options) == {"device"} else None
    monkeypatch.setattr(torch, "tensor", lambda *args, **options: note(args, options) or make(*args, **options))
    fit = lambda net, b: {"fit": 0 * net(b["x"])[:, 0] + b["nu"]}
    constants = lambda step: {"nu": 0.5 if step < 4 else 0.25}
    history = train([MLP(2, 4, 1), MLP(2, 4, 1)], sample, fit, 8, constants=constants)
    assert [row["loss"] for row in history[::2]] == 4 * [0.25] + 5 * [0.0625] and sent == [(0.5,), (0.25,)]


def test_causal_weights_by_hand():
    """Four chunks of two points with mean squares 1, 0, 4, 9 and tol 0.5: exp(-0.5 * (0, 1, 1, 5))."""
    r = {"res": torch.tensor([[1.0, 1, 0, 0, 2, 2, 3, -3]])}
    w = causal_weights(r, ["res"], tol=0.5, chunks=4)["res"][0]
    e = [math.exp(-0.5 * k) for k in (0, 1, 1, 5)]
    assert w.tolist() == pytest.approx([v for v in e for _ in range(2)])
    both = causal_weights(r | {"div": torch.zeros(1, 8) + 1}, ["res", "div"], tol=0.5, chunks=4)
    assert both["div"][0, ::2].tolist() == pytest.approx([math.exp(-0.5 * k) for k in (0, 1, 2, 5)])  # the smaller one
    with pytest.raises(ValueError, match="multiples of 3"):
        causal_weights(r, ["res"], chunks=3)


def exact_ntk_trace(net, r):
    params = list(net.parameters())
    total = 0.0
    for r_i in r:
        total += sum(
            (g**2).sum().item()
            for g in torch.autograd.grad(r_i, params, retain_graph=True, allow_unused=True)
            if g is not None
        )
    return total / len(r)


@pytest.mark.parametrize("causal", [None, dict(terms=["res"], tol=0.1, chunks=8)], ids=["plain", "causal"])
def test_ntk_sizes_are_unbiased(causal, float64, monkeypatch):
    """The mean of 10 000 random-sign estimates lies within 4 standard errors of the exact trace, term by term. On 8 and
    4 points these are below 8 % of it: no wrong factor hides, for B - 1 in place of B is off by 14 %, and a causal
    weight in place of its root by more. 500 copies of one network, each with its own signs, make it fast."""
    monkeypatch.setattr(weights, "PROBES", 1)
    x = sample(torch.Generator().manual_seed(0))
    batch = {"x": x["x"][::8], "x0": x["x0"][::4]}
    net, copies = network(), 500
    r = residuals(net, batch)
    c = causal_weights({k: v[None] for k, v in r.items()}, **causal) if causal else {}
    problem = Problem([network() for _ in range(copies)], residuals, causal)
    stacked = {k: v.expand(copies, *v.shape) for k, v in batch.items()}
    generators = [torch.Generator().manual_seed(s) for s in range(copies)]
    estimates = [gradient_sizes("ntk", problem, stacked, generators) for _ in range(20)]
    for k in r:
        exact = exact_ntk_trace(net, r[k] * (c[k][0].sqrt() if k in c else 1))
        values = torch.cat([e[k] for e in estimates])
        error = 4 * values.std().item() / math.sqrt(len(values))
        assert abs(values.mean().item() - exact) <= error < 0.08 * exact
    if causal:
        assert exact_ntk_trace(net, r["res"] * c["res"][0]) < 0.8 * exact_ntk_trace(net, r["res"] * c["res"][0].sqrt())


def test_ntk_weights_are_those_of_the_exact_trace(float64):
    """Mean weight over 300 copies of a network, each with its own signs, against the weight of the exact trace. The
    reciprocal of an estimate is biased by its relative variance, here 0.4 for one probe in the term with few points,
    more in its tails: one probe gives 13 times the weight, 16 probes 1.07 times. The mean itself is known to 2 %."""
    net, batch, copies = network(), sample(torch.Generator().manual_seed(0)), 300
    r = residuals(net, batch)
    exact = balanced({k: torch.tensor([exact_ntk_trace(net, r[k])]) for k in r})
    problem = Problem([network() for _ in range(copies)], residuals)
    stacked = {k: v.expand(copies, *v.shape) for k, v in batch.items()}
    generators = [torch.Generator().manual_seed(s) for s in range(copies)]
    mean = {k: w.mean().item() for k, w in balanced(gradient_sizes("ntk", problem, stacked, generators)).items()}
    assert exact["ic"].item() > 10 and mean == pytest.approx({k: w.item() for k, w in exact.items()}, rel=0.12)


@pytest.mark.parametrize("scheme", ["grad_norm", "ntk"])
def test_terms_without_gradient_have_finite_weights(scheme):
    """jaxpi's floor: mean / (size + 1e-5 mean), 1e5 at most times the number of terms; 1 where there is no gradient."""
    fit = lambda net, b: {"fit": net(b["x"])[:, 0], "given": b["x"][:, 0], "zero": 0 * net(b["x0"])[:, 0]}
    generators = [torch.Generator().manual_seed(0)]
    of = lambda f: balanced(gradient_sizes(scheme, Problem([network()], f), sample(generators[0]), generators))
    w = {k: v.item() for k, v in of(fit).items()}
    assert w == pytest.approx({"fit": 1 / 3, "given": 1e5, "zero": 1e5}, rel=1e-4)
    assert of(lambda net, b: {k: v for k, v in fit(net, b).items() if k != "fit"}) == {"given": 1, "zero": 1}
    history = train(network(), sample, fit, 3, weighting=scheme)
    assert all(math.isfinite(v) for row in history for v in row.values())


def test_grad_norm_weights(float64):
    net, batch = network(), sample(torch.Generator().manual_seed(0))
    r, norms = residuals(net, batch), {}
    for k in r:
        g = torch.autograd.grad((r[k] ** 2).mean(), list(net.parameters()), retain_graph=True, allow_unused=True)
        norms[k] = math.sqrt(sum((x**2).sum().item() for x in g if x is not None))
    w = balanced(gradient_sizes("grad_norm", Problem([net], residuals), batch, None))
    mean = sum(norms.values()) / 2
    for k in r:
        assert w[k].item() == pytest.approx(mean / (norms[k] + 1e-5 * mean), rel=1e-9)
    history = train(network(), sample, residuals, 40, weighting="grad_norm", seeds=[0])
    assert history[0]["weight_ic"] != 1.0 and history[-1]["weight_ic"] != history[0]["weight_ic"]


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("compile", [False, {"backend": "eager"}], ids=["eager", "compiled"])
@pytest.mark.parametrize("weighting", ["grad_norm", "ntk"])
def test_frozen_parameters(weighting, compile, seeds, float64):
    """They stay, all others move, and weights follow the gradients of the others alone."""
    nets = [network(s) for s in range(seeds)]
    for net in nets:
        net.first.weight.requires_grad_(False)
    before = parameters(nets)
    draws = [torch.Generator().manual_seed(1000003 * s + 1) for s in range(seeds)]
    sizes = [gradient_sizes(weighting, Problem([net], residuals), sample(g), [g]) for net, g in zip(nets, draws)]
    history = train(nets, sample, residuals, 5, weighting=weighting, compile=compile)
    names = [name for net in nets for name, _ in net.named_parameters()]
    for name, old, new in zip(names, before, parameters(nets)):
        assert torch.equal(old, new) == (name == "first.weight"), name
    for size, row in zip(sizes, history):
        want = {f"weight_{k}": 0.9 + 0.1 * v.item() for k, v in balanced(size).items()}
        assert {k: row[k] for k in want} == pytest.approx(want, rel=1e-9)


def test_wrong_residuals_and_weights_are_refused():
    x1 = lambda net, batch: {"fit": net(batch["x"]) - torch.ones(64)}  # [B, 1] - [B] broadcasts to [B, B]
    with pytest.raises(ValueError, match=r"'fit' is \[64, 64\]"):
        train(network(), sample, x1, 3)
    with pytest.raises(ValueError, match="'wall'"):
        train(network(), sample, residuals, 3, weights={"wall": 1.0})
    with pytest.raises(ValueError, match="pseudo_time: no residual is a pair .*'ic', 'res'"):
        train(network(), sample, residuals, 3, pseudo_time=True)


def test_unknown_choices_are_refused():
    """By name and with what there is, before anything is drawn."""
    drawn = lambda generator: pytest.fail("drawn")
    for unknown in (None, "lbfgs", 3):
        with pytest.raises(Refused, match=f"optimizer: {unknown!r} is unknown; choose one of adam, soap, ng"):
            train(network(), drawn, residuals, 3, optimizer=unknown)
    for unknown in (None, "none", True):
        with pytest.raises(Refused, match=f"weighting: {unknown!r} is unknown; choose one of fixed, grad_norm, ntk"):
            train(network(), drawn, residuals, 3, weighting=unknown)
    with pytest.raises(Refused, match="optimizer: soap trains one network"):
        train([network(), network()], drawn, residuals, 3, optimizer="soap")
    with pytest.raises(ValueError, match="optimizer: 'adamw' is unknown; choose one of adam, soap, ng"):
        train(network(), drawn, residuals, 3, optimizer="adamw")
    with pytest.raises(ValueError, match="weighting: 'gradnorm' is unknown; choose one of fixed, grad_norm, ntk"):
        train(network(), drawn, residuals, 3, weighting="gradnorm")


def test_plain_module_trains():
    torch.manual_seed(0)
    net = sfli(nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1)), [(-1, 1)])
    history = train(
        net,
        lambda g: {"x": uniform([(-1, 1)], 100, g)},
        lambda net, b: {"fit": net(b["x"])[:, 0] - torch.sin(10 * b["x"][:, 0])},
        500,
        lr=5e-3,
    )
    assert history[-1]["loss"] < 0.02 * history[0]["loss"]
    assert len(history) == 101 and json.dumps(history)


def test_report_of_the_time(monkeypatch, capsys):
    """A clock on which a draw takes 1 s, that of step 0 before it starts: n steps are done after n - 1 s. Of a run of
    2000 steps there are lines after 121 s, then at each tenth and two minutes after it; of one of 50 from 10 s on at
    each tenth; of one of 11 none. Shown are the values of the last row."""
    clock = [0.0]
    monkeypatch.setattr(common.time, "perf_counter", lambda: clock[0])

    def sample(generator):
        clock[0] += 1
        return {"x": uniform(OMEGA, 4, generator)}

    fit, evaluate = lambda net, b: {"fit": 0 * net(b["x"])[:, 0] + 0.5}, lambda net: {"rel_l2": 0.125, "other": 1.0}
    for steps, told in ((2000, [122, 200, 321, 400]), (50, [12, 15, 20, 25, 30, 35, 40, 45]), (11, [])):
        clock[0] = 0.0
        train(MLP(2, 4, 1), sample, fit, steps, evaluate=evaluate, stop=lambda: clock[0] > 410)
        lines = [f"step {n} of {steps}: loss 0.25, rel_l2 0.125, {(n - 1) / n * (steps - n) / 60:.1f} min to go"
                 for n in told]  # fmt: skip
        assert capsys.readouterr().out.splitlines() == lines


# What people bring: coefficients, optimisers, derivatives of their own


class Inverse(nn.Module):
    """u' = k cos(2.5 x) with data u = sin(2.5 x): k is 2.5."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.net, self.k = MLP(1, 16, 2), nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.net(x)


def points(generator):
    return {"x": uniform([(0, 1)], 64, generator)}


def inverse(net, batch):
    """One term [B, 1], one [B]."""
    x = batch["x"]
    u, u_x = jet(net, x, "x", "x")
    return {"data": u - torch.sin(2.5 * x), "ode": (u_x - net.k * torch.cos(2.5 * x))[:, 0]}


def by_autograd(net, batch):
    x = batch["x"].requires_grad_()
    u = net(x)
    (u_x,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return {"data": u - torch.sin(2.5 * x), "ode": u_x - net.k * torch.cos(2.5 * x)}


@pytest.mark.parametrize("options", [
    dict(lr=3e-2), dict(lr=3e-2, optimizer="soap"), dict(lr=3e-2, compile={"backend": "eager"}),
    dict(optimizer=lambda params: torch.optim.Adam(params, 3e-2)), dict(lr=3e-2, weighting="ntk"),
], ids=["adam", "soap", "compiled", "own", "ntk"])  # fmt: skip
def test_inverse_problem(options, float64):
    """A coefficient beside the layers is found, from 1 to 2.5 within 5 %."""
    if options.get("optimizer") == "soap":
        pytest.importorskip("pytorch_optimizer")
    net = Inverse()
    train(net, points, inverse, 800, **options)
    assert net.k.item() == pytest.approx(2.5, rel=0.05)


@pytest.mark.parametrize("compile", [False, {"backend": "eager"}], ids=["eager", "compiled"])
def test_inverse_problem_with_several_seeds(compile, float64):
    together, alone = [Inverse(s) for s in range(3)], [Inverse(s) for s in range(3)]
    train(together, points, inverse, 20, lr=1e-2, compile=compile)
    for s, net in enumerate(alone):
        train(net, points, inverse, 20, lr=1e-2, seeds=[s])
    assert torch.allclose(torch.stack([net.k for net in together]), torch.stack([net.k for net in alone]), rtol=1e-9)
    assert len({net.k.item() for net in together}) == 3


def test_residuals_by_autograd(float64, capsys):
    """torch.autograd.grad inside the residuals: the steps of the same problem written with jets, for one network and
    for several, which vmap does not take; with pseudo-time and causal weights, which look at residuals between steps.
    compile= is refused."""
    options = dict(lr=1e-2, weighting="grad_norm", causal=dict(terms=["ode"], chunks=8))
    for seeds in (1, 2):
        mine, want = ([Inverse(s) for s in range(seeds)] for _ in range(2))
        train(mine, points, by_autograd, 10, **options)
        assert ("the networks take turns" in capsys.readouterr().out) == (seeds > 1)
        train(want, points, inverse, 10, **options)
        for a, b in zip(parameters(mine), parameters(want)):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)
    pairs = lambda net, b: {k: (r, 2 * r) if k == "ode" else r for k, r in by_autograd(net, b).items()}
    assert train(Inverse(), points, pairs, 25, pseudo_time=True)[-1]["lam_ode"] == pytest.approx(1 - 0.1 * 0.5 * 1.9)
    with pytest.raises(Refused, match="compile: residuals that call torch.autograd.grad do not compile; use jet"):
        train(Inverse(), points, by_autograd, 3, compile={"backend": "eager"})


def test_an_error_in_residuals_stays_itself():
    for nets in (network(), [network(0), network(1)]):
        with pytest.raises(RuntimeError, match="size of tensor a"):
            train(nets, sample, lambda net, b: {"r": b["x"][:, 0] + b["x0"][:, 0]}, 3)


def test_own_optimiser(float64):
    """Steps of plain PyTorch; its rate is its own unless lr is given; options reach it; a state that resumes."""
    mine, plain, options = network(), network(), dict(lr=1e-3, momentum=0.5)
    history = train(mine, sample, residuals, 10, optimizer=torch.optim.SGD, optimizer_options=options)
    opt, generator = torch.optim.SGD(plain.parameters(), **options), torch.Generator().manual_seed(1)
    for _ in range(10):
        opt.zero_grad()
        sum((r**2).mean() for r in residuals(plain, sample(generator)).values()).backward()
        opt.step()
    for a, b in zip(parameters([mine]), parameters([plain])):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)
    assert history[-1]["lr"] == 1e-3
    rates = lambda **lr: [r["lr"] for r in train(network(), sample, residuals, 2, optimizer=torch.optim.NAdam, **lr)]
    assert rates() == [2e-3] * 3 and rates(lr=0.5) == [0.5] * 3 and rates(lr=lambda step: 1.0 + step) == [1, 2, 3]
    with pytest.raises(Refused, match="optimizer: LBFGS wants a closure"):
        train(network(), sample, residuals, 2, optimizer=torch.optim.LBFGS)


def test_natural_gradient_starts_with_whole_steps(float64):
    history = train(network(), sample, residuals, 3, optimizer="ng")
    assert history[0]["lr"] == 1 and history[-1]["loss"] < 0.5 * history[0]["loss"]


def test_callback_gets_every_row():
    seen, nets = [], [network(0), network(1)]
    history = train(nets, sample, residuals, 20, callback=lambda step, row: seen.append((step, row)))
    assert [row for _, row in seen] == history and [step for step, _ in seen] == [row["step"] for row in history]
    assert len(seen) == 2 * 21


def test_stopping_without_save_returns_the_history():
    net, asked = network(), []
    history = train(net, sample, residuals, 1000, stop=lambda: asked.append(1) or len(asked) == 25)
    assert [row["step"] for row in history] == [0, 10, 20] and len(asked) == 25


@pytest.mark.parametrize("seeds", [1, 2])
def test_the_best_network_is_kept(seeds, tmp_path):
    """In a column of its own: the lowest value of a wave, at another row for each seed, also through a resume."""
    kept, rows = {}, {}

    def evaluate(net):
        at = rows.setdefault(net, [])
        at.append(copy.deepcopy(net.state_dict()))
        value = math.cos(0.05 * len(at) + nets.index(net))
        if value < kept.get(net, (2, None))[0]:
            kept[net] = value, at[-1]
        return {"wave": value}

    nets = [network(s) for s in range(seeds)]
    history = train(nets, sample, residuals, 105, evaluate=evaluate, keep="wave")
    for s, net in enumerate(nets):
        lowest = min(history[s::seeds], key=lambda row: row["wave"])
        assert 20 < lowest["step"] < 80 and lowest["wave"] == kept[net][0]
        assert all(torch.equal(v, kept[net][1][k]) for k, v in net.state_dict().items())
    want, nets, asked = [copy.deepcopy(net) for net in nets], [network(s) for s in range(seeds)], []
    rows.clear(), kept.clear()
    with pytest.raises(common.Stopped):
        train(nets, sample, residuals, 105, evaluate=evaluate, keep="wave", save=Save(tmp_path),
              stop=lambda: asked.append(1) or len(asked) == 80)  # fmt: skip
    assert not torch.equal(nets[0].out.weight, want[0].out.weight)  # it goes on from where it was
    train(nets, sample, residuals, 105, evaluate=evaluate, keep="wave", save=Save(tmp_path, resume=True))
    assert all(torch.equal(a, b) for a, b in zip(parameters(nets), parameters(want)))
    with pytest.raises(Refused, match="keep: 'rel_l2' is no column of the history; there are step, seed, loss"):
        train(network(), sample, residuals, 3, keep="rel_l2")


def test_checkpoints_that_do_not_fit_are_refused(tmp_path):
    """In one line: another width, another optimiser, a key that is missing."""
    train(network(), sample, residuals, 3, save=Save(tmp_path))
    groups = lambda params: torch.optim.Adam([{"params": [p]} for p in params])
    others = [network(width=11), MLP(2, 10, 3), network(5).double()]
    for net, options in [(network(5), dict(optimizer=groups)), *((net, {}) for net in others)]:
        before = parameters([net])
        with pytest.raises(Refused, match="resume: the checkpoint is of another network, optimizer or version"):
            train(net, sample, residuals, 3, save=Save(tmp_path, resume=True), **options)
        assert all(torch.equal(a, b) for a, b in zip(before, net.parameters()))
    whole = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    for key in sorted(set(whole) - {"config"}):
        torch.save({k: v for k, v in whole.items() if k != key}, tmp_path / "checkpoint.pt")
        with pytest.raises(Refused, match=f"resume: .*KeyError: '{key}'"):
            train(network(), sample, residuals, 3, save=Save(tmp_path, resume=True))
    assert set(whole) == {"config", *vars(common.State({}, {}, None, []))}


def test_what_lies_in_kernels_is_named(monkeypatch):
    options = [dict(weighting="ntk"), dict(causal=dict(terms=["res"])), dict(save=Save("runs")), dict(optimizer="ng")]
    for name, options in zip(("weights", "weights", "checkpoint", "natural_gradient"), options):
        monkeypatch.setitem(sys.modules, f"kernels.{name}", None)
        with pytest.raises(Refused, match=rf"^\w+: .* in kernels/{name}.py; copy the folder kernels/ beside common.py"):
            train(network(), lambda generator: pytest.fail("drawn"), residuals, 3, **options)


def test_train_leaves_global_state_alone():
    """In a process of its own: the default dtype, the number of threads, subnormal numbers in all of them, the state
    of torch's own generator, from which sample does not draw here. Subnormal numbers are compared by their bits: with
    them flushed, 0.0 == 1e-310 in Python too."""
    code = (
        "import torch\n"
        "one, many = (torch.full((n,), 1e-310, dtype=torch.float64) for n in (1, 10**6))\n"
        "state = lambda: (torch.get_default_dtype(), torch.get_num_threads(), torch.get_num_interop_threads(),\n"
        "                 *((x * 1).view(torch.int64).min().item() for x in (one, many)),\n"
        "                 torch.get_rng_state().tolist())\n"
        "torch.manual_seed(3)\n"
        "before = state()\n"
        "from common import MLP, train, uniform\n"
        "nets = [MLP(2, 10, 2) for _ in range(2)]\n"
        "torch.manual_seed(3)\n"
        "train(nets, lambda g: {'x': uniform([(0, 1)] * 2, 64, g)}, lambda net, b: {'r': net(b['x'])[:, 0]}, 30,\n"
        "      weighting='ntk', causal=dict(terms=['r'], chunks=8), compile={'backend': 'eager'})\n"
        "assert before[3] == before[4] > 0 and state() == before, (before[:5], state()[:5])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
