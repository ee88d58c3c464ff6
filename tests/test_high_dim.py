"""Examples 4.3 and 4.7: residuals and draws in many dimensions, the search for C, the tables."""

import math

import pytest
import torch

import exp_high_dim
import exp_parabolic
from cli import write_table
from common import MLP
from exp_parabolic import T, box, draw, exact, residuals, source


@pytest.mark.parametrize("d", [1, 5, 50])
def test_the_exact_solution_has_no_residual(d, float64):
    """The paper's source term belongs to its solution: exp(-t) cos |x|^2 written with operations that jets know."""

    def solution(z):
        time, space = torch.eye(d + 1)[:, -1:], 1 - torch.eye(d + 1)[:, -1:]
        return torch.exp(-(z @ time)) * torch.cos((z * z) @ space)

    batch = draw(torch.Generator().manual_seed(0), d, 64)
    r = residuals(solution, batch)
    size = source(batch["inside"]).abs().max()
    assert r["res"].abs().max() < 1e-12 * size and r["ic"].abs().max() < 1e-12 and r["bc"].abs().max() < 1e-12


@pytest.mark.parametrize("d", [1, 5, 50])
def test_draws(d, float64):
    """The paper's numbers of points: 512, 256, 32 d; each of the 2 d faces holds 16 of the latter, uniform on it."""
    generator = torch.Generator().manual_seed(0)
    batch = draw(generator, d, 512)
    assert [len(batch[k]) for k in ("inside", "initial", "boundary")] == [512, 256, 32 * d]
    assert (batch["initial"][:, -1] == 0).all() and (batch["inside"][:, -1] > 0).all()
    for z in batch.values():
        assert (z[:, :-1].abs() <= 1).all() and (z[:, -1] >= 0).all() and (z[:, -1] <= T).all()
    many = torch.cat([draw(generator, d, 512)["boundary"] for _ in range(40)])  # 640 on each face
    for k in range(d):
        for side in (-1.0, 1.0):
            on = many[many[:, k] == side]
            assert len(on) == 640
            # Kolmogorov-Smirnov: P(sqrt(n) D > 3) = 2 exp(-18) = 3e-8, times 51 x 100 tests at most
            free = torch.cat([on[:, :k], on[:, k + 1 : -1]], 1) / 2 + 0.5
            for column in [*free.T, on[:, -1] / T]:
                empirical = (torch.arange(640) + 0.5) / 640
                assert (column.sort().values - empirical).abs().max() < 3 / math.sqrt(640)
    assert (many[:, :-1].abs() == 1).sum(1).eq(1).all()


def test_search_takes_the_best_of_the_validation(tmp_path, capsys, monkeypatch):
    """The C with the lowest error, as a median over the last tenth of the records, here three, and the mean over the
    seeds; its points are not the test points."""
    line = f"--sfli --preset smoke --dims 5 --out {tmp_path}".split()
    args = exp_high_dim.parse_args("high_dim", "", exp_high_dim.PRESETS, line, exp_high_dim.flags)
    args.search_seeds, args.d = 2, 5
    seen = []

    def history(nets, *rest, seeds, **options):
        seen.append((len(nets), seeds, options["evaluate"](nets[0])["rel_l2"]))
        gammas = [net.first.weight[0, 0].item() for net in nets]
        error = lambda g, s: abs(g / gammas[0] - 3) + 0.1 * s  # smallest for 1.4
        jump = lambda k, g: -9 if k == 29 and g > gammas[3] or k < 27 and g == gammas[0] else 0  # 1.9 once, 0.5 early
        return [{"rel_l2": error(g, s) + jump(k, g)} for k in range(30) for g, s in zip(gammas, seeds)]

    monkeypatch.setattr(exp_high_dim, "train", history)
    assert exp_high_dim.search(args, [0.5, 1.4, 1.9]) == pytest.approx(1.4)
    assert seen[0][:2] == (6, [0, 1] * 3) and "C=1.4" in capsys.readouterr().out
    test, validation = (exp_high_dim.error_on([(-1.0, 1.0)] * 5, "cpu", seed) for seed in (1, 2))
    net = MLP(5, 10, 2)
    with torch.no_grad():
        assert test(net)["rel_l2"] != validation(net)["rel_l2"]
        assert test(net) == exp_high_dim.error_on([(-1.0, 1.0)] * 5, "cpu", 1)(net)


