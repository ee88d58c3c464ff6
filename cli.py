"""What the seven scripts share beyond common.py: flags and presets, run folders, tables, plots, load().

    python cli.py                             what this machine has, what works on it, and how fast it is
    net = cli.load("runs/ldc/sfli-gauss/seed0")      a trained network, with its box in net.domain
"""
import os
import sys

def interrupted(kind, error, trace):  # Ctrl-C while PyTorch is imported; answered() is for later
    if kind is not KeyboardInterrupt:
        return sys.__excepthook__(kind, error, trace)
    os.write(2, b"interrupted\n")
    os._exit(130)

sys.excepthook = interrupted

import argparse
import contextlib
import importlib.util
import json
import math
from pathlib import Path

import torch
from torch import nn

from common import (KINDS, MLP, Alone, FourierFeatures, ModifiedMLP, Periodic, PirateNet, Problem, Refused, Save,
                    Schedule, check_choices, eps_rank, make_optimizer, sfli, train)
from kernels import cpu
from kernels.checkpoint import atomically, read_checkpoint, write_rows
from kernels.process import (FLAGS, Together, answered, cached, check_memory, choose_device, commit, fail, held, world,
                             write_json)

# Flags and presets ----------------------------------------------------------------------------------------------------

def number(kind, fits, wanted):
    def parse(text):
        with contextlib.suppress(ValueError):
            if fits(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")

    return parse

def positive(kind):
    return number(kind, lambda v: 0 < v < math.inf, f"a positive {'integer' if kind is int else 'number'}")

natural = number(int, lambda v: 0 <= v <= 10**12, "an integer from 0 to 10^12")

def parser(description, presets):
    """The flags that mean the same in every script."""
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
    flag("--first", type=positive(int), help="neurons of the first layer of an MLP, where not --width")
    flag("--lr", type=positive(float), help="initial learning rate; with ng: the longest step")
    flag("--optimizer", choices=["adam", "soap", "ng"],
         help="soap needs the package pytorch-optimizer; ng is natural gradient (one seed, float64)")
    flag("--damping", type=positive(float), help="first damping lambda of ng (default 1e-3); it adapts")
    flag("--momentum", help="SPRING momentum of ng, in [0, 1) (default 0)",
         type=number(float, lambda v: 0 <= v < 1, "a number in [0, 1)"))
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
    flag("--out", default="runs", help="results go to OUT/experiment/config/seed/ (default runs)")
    flag("--resume", action="store_true", help="continue from the checkpoints in OUT, also with more --steps")
    flag("--overwrite", action="store_true", help="replace runs of other settings in OUT")
    flag("--save-seconds", type=positive(float), default=120.0, help="a checkpoint every so many seconds (default 120)")
    flag("--save-steps", type=positive(int), help="and every so many steps (default: by time alone)")
    flag("--no-plot", action="store_true", help="no figures")
    return cli

def parse_args(experiment, description, presets, argv=None, extra=lambda parser: None):
    """The flags of a script, filled up from its `presets` = {"paper": {...}, "laptop": {...}, "smoke": {...}}, whose
    entries "all" and "ng" are what is otherwise with --all and --optimizer ng; extra(parser) adds the script's own."""
    cli = parser(description, presets)
    extra(cli)
    FLAGS.clear()
    FLAGS.update(*(action.option_strings for action in cli._actions))
    args = cli.parse_args(argv)
    args.experiment, args.argv = experiment, sys.argv[1:] if argv is None else list(argv)
    args.out = os.path.expanduser(args.out)
    if args.all and args.sfli:
        fail("--all runs every configuration; drop --sfli")
    if args.gamma and args.C:
        fail("--gamma and --C exclude each other; drop one")
    args.device = choose_device(args.device)
    args.no_plot |= world()[0] > 0
    resolve_preset(args, presets)
    check_means(args)
    torch.set_default_dtype(getattr(torch, args.dtype))  # a script may change its process; common.py never does
    torch.set_flush_denormal(True)  # before the first parallel operation: other threads inherit it
    cpu.keep_memory()
    return args

def resolve_preset(args, presets):
    """Fill what the command line leaves open."""
    if args.preset == "auto":
        args.preset = "laptop" if args.device == "cpu" else "paper"
        print(f"preset {args.preset} (device {args.device}; choose with --preset {'|'.join(presets)})")
    usual = dict(warmup=0, decay=1.0, decay_every=1000, dtype="float32", seeds=1, arch="mlp", fourier=None, first=None)
    preset = usual | presets[args.preset]
    of_ng, of_all = preset.pop("ng", {}), preset.pop("all", {})
    preset |= of_all if args.all else {}
    if (args.optimizer or preset["optimizer"]) == "ng":
        preset |= dict(lr=1.0, warmup=0, decay=1.0, dtype="float64", damping=1e-3, momentum=0.0) | of_ng
    elif args.damping or args.momentum is not None:
        fail("--damping and --momentum belong to natural gradient; add --optimizer ng")
    if (getattr(args, "arch", None) or preset["arch"]) != "mlp":
        preset["first"] = None  # --first itself is refused there
    for key in ("warmup", "decay_every"):
        preset[key] *= (args.steps or preset["steps"]) / preset["steps"]
    for key, value in preset.items():
        if getattr(args, key, None) is None:
            setattr(args, key, value)

def check_means(args):
    """What training needs and this machine may lack, before anything is computed; --compile auto is decided."""
    processes = world()[1]
    if 1 < args.seeds < processes:
        fail(f"--seeds: {args.seeds} seeds do not occupy {processes} processes; use as many at least, or one")
    if args.optimizer == "ng" and args.dtype != "float64":
        fail("--optimizer ng computes in float64; drop --dtype float32")
    works = args.device != "cpu" or cpu.can_compile()
    if args.compile == "on" and not works:
        fail("--compile on needs a C++ compiler and Python.h; install them, or use --compile off")
    if args.compile == "auto":
        args.compile = "on" if works and args.steps >= 2000 and args.optimizer != "ng" else "off"
    together = Together() if processes > 1 and args.seeds == 1 else Alone
    check_choices(range(args.seeds), args.optimizer, "fixed", args.compile == "on", together)
    if args.optimizer == "soap":
        make_optimizer("soap", Problem([nn.Linear(1, 1)], None), 1e-3, {})
    if not args.no_plot and importlib.util.find_spec("matplotlib") is None:
        fail("matplotlib is missing; pip install matplotlib, or use --no-plot")

# Networks -------------------------------------------------------------------------------------------------------------

ARCHITECTURES = {"mlp": MLP, "modified": ModifiedMLP, "pirate": PirateNet}

def network(args, omega, gamma=None, out=1, periods=None, rwf=None):
    """The network that the flags describe on the box omega, as a recipe that config.json keeps."""
    return {"omega": omega, "gamma": gamma, "out": out, "periods": periods, "rwf": rwf,
            **{k: getattr(args, k) for k in ("arch", "layers", "width", "first", "sfli", "C", "fourier")}}

def build(recipe, generator=None):
    """The network of such a recipe; SFLI's draws come from `generator`, the others from torch's own."""
    r = argparse.Namespace(**recipe)
    d, embed = len(r.omega), nn.Identity()
    if r.periods:
        d, embed = d + len(r.periods), Periodic(d, {int(k): p for k, p in r.periods.items()})
    if r.fourier:
        d, embed = r.width, nn.Sequential(embed, FourierFeatures(d, r.width, r.fourier))
    wide = dict(first=r.first) if r.first else {}
    net = ARCHITECTURES[r.arch](d, r.width, r.layers, out=r.out, rwf=r.rwf, embed=embed, **wide)
    return sfli(net, r.omega, r.sfli, r.gamma, r.C or 1.0, generator) if r.sfli else net

def sfli_generator(seed):
    return torch.Generator().manual_seed(1000003 * seed + 2)

def networks(recipe, seeds, device):
    """A network per seed, drawn from torch's own generator; SFLI is given another one, so that with and without SFLI
    all later layers are the same."""
    nets = []
    for seed in seeds:
        torch.manual_seed(seed)
        nets.append(build(recipe, sfli_generator(seed)).to(device))
    return nets

def load(folder, seed=None, device="cpu"):
    """The trained network of a run's folder, of `seed` where it has several; its box is net.domain. Those of the torus
    stand for what exp_ns_torus.ansatz() makes of them, with --kink for exp_allen_cahn.solution(net, True)."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
        recipe, seeds = config["network"], config["seeds"]
    except (OSError, ValueError, KeyError) as e:
        raise Refused(f"folder: {folder} has no config.json of a run ({e}); give OUT/experiment/config/seed") from None
    if seed is not None and seed not in seeds or seed is None and len(seeds) > 1:
        raise Refused(f"seed: {seed} is not there; choose one of {seeds}")
    if recipe["arch"] not in ARCHITECTURES:
        importlib.import_module(f"exp_{config['experiment']}")  # which has this network
    saved = read_checkpoint(folder)
    at = 0 if seed is None else seeds.index(seed)
    net = build(recipe).to(getattr(torch, config["dtype"]))
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        old = (saved["params"] | saved["buffers"])[name]
        tensor.data.copy_(old[at] if len(seeds) > 1 else old)
    net.domain = [tuple(axis) for axis in recipe["omega"]]
    return net.to(device)

def gamma_of(args, table, omega, points, measure, embed=None):
    """gamma for sfli(): --gamma, or None (Eq. (3.3)) where --C is given, or the paper's table. --gamma auto scans
    the Gaussian layer of the first seed at `points` and leaves the other kinds of --all to the table."""
    n = args.first or args.width
    if args.sfli and (args.C or args.gamma == "auto") and n < 2:
        fail("--C, --gamma auto: Eq. (3.3) makes gamma zero for one neuron; widen with --width or give --gamma")
    if args.sfli is None or args.C:
        return None
    if args.gamma != "auto" or args.sfli != "gauss" and "--all" in args.argv:
        return args.gamma if args.gamma not in (None, "auto") else table[args.sfli]
    if args.sfli != "gauss":
        fail(f"--gamma auto looks at Gaussians; give a number for --sfli {args.sfli}")
    from kernels.gaussian_gram import scan_gamma

    return scan_gamma(n, omega, points, args.eps, measure, embed, sfli_generator(args.seed))

# Runs -----------------------------------------------------------------------------------------------------------------

def configurations(args, choices, name, over=({},), second_order=False):
    """The runs of a script, each with its folder's name in .config: args alone, or with --all one for each of
    `choices`; each of these for each of `over`. Refuses what no run of them can mean, and to lose earlier runs."""
    if (args.gamma or args.C) and not (args.sfli or args.all):
        fail("--gamma and --C shape the first layer of SFLI; add --sfli or --all")
    if args.first and args.arch != "mlp":
        fail("--first belongs to an MLP; the encoders of the other networks keep --width")
    if second_order and args.sfli == "hat":
        fail("--sfli hat: its second derivative is zero, this equation needs it; use gauss, tanh or cos")
    if args.fourier and (args.sfli or args.all or args.width % 2):
        fail("--fourier replaces SFLI, drop --sfli and --all; and needs an even --width, half cosines, half sines")
    chosen = [{**b, **a} for b in over for a in (choices if args.all else [{}])]
    runs = [argparse.Namespace(**vars(args) | choice) for choice in chosen]
    for run in runs:
        run.config = name(run)
        check_memory(run, getattr(run, "d", 1))
        keep_finished(run)
    if args.resume and not any(has_checkpoint(run_folder(run)) for run in runs):
        fail(f"--resume: there is no checkpoint in {run_folder(runs[0])}; run without --resume first")
    return runs

def keep_finished(args):
    """Refuse to write over a run that has not ended, or has ended with other settings."""
    folder = run_folder(args)
    if args.resume or args.overwrite:
        return
    if has_checkpoint(folder) and not (folder / "result.json").exists():
        fail(f"--out: {folder} holds a run that has not ended; add --resume to continue it, or --overwrite")
    try:
        old = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return
    new = json.loads(json.dumps(settings_of(args)))
    if differs := [k for k in new if k in old and old[k] != new[k]]:
        fail(f"--out: {folder} has a run with other settings ({', '.join(differs)}); use another --out, or --overwrite")
    print(f"{folder} holds a run with these settings; it is made anew", flush=True)

def check_chunks(args, chunks):
    if args.batch % chunks:
        fail(f"--batch: {args.batch} points do not split into {chunks} causal chunks; use a multiple of {chunks}")

def folder_of(args, *below):
    return Path(args.out, args.experiment, *below)

def run_folder(args):
    """OUT/experiment/config/seed0, or seeds0-4 where they are trained at once."""
    seeds = f"seed{args.seed}" if args.seeds == 1 else f"seeds{args.seed}-{args.seed + args.seeds - 1}"
    return folder_of(args, args.config, seeds)

def figure_folder(args, runs):
    """Of a figure or table that shows all runs: theirs, or with --all one beside them."""
    return run_folder(argparse.Namespace(**vars(args) | dict(config="all")) if args.all else runs[0])

def seeds_of(args):
    return list(range(args.seed, args.seed + args.seeds))

def has_checkpoint(folder):
    return any(Path(folder).rglob("checkpoint*.pt"))

def settings_of(args, *skip):
    """What config.json keeps: all flags but those that choose among runs or leave them alone, and `skip`."""
    skip = ("out", "resume", "overwrite", "no_plot", "all", "argv", "dims", "save_seconds", "save_steps", *skip)
    return {k: v for k, v in vars(args).items() if k not in skip} | {"seeds": seeds_of(args)}

def training(args, folder, settings, steps=None):
    """What the flags say to train(); `steps` other than args.steps stretch the schedule."""
    stretch = (steps or args.steps) / args.steps
    free = ("steps", "warmup", "decay_every")  # a run may be resumed with more steps
    save = Save(folder, {k: v for k, v in settings.items() if k not in free}, args.resume and has_checkpoint(folder),
                args.save_seconds, args.save_steps)
    return dict(lr=Schedule(args.lr, args.warmup * stretch, args.decay, args.decay_every * stretch), save=save,
                optimizer=args.optimizer, compile=args.compile == "on" and cpu.compile_options(args.device),
                optimizer_options=dict(damping=args.damping, momentum=args.momentum) if args.optimizer == "ng" else {})

def with_ranks(evaluate, args, points, measure):
    """evaluate(net), and the eps-rank at `points` of every hidden layer and of the encoders."""

    def measured(net):
        hidden, encoders = range(len(net.blocks) + 1), [name for name in net.sfli_layers if name != "first"]
        ranks = eps_rank(net, points, args.eps, measure, [*hidden, *encoders])
        named = {f"eps_rank_{name}": r for name, r in zip([*(k + 1 for k in hidden), *encoders], ranks)}
        return evaluate(net) | {"eps_rank": ranks[hidden[-1]]} | named

    return measured

def run(args, recipe, sample, residuals, evaluate, points, measure, paper=None, part="", start=None, **options):
    """Train the network of `recipe` for args.seeds seeds in the run's folder (in `part` of it), from the parameters of
    `start` if given; write config.json, history.csv, result.json and checkpoint.pt there, print the RESULT line; return
    the trained nets and the history. evaluate(net) gives rel_l2 at least. `options` go to train()."""
    folder, (process, processes) = run_folder(args) / part, world()
    seeds = seeds_of(args)
    split = processes > 1 and args.seeds > 1  # under torchrun: each process its own seeds, in a folder of its own
    mine, place = (seeds[process::processes], folder / f"process{process}") if split else (seeds, folder)
    settings = settings_of(args, "C_grid", "search_steps", "search_seeds") | {
        "seeds": mine, "network": recipe, "processes": processes}
    together = Together() if processes > 1 and not split else Alone
    with held(folder) as stop:
        nets = networks(recipe, mine, args.device)
        if start is not None:
            nets[0].load_state_dict(start.state_dict())
        flags = training(args, place, json.loads(json.dumps(settings)))
        if args.optimizer == "ng":
            check_size(args, flags, nets[0], sample, residuals, options.get("constants"))
        if process == 0 or split:
            begin(place, settings, flags["save"].resume)
        history = train(nets, sample, residuals, args.steps, evaluate=with_ranks(evaluate, args, points, measure),
                        seeds=mine, stop=stop, processes=together, **flags, **options)
        if split:
            history = sorted(sum(Together().gather(history), []), key=lambda row: (row["step"], row["seed"]))
        result = result_of(args, history, seeds, recipe["gamma"], paper)
        if process == 0:
            write_json(folder / "config.json", settings | {"seeds": seeds})
            write_rows(folder / "history.csv", history)
            write_json(folder / "result.json", result)
    print(f"eps-rank: last hidden layer, eps = {args.eps:g}, M = {measure:g} x mean over {len(points)} points")
    low, high = (sum(result[k]) / len(seeds) for k in ("eps_rank_initial", "eps_rank_final"))
    print(f"RESULT {args.experiment} {Path(args.config, part)} rel_l2={result['rel_l2_mean']:.3e} "
          f"eps_rank={low:.4g}→{high:.4g}/{args.width} seconds={result['seconds']:.1f}", flush=True)
    return nets, history

def begin(place, settings, resume):
    """config.json, and what an earlier run left goes; with --resume it stays, and a stretched schedule is stated."""
    if not resume:
        for old in ("checkpoint.pt", "checkpoint_previous.pt", "result.json", "history.csv"):
            (place / old).unlink(missing_ok=True)
        return write_json(place / "config.json", settings)
    with contextlib.suppress(OSError, ValueError, KeyError):
        before = json.loads((place / "config.json").read_text())["steps"]
        if before != settings["steps"]:
            print(f"--resume: {before} steps were meant; on to {settings['steps']}, with the schedule of these")

def check_size(args, flags, net, sample, residuals, constants):
    """Refuse a Jacobian that does not fit before anything is written."""
    numbers = {k: torch.tensor(v, device=args.device) for k, v in (constants(0) if constants else {}).items()}
    opt = make_optimizer("ng", Problem([net], residuals), args.lr, flags["optimizer_options"])
    opt.size(sample(torch.Generator(args.device)) | numbers)

def result_of(args, history, seeds, gamma, paper):
    first, last = history[: len(seeds)], history[-len(seeds) :]
    errors, seconds = [row["rel_l2"] for row in last], last[0]["seconds"]
    if not all(map(math.isfinite, errors)):
        raise FloatingPointError(f"the error at the end is not finite: {errors}; try a smaller lr or a smaller gamma")
    return {
        "experiment": args.experiment, "config": args.config, "preset": args.preset, "seeds": seeds,
        "steps": args.steps, "rel_l2": errors, "rel_l2_mean": sum(errors) / len(seeds), "eps": args.eps,
        "eps_rank_initial": [row["eps_rank"] for row in first], "eps_rank_final": [row["eps_rank"] for row in last],
        "width": args.width, "seconds": seconds, "steps_per_second": args.steps / seconds, "device": args.device,
        "dtype": args.dtype, "torch": torch.__version__, "commit": commit(), "argv": args.argv, "gamma": gamma,
        "paper": paper, "processes": world()[1]}

def lattice(d, n, generator):
    """[n, d] in the unit cube: multiples of 1/p, .., 1/p^d modulo 1 with p^(d+1) = p + 1, shifted at random. They leave
    smaller holes than independent points, so that the mean of a smooth function over them varies less."""
    p = 2.0
    for _ in range(60):
        p = (1 + p) ** (1 / (d + 1))
    shift = torch.rand(d, generator=generator, device=generator.device)
    k = torch.arange(n, device=generator.device, dtype=torch.float64)[:, None]
    return ((k * p ** -torch.arange(1, d + 1, device=generator.device) + shift) % 1).to(shift)

def relative_l2(y, f):
    return (torch.linalg.norm(y - f) / torch.linalg.norm(f)).item()

# Tables and plots -----------------------------------------------------------------------------------------------------

def write_table(folder, rows):
    """Write and print rows [{column: cell}] as folder/table.md. A cell is a number, or a pair (values over the seeds,
    the paper's number or None), shown as mean +- std, paper, ratio."""

    def show(cell):
        if not isinstance(cell, tuple):
            return str(cell)
        values, paper = torch.tensor(cell[0], dtype=torch.float64), cell[1]
        mean, std = values.mean().item(), values.std(correction=0).item()
        return f"{mean:.2e} ± {std:.1e}" + (f" (paper {paper:.2e}, ratio {mean / paper:.2f})" if paper else "")

    lines = [list(rows[0]), ["---"] * len(rows[0]), *(map(show, row.values()) for row in rows)]
    text = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    atomically(Path(folder) / "table.md", lambda tmp: tmp.write_text(text, encoding="utf-8"))
    print(text, end="")

COLORS = {"baseline": "black", "gauss": "tab:blue", "tanh": "tab:orange", "cos": "tab:green", "hat": "tab:red"}

def figure(rows, columns, size=(4.0, 3.2)):
    """Figure and array of axes, drawn without a display."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    return fig, fig.subplots(rows, columns, squeeze=False)

def save_figure(fig, path):
    atomically(path, lambda tmp: fig.savefig(tmp, dpi=120, format="png"))
    print(f"figure {path}")

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

if __name__ == "__main__":
    cpu.self_report()
