"""Files of common.train(save=Save("runs/mine")): whole at every moment, whatever happens to the process."""
import contextlib
import csv
import io
import os
import time
from pathlib import Path

import torch

from common import Refused, State


def pack(state, processes):
    """What is written: all of common.State, of the generators and sums those of every process."""
    generators = processes.gather([g.get_state() for g in state.generators])
    sums = processes.gather({k: v.cpu() for k, v in state.sums.items()})
    return vars(state) | {"optimizer": state.optimizer.state_dict(), "generators": generators, "sums": sums}


def unpack(state, saved, process):
    """Back into `state`, and at last into the networks, whose memory it shares."""
    tensors, device = state.params | state.buffers, next(iter(state.params.values())).device
    kinds = lambda tensors: {k: (v.dtype, v.shape) for k, v in tensors.items()}
    try:
        old = saved["params"] | saved["buffers"]
        if kinds(old) != kinds(tensors):
            raise ValueError("names, types or shapes of parameters differ")
        state.optimizer.load_state_dict(saved["optimizer"])
        for g, s in zip(state.generators, saved["generators"][process], strict=True):
            g.set_state(s.cpu())
        for name in ("count", "step", "seconds", "history"):
            setattr(state, name, saved[name])
        for name, values in (("sums", saved["sums"][process]), *((k, saved[k]) for k in ("weights", "lam", "best"))):
            setattr(state, name, {k: v.to(device) for k, v in values.items()})
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as e:
        raise Refused(f"resume: the checkpoint is of another network, optimizer or version ({type(e).__name__}: {e}); "
                      "train without resume, or in another folder") from None
    for name, tensor in tensors.items():
        tensor.copy_(old[name])


def save_if_due(state, save, clock, now, processes):
    """Write the checkpoint: now, or after save.seconds or save.steps; on seconds processes agree every tenth step."""
    late = time.perf_counter() - clock.saved > save.seconds
    if processes.count > 1:
        late = state.step % 10 == 0 and any(processes.gather(late))
    if now or late or save.steps and state.step % save.steps == 0:
        state.seconds = clock.seconds()
        packed = pack(state, processes)
        if processes.number == 0:
            save_checkpoint(Path(save.folder) / "checkpoint.pt", packed | {"config": save.config})
        clock.saved = time.perf_counter()


def save_checkpoint(path, state):
    """Write the checkpoint; the one before stays as checkpoint_previous.pt. At no moment is there none of the name."""
    buffer = io.BytesIO()  # so that a full disk is an OSError
    torch.save(state, buffer)

    def write(tmp):
        tmp.write_bytes(buffer.getvalue())
        if path.exists():
            try:
                atomically(previous(path), lambda link: os.link(path, link))  # a second name, not a move
            except Refused:  # a file system without hard links: a kill before the next rename leaves the previous one
                os.replace(path, previous(path))

    atomically(path, write)


def previous(path):
    return path.with_name(f"{path.stem}_previous{path.suffix}")


def read_checkpoint(folder):
    """What checkpoint.pt holds, or where that cannot be read the one before."""
    path = Path(folder) / "checkpoint.pt"
    if not (path.exists() or previous(path).exists()):
        raise Refused(f"resume: there is no checkpoint {path}; train without resume first")
    errors = []
    for file in (path, previous(path)):
        try:
            saved = torch.load(file, weights_only=True, map_location="cpu")
            if missing := {"config", *State.__dataclass_fields__} - set(saved):
                raise KeyError(*missing)
            break
        except Exception as e:
            which = f": {e}" if isinstance(e, KeyError) else ""
            errors.append(f"{file} cannot be read ({type(e).__name__}{which})")
    else:
        raise Refused(f"resume: {errors[0]}; train without resume")
    if errors:
        print(f"{errors[0]}; continuing from {file.name}", flush=True)
    return saved


def load_checkpoint(save, steps):
    """That of save.folder, if it is of the same configuration and not beyond `steps`."""
    saved = read_checkpoint(save.folder)
    found, config = saved["config"] or {}, save.config or {}
    if differs := [k for k in found | config if found.get(k) != config.get(k)]:
        raise Refused(f"resume: {save.folder} is of another configuration ({', '.join(differs)} differ); "
                      "use the same settings, or another folder")
    if saved["step"] > steps + 1:
        raise Refused(f"steps: {save.folder} is at step {saved['step'] - 1} already; use as many at least")
    return saved


def atomically(path, write):
    """write(temporary path), then rename: `path` is always whole, the old one or the new one."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(tmp)
        os.replace(tmp, path)
    except OSError as e:
        raise Refused(f"folder: cannot write {path} ({e.strerror}); make room, or choose another") from None
    finally:
        with contextlib.suppress(OSError):
            tmp.unlink(missing_ok=True)


def write_rows(path, rows):
    text = io.StringIO()
    out = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    out.writeheader()
    out.writerows(rows)
    atomically(path, lambda tmp: tmp.write_text(text.getvalue()))
