"""Example 4.6: the spectral reference, residuals on exact decaying flow, hand-over between windows, the script."""

import csv
import json
import math

import numpy as np
import pytest
import torch

import exp_ns_torus
from exp_ns_torus import NU, K, M, draw, hand_over, initial_vorticity, modes, on_grid, predict, reference, residuals
from exp_ns_torus import derivatives_on_grid, solve, stream, velocity


def taylor_green(k=2):
    """Modes of w = 2 k cos kx cos ky, whose flow keeps its shape and decays by exp(-2 k^2 nu t)."""
    x = 2 * np.pi * np.arange(96) / 96
    return modes(2 * k * np.outer(np.cos(k * x), np.cos(k * x)))


def test_solver_on_taylor_green():
    w = solve(taylor_green(), [0.0, 0.7, 1.0], 64, 20)
    for t, field in zip((0.0, 0.7, 1.0), w):
        assert np.abs(field - w[0] * math.exp(-8 * NU * t)).max() < 1e-12


def test_solver_is_fourth_order_and_keeps_the_budgets():
    """From the paper's initial vorticity: halving the step divides the change by 2^4; energy E and enstrophy Z fall
    with dE/dt = -2 nu Z, dZ/dt = -2 nu P, P the palinstrophy, by central differences over 0.02 (error 1e-3)."""
    w0 = initial_vorticity(None, 0)
    a, b, c = (solve(w0, [0.2], 96, rate)[0] for rate in (40, 80, 160))
    assert 13 < np.abs(a - b).max() / np.abs(b - c).max() < 19
    times = [0.48, 0.49, 0.5]
    fields = [velocity(modes(w)) for w in solve(w0, times, 160, 100)]
    half_square = lambda C: (np.abs(C) ** 2).sum() / 2
    E, Z = ([half_square(C[part]) for C in fields] for part in (slice(0, 2), slice(2, 3)))
    P = half_square(np.stack([K[:, None] * fields[1][2], K * fields[1][2]]))
    assert E[0] > E[1] > E[2] and Z[0] > Z[1] > Z[2]
    assert (E[2] - E[0]) / 0.02 == pytest.approx(-2 * NU * Z[1], rel=1e-3)
    assert (Z[2] - Z[0]) / 0.02 == pytest.approx(-2 * NU * P, rel=1e-2)  # modes beyond 32 carry part of P


def test_flow_at_the_end():
    """The paper's figure at T = 10: the strongest positive vortex near (0.9, 3.3), the strongest negative one near
    (3.4, 1.2), |w| about 3.5; within three points of a coarse grid and 5%."""
    w = solve(initial_vorticity(None, 0), [10.0], 96, 80)[0]
    for k, place in ((w.argmax(), (0.9, 3.3)), (w.argmin(), (3.4, 1.2))):
        assert np.hypot(*(2 * np.pi * np.array(np.unravel_index(k, w.shape)) / 96 - place)) < 0.2
        assert abs(w.flat[k]) == pytest.approx(3.5, rel=0.05)


def test_initial_vorticity(tmp_path):
    """The paper's has maximal speed 3; a random one of the family too; a file is what it says."""
    for w in (initial_vorticity(None, 0), initial_vorticity("random", 0), initial_vorticity("random", 1)):
        u, v, back = on_grid(velocity(w), 128)
        assert np.hypot(u, v).max() == pytest.approx(3, abs=0.05) and np.abs(w[::-1, ::-1].conj() - w).max() < 1e-12
        assert 2.5 < back.std() < 4.5
    assert np.abs(initial_vorticity("random", 0) - initial_vorticity("random", 1)).max() > 0.1
    values = on_grid(initial_vorticity(None, 0)[None], 80)[0]
    np.savez(tmp_path / "w.npz", w=values + 5)  # a mean has no place on a torus
    assert np.abs(initial_vorticity(tmp_path / "w.npz", 0) - initial_vorticity(None, 0)).max() < 1e-6


def test_table_of_a_series_and_its_derivatives(float64):
    """cos(2x) sin(3y) and sin(x): closed forms of all derivatives up to third order. Rounding of the
    modes, 1e-17 each, is multiplied by up to 32^3."""
    x = 2 * np.pi * np.arange(80) / 80
    C = np.stack([modes(np.outer(np.cos(2 * x), np.sin(3 * x))), modes(np.outer(np.sin(x), np.ones(80)))])
    d = derivatives_on_grid(C, 3)
    z = d.pop("x")
    cos, sin = (lambda a, t: torch.cos(t + a * math.pi / 2)), (lambda b, t: torch.sin(t + b * math.pi / 2))
    for key, got in d.items():
        a, b = map(int, key)
        want = 2**a * 3**b * cos(a, 2 * z[:, 0]) * sin(b, 3 * z[:, 1])
        assert torch.allclose(got[:, 0], want, atol=1e-10), key
        assert torch.allclose(got[:, 1], sin(a, z[:, 0]) * (b == 0), atol=1e-10), key
    assert len(d) == 10 and len(set(map(tuple, z.tolist()))) == exp_ns_torus.GRID**2


