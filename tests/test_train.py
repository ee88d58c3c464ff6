"""The training loop: weights, schedules, stacked seeds, checkpoints, refusals."""

import csv
import json
import math
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn

from conftest import ROOT

import common
from common import MLP, balanced, causal_weights, gradient_sizes, jet, learning_rate, sfli, train, uniform

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


needs_compiler = pytest.mark.skipif(not common.cpu_can_compile(), reason="no C++ compiler or no Python headers")

ALL = dict(weighting="ntk", causal=dict(terms=["res"], tol=1.0, chunks=8), warmup=5, decay=0.9, decay_every=10)


def test_loss_is_the_weighted_mean_square():
    net = network()
    generator = torch.Generator().manual_seed(1000003 * 4 + 1)
    r = residuals(net, sample(generator))
    history = train(net, sample, residuals, 1, weights={"ic": 5.0}, seeds=[4])
    want = 5 * (r["ic"] ** 2).mean() + (r["res"] ** 2).mean()
    assert history[0]["loss"] == pytest.approx(want.item(), rel=1e-5)
    assert history[0]["loss_ic"] == pytest.approx((r["ic"] ** 2).mean().item(), rel=1e-5)


def test_adam_steps_are_those_of_plain_pytorch(float64):
    """Twenty steps of the loop against twenty written by hand, with warm-up and decay."""
    mine, plain = network(), network()
    train(mine, sample, residuals, 20, lr=1e-2, warmup=4, decay=0.5, decay_every=8, seeds=[0])
    opt = torch.optim.Adam(plain.parameters(), 1e-2)
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
    assert [learning_rate(s, 1.0, 4, 0.9, 10) for s in (0, 3, 4, 14)] == pytest.approx([0.25, 1.0, 1.0, 0.9])
    assert learning_rate(10_000, 1e-3, 0, 1.0, 1000) == 1e-3


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


@needs_compiler
@pytest.mark.parametrize("seeds", [1, 3])
def test_compiled_training_equals_eager(seeds, float64):
    eager, compiled = [network(s) for s in range(seeds)], [network(s) for s in range(seeds)]
    train(eager, sample, residuals, 5)
    train(compiled, sample, residuals, 5, compile=True)
    for a, b in zip(parameters(eager), parameters(compiled)):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)


def test_many_compiled_runs_in_one_process(monkeypatch):
    """The variants of one run are forgotten before the next; else the fifth run of --all would train uncompiled."""
    plain = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: plain(self, backend="eager", **options))
    monkeypatch.setattr(common, "WHOLE_STEP", 0)
    with torch._dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True):
        for seed in range(4):
            train(network(seed, 10 + seed), sample, residuals, 2, compile=True)


@needs_compiler
def test_compiled_blocks_equal_eager(float64, monkeypatch):
    """Large networks compile their repeated block instead of the whole step."""
    make = lambda: (torch.manual_seed(0), common.PirateNet(2, 80, 2, rwf=(1.0, 0.1)))[1]
    eager, compiled = make(), make()
    assert sum(p.numel() for p in eager.parameters()) >= 40_000
    monkeypatch.setattr(common, "WHOLE_STEP", 1000)
    options = dict(weighting="grad_norm", evaluate=lambda net: {"v": net(torch.zeros(3, 2)).sum().item()})
    a = train(eager, sample, residuals, 3, **options)
    b = train(compiled, sample, residuals, 3, compile=True, **options)
    assert [row["loss"] for row in a] == pytest.approx([row["loss"] for row in b], rel=1e-10)