@pytest.mark.parametrize("script", [exp_high_dim, exp_parabolic])
def test_tables(script, tmp_path, capsys):
    """--all with two dimensions and two seeds: the finished table."""
    grid = ["--C-grid", "0.7", "1.3"] if script is exp_high_dim else []
    script.main(["--all", "--preset", "smoke", "--dims", "5", "10", *grid, "--out", str(tmp_path)])
    folder = next(tmp_path.iterdir()) / "all/seeds0-1"
    text, paper = (folder / "table.md").read_text(), script.TABLE[5]
    assert text in capsys.readouterr().out and text.count("\n") == 4
    lines = text.splitlines()
    assert lines[2].startswith("| 5 | ") and lines[3].startswith("| 10 | ")
    assert all(f"(paper {paper[k]:.2e}, ratio " in lines[2] for k in (0, 1))
    script.main(["--all", "--preset", "smoke", "--dims", "10", *grid, "--resume", "--out", str(tmp_path)])  # finished
    assert (folder / "table.md").read_text().splitlines()[2:] == lines[3:]
    with pytest.raises(SystemExit):
        script.main(["--all", "--preset", "smoke", "--resume", "--out", str(tmp_path / "other")])


def test_table_by_hand(tmp_path, capsys):
    write_table(tmp_path, [{"d": 5, "error": ([1.0, 3.0], 4.0), "C": None, "other": ([2.0], None)}])
    assert (
        "| 5 | 2.00e+00 ± 1.0e+00 (paper 4.00e+00, ratio 0.50) | None | 2.00e+00 ± 0.0e+00 |" in capsys.readouterr().out
    )


def test_paper_preset_is_the_table():
    assert exp_parabolic.PAPER == dict(steps=20_000, batch=512, width=128, layers=4, lr=1e-3, decay=0.9,
                                       decay_every=2000, optimizer="adam", seeds=5)  # fmt: skip
    want = dict(batch=1000, width=128, layers=3)
    assert want.items() <= exp_high_dim.PAPER.items()
    assert exact(torch.tensor([[0.0, 0.0, 0.1]])).item() == pytest.approx(math.exp(-0.1))


BAD = [
    (exp_high_dim, "--gamma auto --sfli", "--gamma"),
    (exp_high_dim, "--C-grid 1", "--sfli"),
    (exp_high_dim, "--C 1", "--sfli"),
    (exp_high_dim, "--sfli --C 1 --C-grid 1 2", "--C-grid"),
    (exp_high_dim, "--sfli --C-grid 0", "--C-grid"),
    (exp_high_dim, "--all --C 1", "--C-grid"),
    (exp_high_dim, "--all --optimizer soap --seeds 1", "--optimizer"),
    (exp_high_dim, "--dims 0", "--dims"),
    (exp_high_dim, "--dims", "--dims"),
    (exp_high_dim, "--search-steps 0", "--search-steps"),
    (exp_parabolic, "--gamma auto --sfli", "--gamma"),
    (exp_parabolic, "--C 2", "--sfli"),
    (exp_parabolic, "--all --C 2", "--all"),
    (exp_parabolic, "--dims ten", "--dims"),
    (exp_parabolic, "--resume", "--resume"),
]


@pytest.mark.parametrize("script,flags,named", BAD)
def test_bad_input(script, flags, named, tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        script.main([*flags.split(), "--preset", "smoke", "--out", str(tmp_path / "out")])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and named in err and not (tmp_path / "out").exists()