def exact(z, formulation="uvw", k=2):
    """Taylor-Green at (t, x, y), in operations that jets know: u, v, w, or what a network of `formulation` gives."""
    e, x, y = torch.exp(-2 * NU * k**2 * z[:, 0:1]), k * z[:, 1:2], k * z[:, 2:3]
    u, v = -e * (torch.cos(x) * torch.sin(y)), e * (torch.sin(x) * torch.cos(y))
    psi = e * (torch.cos(x) * torch.cos(y)) / k
    return torch.cat({"uv": [u, v], "uvw": [u, v, 2 * k**2 * psi], "psi": [psi, 2 * k**2 * psi]}[formulation], -1)


LENGTH = 0.8  # of a window


def change(z, formulation):
    """(q - q0) / t, where t runs from 0 to 1 over the window."""
    at = lambda c: exact(z * torch.tensor([c, 1.0, 1.0]), formulation)
    return (at(LENGTH) - at(0.0)) / z[:, :1]


@pytest.mark.parametrize("hard_ic", [False, True])
@pytest.mark.parametrize("formulation", ["uv", "psi"])
def test_residuals_on_taylor_green(formulation, hard_ic, float64):
    """All residuals vanish on the exact flow; with --hard-ic the network is (q - q0) / t / scale. A wrong flow does
    not pass."""
    args = type("args", (), dict(batch=64, initial=32, hard_ic=hard_ic, formulation=formulation))
    scale = torch.tensor([2.0, 3.0])
    C = (stream if formulation == "psi" else velocity)(taylor_green())
    known = derivatives_on_grid(C if formulation == "psi" or not hard_ic else C[:2], 3)
    batch = draw(torch.Generator().manual_seed(0), args, [(0.1, 1.0)] + [(0.0, 2 * math.pi)] * 2, known)
    assert hard_ic or (batch["x"][:, 0].diff() >= 0).all()
    numbers = lambda *values: dict(zip(("scale_0", "scale_1", "size_w", "size_1"), torch.tensor(values)))
    f = residuals(formulation, hard_ic, 1 / LENGTH if hard_ic else 1.0)
    for factor in (1.0, 1.1):
        whole = lambda z: factor * change(z, formulation) / scale
        net = whole if hard_ic else lambda z: factor * exact(z, formulation)
        r = f(net, batch | numbers(2.0, 3.0, 1.0, 1.0))
        initial = {"uv": {"u_ic", "v_ic", "w_ic"}, "psi": {"psi_ic", "w_ic"}}[formulation]
        second = {"uv": "rc", "psi": "rp"}[formulation]
        assert set(r) == {"rw", second} | (set() if hard_ic else initial)
        size = max(v.abs().max().item() for v in r.values())
        assert size < 1e-12 if factor == 1 else size > 1e-3
    half = f(net, batch | numbers(2.0, 3.0, 2.0, 4.0))
    assert torch.allclose(half["rw"] * 2, r["rw"]) and torch.allclose(half[second] * 4, r[second])


@pytest.mark.parametrize("formulation", ["uv", "psi"])
def test_hand_over(formulation, float64):
    """The end of a window as a series is what the network predicts there."""
    args = type("args", (), dict(hard_ic=True, formulation=formulation))

    class Net(torch.nn.Linear):
        def forward(self, z):
            return change(z, formulation)

    C = (stream if formulation == "psi" else velocity)(taylor_green())
    after = derivatives_on_grid(hand_over(predict(Net(1, 1), args, C, torch.ones(2), 1.0, 96).numpy(), formulation), 0)
    z = torch.nn.functional.pad(after["x"], (1, 0), value=LENGTH)
    want = exact(z, "psi" if formulation == "psi" else "uvw")
    assert torch.allclose(after["00"], want, atol=1e-12)


def test_reference_is_kept(tmp_path, capsys):
    times = [0.0, 0.05, 0.1]
    a = reference(times, 32, folder=tmp_path, size=64, rate=40)[2]
    assert "reference: 3 times" in capsys.readouterr().out and a.shape == (3, 32, 32)
    b = reference(times, 32, folder=tmp_path, size=64, rate=40)[2]
    assert capsys.readouterr().out == "" and np.array_equal(a, b)
    c = reference(times, 32, initial_vorticity("random", 0), tmp_path, 64, 40)[2]
    assert np.abs(a - c).max() > 1
    assert reference([0.0])[2].shape == (1, 128, 128)  # the sizes given by default fit each other
    with pytest.raises(ValueError, match="must divide"):
        reference(times, 48, folder=tmp_path, size=64)