@needs_compiler
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
@pytest.mark.parametrize("seeds", [1, 2], ids=["parts", "stacked"])
def test_products_by_onednn(seeds, monkeypatch):
    """As where MKL is slow: the compiled step calls oneDNN, and after four steps the losses are those of uncompiled
    training, to the rounding of float32."""
    make = lambda: [network(s, 40) for s in range(seeds)]
    monkeypatch.setattr(common, "WHOLE_STEP", 0)
    monkeypatch.setattr(common, "half_speed_mkl", lambda: True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled = train(make(), sample, residuals, 4, compile=True)
    eager = train(make(), sample, residuals, 4)
    assert [row["loss"] for row in compiled] == pytest.approx([row["loss"] for row in eager], rel=1e-4)
    assert sum(e.count for e in profile.key_averages() if e.key == "sfli::mm") >= 2 * 5  # forwards, backwards


def test_whole_step_of_the_tables():
    """Example 7 in 50 dimensions is compiled as a whole, 1.6 times faster than by its parts; the cavity's is not."""
    parameters_of = lambda net: sum(p.numel() for p in net.parameters())
    d50, cavity = sfli(MLP(51, 128, 4), [(-1.0, 1.0)] * 51), common.PirateNet(2, 256, 6, out=3)
    assert parameters_of(d50) < common.WHOLE_STEP < parameters_of(cavity)


@pytest.mark.skipif(sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="mallopt is of glibc")
def test_steps_fetch_no_memory():
    """Steps with arrays of 32 MB: without keep_memory() most of them fetch over 10 000 pages from the system; with it
    the heap grows a few times, by 8000 pages or so, and a usual step fetches none."""
    code = (
        "import resource, torch; from common import MLP, train; pages = []\n"
        "now = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "sample = lambda g: pages.append(now()) or {'x': torch.rand(40_000, 2, generator=g)}\n"
        "train(MLP(2, 200, 2), sample, lambda net, batch: {'r': net(batch['x'])[:, 0]}, 20)\n"
        "print(sorted(b - a for a, b in zip(pages, pages[1:]))[10])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True,
                         timeout=120)  # fmt: skip
    assert int(out.stdout) < 1000  # far from both


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "seeds,options", [(1, {}), (1, ALL), (3, ALL), (1, {"optimizer": "soap"})], ids=["adam", "all", "stacked", "soap"]
)
def test_resume_bit_for_bit(seeds, options, dtype, tmp_path, monkeypatch):
    """Interrupt after any step, resume from the checkpoint: parameters and history equal the uninterrupted run's."""
    torch.set_default_dtype(dtype)
    if options.get("optimizer") == "soap":
        pytest.importorskip("pytorch_optimizer")
    monkeypatch.setattr(common, "CHECKPOINT_SECONDS", 0.0)
    make = lambda: [network(s) for s in range(seeds)]
    measure = lambda net: {"norm": sum(p.square().sum().item() for p in net.parameters())}
    whole = make()
    want = train(whole, sample, residuals, 205, evaluate=measure, **options)  # 205: records every 2 steps
    for stop in (1, 2, 57, 204):
        folder = tmp_path / f"{stop}"
        folder.mkdir()
        calls = [0]

        def interrupted(generator):
            calls[0] += 1
            if calls[0] > seeds * (stop + 1):
                raise KeyboardInterrupt
            return sample(generator)

        with pytest.raises(KeyboardInterrupt):
            train(make(), interrupted, residuals, 205, evaluate=measure, folder=folder, **options)
        nets = make()
        got = train(nets, sample, residuals, 205, evaluate=measure, folder=folder, resume=True, **options)
        assert all(torch.equal(a, b) for a, b in zip(parameters(nets), parameters(whole)))
        drop = lambda rows: [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
        assert drop(got) == drop(want)
        with open(folder / "history.csv") as f:
            assert len(list(csv.DictReader(f))) == len(want)
        left = ["checkpoint.pt", "checkpoint_previous.pt", "history.csv"]
        assert sorted(p.name for p in folder.iterdir()) == left


def test_foreign_broken_and_hostile_checkpoints(tmp_path):
    folder = tmp_path
    train(network(), sample, residuals, 3, folder=folder, config={"width": 10})
    with pytest.raises(ValueError, match="another configuration .width differ"):
        train(network(), sample, residuals, 3, folder=folder, config={"width": 11}, resume=True)
    path = folder / "checkpoint.pt"
    whole = path.read_bytes()

    class Hostile:
        def __reduce__(self):
            return (open, (str(folder / "owned"), "w"))

    for write in (
        lambda: path.write_bytes(whole[: len(whole) // 2]),
        lambda: path.write_bytes(b""),
        lambda: path.write_bytes(b"garbage" * 100),
        lambda: torch.save({"config": Hostile()}, path),
    ):
        write()
        with pytest.raises(ValueError, match="cannot be read"):
            train(network(), sample, residuals, 3, folder=folder, config={"width": 10}, resume=True)
    assert not (folder / "owned").exists()
    path.unlink()
    with pytest.raises(ValueError, match="no checkpoint"):
        train(network(), sample, residuals, 3, folder=folder, resume=True)


def test_failing_write_keeps_the_last_checkpoint(tmp_path):
    path = tmp_path / "checkpoint.pt"
    common.save_checkpoint(path, {"step": 1})

    def full_disk(tmp):
        tmp.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        common.atomically(path, full_disk)
    assert torch.load(path, weights_only=True) == {"step": 1} and len(list(tmp_path.iterdir())) == 1


def test_divergence_names_the_step_and_the_term():
    def explode(net, batch):
        r = residuals(net, batch)
        count[0] += 1
        return r | {"res": r["res"] * (float("nan") if count[0] > 9 else 1.0)}

    count = [0]
    with pytest.raises(FloatingPointError, match=r"loss of res is not finite at step 8; try a smaller --lr"):
        train(network(), sample, explode, 50)


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
def test_ntk_sizes_are_unbiased(causal, float64):
    """The mean of 600 random-sign estimates lies within 4 standard errors of the exact trace, term by term."""
    net = network()
    r = {k: v[None] for k, v in residuals(net, sample(torch.Generator().manual_seed(0))).items()}
    c = causal_weights(r, **causal) if causal else {}
    params, generator = dict(net.named_parameters()), torch.Generator().manual_seed(1)
    estimates = [gradient_sizes("ntk", r, params, causal, [generator]) for _ in range(600)]
    for k in r:
        exact = exact_ntk_trace(net, r[k][0] * (c[k][0].sqrt() if k in c else 1))
        values = torch.cat([e[k] for e in estimates])
        assert abs(values.mean() - exact) <= 4 * values.std() / math.sqrt(600)
        assert values.std() / math.sqrt(600) < 0.1 * exact  # or the bound above would mean nothing


def test_grad_norm_weights(float64):
    net = network()
    r = {k: v[None] for k, v in residuals(net, sample(torch.Generator().manual_seed(0))).items()}
    norms = {}
    for k in r:
        g = torch.autograd.grad((r[k] ** 2).mean(), list(net.parameters()), retain_graph=True, allow_unused=True)
        norms[k] = math.sqrt(sum((x**2).sum().item() for x in g if x is not None))
    w = balanced(gradient_sizes("grad_norm", r, dict(net.named_parameters()), None, None))
    for k in r:
        assert w[k].item() == pytest.approx(sum(norms.values()) / 2 / norms[k], rel=1e-9)
    history = train(network(), sample, residuals, 40, weighting="grad_norm", seeds=[0])
    assert history[0]["weight_ic"] != 1.0 and history[-1]["weight_ic"] != history[0]["weight_ic"]


def test_wrong_residuals_and_weights_are_refused():
    x1 = lambda net, batch: {"fit": net(batch["x"]) - torch.ones(64)}  # [B, 1] - [B] broadcasts to [B, B]
    with pytest.raises(ValueError, match=r"'fit' is \[64, 64\]"):
        train(network(), sample, x1, 3)
    with pytest.raises(ValueError, match="'wall'"):
        train(network(), sample, residuals, 3, weights={"wall": 1.0})


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


@pytest.mark.parametrize("steps, told", [(100, "80 steps to go: about 4 min"), (2000, "1980 steps to go: about 36 min")])
def test_estimate_of_the_time(steps, told, monkeypatch, capsys):
    """A clock on which a draw takes 1 s, an evaluation 2 s: every step is evaluated, or every 20th."""
    clock = [0.0]
    monkeypatch.setattr(common.time, "perf_counter", lambda: clock[0])

    def sample(generator):
        clock[0] += 1
        return {"x": uniform(OMEGA, 4, generator)}

    def evaluate(net):
        clock[0] += 2
        return {}

    stop = lambda: clock[0] > 100
    with pytest.raises(common.Stopped):
        train(MLP(2, 4, 1), sample, lambda net, b: {"fit": net(b["x"])[:, 0]}, steps, evaluate=evaluate, stop=stop)
    assert told in capsys.readouterr().out
