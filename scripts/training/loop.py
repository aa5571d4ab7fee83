"""The training loop: data, model, progress, and the steps up to the last."""

import copy
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from tqdm import tqdm

from tooling.progress import time_left
from training.checkpoint import Checkpoints, checkpoints_in
from training.guard import first_non_finite
from training.monitors import COLUMNS as MONITOR_COLUMNS
from training.monitors import gradient_norms, watch_gates
from training.run_folder import Log
from training.speed import flops_per_token, matmul_rate
from training.step import held_out_loss, keep_memory, make_optimizer, training_loss

NO_CAUSE = "the step is finite when it runs again"


class Training:
    """One process of a training run. `texts` is corpus.Texts or documents.DatasetTexts, `model`
    step.checked_model's."""

    def __init__(self, args, recipe, texts, model, run: Path, accelerator):
        keep_memory()
        self.args, self.recipe, self.texts, self.run = args, recipe, texts, run
        self.accelerator, self.main = accelerator, accelerator.is_main_process
        device = accelerator.device
        self.parameters = sum(p.numel() for p in model.parameters())
        self.flops_per_token = flops_per_token(model)
        parts = accelerator.prepare(model, *make_optimizer(model, recipe))
        self.model, self.optimizer, self.scheduler = parts
        self.checkpoints = Checkpoints(run / "checkpoints", accelerator, *parts)
        # all there is besides model, optimizer, scheduler and random numbers
        self.progress = {"step": 0, "carried": None, "losses": [], "norms": [], "seconds": 0.0}
        if accelerator.process_index:  # the same weights in all processes, but other dropout masks
            torch.manual_seed((recipe.seed + accelerator.process_index * 2**32) % 2**64)
        if checkpoints_in(run / "checkpoints"):
            self.progress, damaged = self.checkpoints.load()
            for line in damaged:
                self.say(f"{line}; the one before is taken")
            texts.load(self.progress.pop("texts"))
            self.say(f"resumed at step {self.progress['step']} of {recipe.steps}")
        if self.main:
            step = self.progress["step"]
            self.log = Log(run / "training_log.csv", step)
            self.monitors = Log(run / "monitors.csv", step, MONITOR_COLUMNS)
            self.board = open_board(run, step) if args.tensorboard else None
        # what a step could do at most, by this device's own matrix product
        self.rate = accelerator.num_processes * matmul_rate(device, recipe.precision)
        self.say(
            f"{recipe.name}: {self.parameters / 1e6:.2f} M parameters, {texts.describe()}, "
            f"{accelerator.num_processes} x {device.type}, {torch.get_num_threads()} threads"
        )

    def say(self, text: str) -> None:
        if self.main:
            tqdm.write(text)

    def go_on(self) -> bool:
        """Trains until the last step, a signal or --max-minutes; returns whether the run is
        complete."""
        stop: list[str] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.append("interrupted"))
        recipe, progress = self.recipe, self.progress
        started, before = time.monotonic(), progress["seconds"]
        first, last = progress["step"], recipe.steps
        disable = None if self.main else True
        bar = tqdm(total=last, initial=first, unit="step", disable=disable, smoothing=0.05)
        self.model.train()
        while progress["step"] < last and not stop:
            learning_rate = self.scheduler.get_last_lr()[0]
            self.step()
            spent = time.monotonic() - started
            progress["seconds"] = before + spent
            step = progress["step"]
            rate = (step - first) * recipe.batch * recipe.length / spent
            speed = f"{rate:.0f} tokens/s, {rate * self.flops_per_token / self.rate:.1%} of matmul"
            bar.set_postfix_str(speed, refresh=False)
            bar.update()
            if self.is_watched(step):
                evaluate = step % recipe.evaluate_every == 0 or step == last
                row = self.log_row(learning_rate, evaluate)
                left = time_left(step - first, last - first, spent)
                self.say(f"{describe(row)}  {speed}, {left}")
            if self.args.max_minutes and spent > self.args.max_minutes * 60:
                stop.append(f"{self.args.max_minutes:g} minutes are over")
            stop = self.agreed(stop)
            if step % recipe.checkpoint_every == 0 or step == last or stop:
                self.checkpoints.save({**progress, "texts": self.texts.state()})
        bar.close()
        if progress["step"] < last:
            step = progress["step"]
            self.say(f"{stop[0]}: step {step} of {last} is saved; go on with --resume")
        return progress["step"] >= last

    def is_watched(self, step: int) -> bool:
        """Whether the log gets a row after this step."""
        recipe = self.recipe
        return 0 in (step % recipe.log_every, step % recipe.evaluate_every, recipe.steps - step)

    def agreed(self, stop: list[str]) -> list[str]:
        """Shares signals between processes, so that all of them stop at the same step."""
        if self.accelerator.num_processes == 1:
            return stop
        told = torch.tensor(float(bool(stop)), device=self.accelerator.device)
        anyone = self.accelerator.reduce(told, "sum").item() > 0
        return (stop or ["another process was told to"]) if anyone else []

    def step(self) -> None:
        progress, recipe = self.progress, self.recipe
        chunk, first = self.texts.training_chunk(progress["step"])
        pieces = self.pieces(chunk)
        carried = [None] * len(pieces) if first or not recipe.carry else progress["carried"]
        kept = copy.deepcopy(carried)  # the step changes it, and the guard needs the old one
        watched = self.is_watched(progress["step"] + 1)
        losses, values = [], {}
        for index, piece in enumerate(pieces):
            look = watch_gates(self.unwrapped) if watched and self.main and not index else None
            whole = index == len(pieces) - 1  # gradients are summed over the processes once
            with nullcontext() if whole else self.accelerator.no_sync(self.model):
                with look or nullcontext({}) as gates:
                    loss, carried[index] = self.loss(self.model, piece, carried[index])
                values |= gates
                self.accelerator.backward(loss / len(pieces))
            losses.append(loss.detach())
        progress["carried"], loss = carried, torch.stack(losses).mean()
        if watched:
            values |= gradient_norms(self.model)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), recipe.clip)
        if not (loss.isfinite() and norm.isfinite()):
            raise FloatingPointError(
                f"step {progress['step'] + 1}: loss {loss.item()}, gradient norm {norm.item()}: "
                f"{self.cause(pieces, kept)}. The last checkpoint is kept."
            )
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        progress["step"] += 1
        progress["losses"].append(loss.item())
        progress["norms"].append(norm.item())
        self.values = values

    @property
    def unwrapped(self) -> torch.nn.Module:
        return self.accelerator.unwrap_model(self.model)

    def pieces(self, chunk) -> list[tuple]:
        """Splits the rows of this process into micro-batches."""
        rows = self.recipe.batch // self.accelerator.num_processes
        size = self.recipe.micro_batch or rows
        return [tuple(part[i : i + size] for part in chunk) for i in range(0, rows, size)]

    def loss(self, model, piece, carried):
        recipe = self.recipe
        options = {"carry": recipe.carry, "isolate": recipe.isolate, "z_loss": recipe.z_loss}
        return training_loss(model, piece, carried, **options)

    def cause(self, pieces, carried) -> str:
        sharded = self.accelerator.is_fsdp2
        model = self.model if sharded else self.unwrapped
        said = NO_CAUSE
        for piece, state in zip(pieces, carried, strict=True):
            again = lambda p=piece, s=state: self.loss(model, p, copy.deepcopy(s))[0]
            with self.accelerator.autocast():
                said = first_non_finite(model, again, backward=not sharded)
            if said != NO_CAUSE:
                break
        return said

    def log_row(self, learning_rate: float, evaluate: bool) -> dict:
        progress, recipe = self.progress, self.recipe
        means = [sum(progress[name]) / len(progress[name]) for name in ("losses", "norms")]
        if self.accelerator.num_processes > 1:
            local = torch.tensor(means, dtype=torch.float32, device=self.accelerator.device)
            means = self.accelerator.reduce(local, "mean").tolist()
        row = {
            "step": progress["step"],
            "tokens": progress["step"] * recipe.batch * recipe.length,
            "learning_rate": f"{learning_rate:.4e}",
            "train_loss": repr(means[0]),
            "gradient_norm": repr(means[1]),
            "seconds": f"{progress['seconds']:.1f}",
        }
        if evaluate:
            options = recipe.length, recipe.carry, recipe.isolate
            nats = held_out_loss(self.model, self.texts.held_out_lanes, *options)
            row["held_out_loss"] = repr(nats)
            row["held_out_bits_per_byte"] = repr(self.texts.bits_per_byte(nats))
        progress["losses"], progress["norms"] = [], []
        if self.main:
            self.log.append(row)
            self.write_monitors()
            for name in ("train_loss", "gradient_norm", "held_out_loss"):
                if self.board and name in row:
                    self.board.add_scalar(name, float(row[name]), progress["step"])
        return row

    def write_monitors(self) -> None:
        step, found = self.progress["step"], sorted(self.values.items())
        self.monitors.append(
            *({"step": step, "where": where, "what": what, "value": f"{value:.6g}"}
              for (where, what), value in found)
        )  # fmt: skip
        if self.board:
            for (where, what), value in found:
                self.board.add_scalar(f"{what}/{where}", value, step)
            self.board.flush()


def open_board(run: Path, step: int):
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)


def describe(row: dict) -> str:
    text = f"step {row['step']}: loss {float(row['train_loss']):.4f}"
    if "held_out_loss" in row:
        text += f", held out {float(row['held_out_loss']):.4f}"
        text += f" = {float(row['held_out_bits_per_byte']):.4f} bits/byte"
    return text