SMOKE = ["--preset", "smoke", "--sfli"]


def test_script_all(tmp_path, capsys):
    exp_ns_torus.main(["--preset", "smoke", "--all", "--out", str(tmp_path)])
    out, folder = capsys.readouterr().out, tmp_path / "ns_torus"
    assert "RESULT ns_torus baseline rel_l2" in out and "RESULT ns_torus sfli-gauss rel_l2" in out
    assert (folder / "all/seed0/fig_ns_torus.png").exists()
    rows = list(csv.DictReader((folder / "sfli-gauss/seed0/errors.csv").open()))
    assert [float(r["t"]) for r in rows] == [0, 1.25, 2.5, 3.75, 5, 6.25, 7.5, 8.75, 10]
    result = json.loads((folder / "sfli-gauss/seed0/result.json").read_text())
    assert result["rel_l2"] == float(rows[-1]["rel_l2"]) and result["paper"] == 8.99e-2 and len(result["eps_rank"]) == 2
    window = list(csv.DictReader((folder / "sfli-gauss/seed0/window2/history.csv").open()))[-1]
    assert float(window["rel_l2"]) == float(rows[-1]["rel_l2"]) and {"causal_last", "weight_u_ic"} <= set(window)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--formulation", "psi", "--hard-ic", "--optimizer", "ng", "--ic", "random"],
        ["--formulation", "uv", "--hard-ic"],
    ],
)
@pytest.mark.parametrize("at", [4, 9])
def test_resume_inside_any_window(at, options, tmp_path, monkeypatch):
    """Stopped in the first or the second window (5 draws each) and continued: the errors of the undisturbed run."""
    line = [*SMOKE, *options, "--no-plot", "--dtype", "float64", "--save-seconds", "1e-9", "--out"]
    exp_ns_torus.main([*line, str(tmp_path / "a")])
    calls, plain = [], exp_ns_torus.draw

    class Stop(Exception):
        pass

    def stopping(*args):
        calls.append(1)
        if len(calls) == at:
            raise Stop
        return plain(*args)

    monkeypatch.setattr(exp_ns_torus, "draw", stopping)
    with pytest.raises(Stop):
        exp_ns_torus.main([*line, str(tmp_path / "b")])
    monkeypatch.setattr(exp_ns_torus, "draw", plain)
    exp_ns_torus.main([*line, str(tmp_path / "b"), "--resume"])
    a, b = ([p.read_text() for p in sorted((tmp_path / k).rglob("errors.csv"))] for k in "ab")
    assert a == b and len(a) == 1


@pytest.mark.parametrize(
    "line, message",
    [
        ("--seeds 2", "--seeds"),
        ("--batch 33", "--batch: 33 points"),
        ("--ic nowhere.npz", "--ic: cannot read nowhere.npz"),
        ("--ic README.md", "--ic: cannot read"),
        ("--windows 0", "--windows"),
        ("--resume", "--resume"),
    ],
)
def test_bad_input(line, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        exp_ns_torus.main([*line.split(), "--preset", "smoke", "--out", str(tmp_path)])
    error = capsys.readouterr().err
    assert e.value.code == 2 and message in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


def test_bad_initial_files(tmp_path, capsys):
    for arrays, message in [({"z": np.ones((80, 80))}, "has no array w"), ({"w": np.ones((80, 70))}, "square grid"),
                            ({"w": np.ones((2 * M, 2 * M))}, "more than 64"),
                            ({"w": np.full((80, 80), np.nan)}, "finite"),
                            ({"w": 1e6 * np.sin(np.arange(80) * np.pi / 40) * np.ones((80, 1))}, "speeds up to 1.0e+06"),
                            ({"w": np.ones((80, 80))}, "speeds up to"), ({"w": np.ones((80, 80), complex)}, "complex")]:  # fmt: skip
        np.savez(tmp_path / "bad.npz", **arrays)
        with pytest.raises(SystemExit):
            exp_ns_torus.main(["--ic", str(tmp_path / "bad.npz"), "--preset", "smoke", "--out", str(tmp_path / "o")])
        assert message in capsys.readouterr().err and not (tmp_path / "o").exists()


def test_paper_preset_is_the_table(tmp_path):
    args = exp_ns_torus.parse_args("ns_torus", "", exp_ns_torus.PRESETS, ["--preset", "paper"], exp_ns_torus.flags)
    want = dict(steps=100_000, batch=4096, windows=5, arch="modified", layers=4, width=256, lr=1e-3, warmup=0)
    want |= dict(decay=0.9, decay_every=2000, optimizer="adam", formulation="uv", hard_ic=False)
    assert {k: getattr(args, k) for k in want} == want
    assert exp_ns_torus.GAMMA["gauss"] == math.sqrt(1.5) and exp_ns_torus.CHUNKS == 32


@pytest.mark.parametrize("formulation, second", [("uv", "rc"), ("psi", "rp")])
def test_windows_as_in_jaxpi(formulation, second, tmp_path, monkeypatch):
    """Time runs from 0 to 1 over every window, and both residuals share the smaller causal weight."""

    def run(args, recipe, sample, residuals, evaluate, points, measure, **options):
        assert recipe["omega"][0] == (0.0, 1.0) and options["causal"]["terms"] == ["rw", second]
        t = sample(torch.Generator())["x"][:, 0]
        assert 0 < t.min() and 0.7 < t.max() < 1
        raise InterruptedError

    monkeypatch.setattr(exp_ns_torus, "run", run)
    with pytest.raises(InterruptedError):
        exp_ns_torus.main([*SMOKE, "--formulation", formulation, "--no-plot", "--out", str(tmp_path)])


def test_warm_start_and_a_wide_first_layer(tmp_path):
    """With --warm the second window starts where the first one ended, without it from its own draw; --first widens the
    first layer alone, and gamma of --C follows from that width."""
    line = "--sfli --C 1 --first 24 --layers 2 --arch mlp --formulation psi --hard-ic --preset smoke --no-plot --lr 1e-30"
    first = {}
    for flag in ("--warm", "--no-warm"):
        exp_ns_torus.main([*line.split(), flag, "--seed", "5", "--out", str(tmp_path / flag)])
        folder = tmp_path / flag / "ns_torus/sfli-gauss/seed5"
        first[flag] = [torch.load(folder / f"window{k}/checkpoint.pt")["params"] for k in (1, 2)]
    one, two = first["--warm"]
    assert all(torch.allclose(one[k], two[k], atol=1e-20) for k in one)  # at this rate nothing moves
    assert one["first.weight"].shape == (24, 5) and one["blocks.0.0.weight"].shape == (8, 24)
    gamma = (24 ** (1 / 3) - 1) / (4 * math.pi**2) ** (1 / 3)
    assert torch.allclose(one["first.weight"], torch.tensor(gamma))
    assert torch.equal(one["out.weight"], first["--no-warm"][0]["out.weight"])


def test_warm_starts_follow_the_last_window(tmp_path, monkeypatch):
    """What the second window starts from is the trained network of the first, also after --resume."""
    starts = []
    plain = exp_ns_torus.run

    def run(*args, start=None, **options):
        starts.append(None if start is None else [p.clone() for p in start.parameters()])
        return plain(*args, start=start, **options)

    monkeypatch.setattr(exp_ns_torus, "run", run)
    line = "--sfli --arch mlp --formulation psi --hard-ic --warm --preset smoke --no-plot --out".split()
    exp_ns_torus.main([*line, str(tmp_path)])
    exp_ns_torus.main([*line, str(tmp_path), "--resume"])
    end = torch.load(tmp_path / "ns_torus/sfli-gauss/seed0/window1/checkpoint.pt")["params"].values()
    assert starts[0] is None and starts[2] is None
    for start in (starts[1], starts[3]):
        assert all(torch.equal(a, b) for a, b in zip(start, end, strict=True))


def test_steps_fade_over_the_windows(tmp_path):
    """--steps on average, a factor e less after --fade; the schedule of each window stretches with its own steps."""
    line = "--windows 4 --steps 8 --fade 2.5 --preset smoke --no-plot --formulation psi --hard-ic".split()
    exp_ns_torus.main([*line, "--out", str(tmp_path)])
    configs = [json.loads((tmp_path / f"ns_torus/baseline/seed0/window{k}/config.json").read_text()) for k in range(1, 5)]
    steps = [c["steps"] for c in configs]
    share = [math.exp(-k) for k in range(4)]
    assert steps == [round(32 * s / sum(share)) for s in share] and abs(sum(steps) - 32) <= 2
    every = exp_ns_torus.PRESETS["smoke"]
    assert all(c["decay_every"] == pytest.approx(every["decay_every"] * c["steps"] / every["steps"]) for c in configs)
    rows = (tmp_path / "ns_torus/baseline/seed0/window1/history.csv").read_text().splitlines()
    assert rows[-1].split(",")[0] == str(steps[0])
    exp_ns_torus.main([*line, "--out", str(tmp_path), "--resume"])


def test_laptop_preset(tmp_path):
    """A wide first layer and warm windows; the first layer of another architecture keeps its width."""
    parse = lambda *argv: exp_ns_torus.parse_args("ns_torus", "", exp_ns_torus.PRESETS, ["--preset", "laptop", *argv],
                                                  exp_ns_torus.flags)  # fmt: skip
    args = parse("--sfli")
    assert args.first == 256 and args.warm and args.hard_ic and args.width == 64
    assert parse("--arch", "modified").first is None and not parse("--no-warm").warm
