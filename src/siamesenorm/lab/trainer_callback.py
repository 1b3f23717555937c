"""Runs of transformers' Trainer, recorded for ``siamesenorm report``.

from siamesenorm.lab.trainer_callback import RecordingCallback
Trainer(model, arguments, callbacks=[RecordingCallback("runs/mine/pre-0", topology="pre")], train_dataset=…)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from siamesenorm.lab.recording import Recording, record

EVALUATED = "eval_"
"""How the Trainer's held-out numbers begin."""
OWN = ("runtime", "samples_per_second", "steps_per_second", "epoch")
"""Of which these are no measurements of the model."""


class RecordingCallback(TrainerCallback):
    """Records every loss that the Trainer logs and every evaluation; learning rate and seed are its arguments'.

    options: what `siamesenorm.record` takes beside folder, lr, seed, steps and batch_size.
    """

    def __init__(self, folder: Path | str, *, topology: str, **options: Any) -> None:
        self.folder, self.topology, self.options = folder, topology, options
        self.run: Recording | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin, or go on behind the checkpoint that the Trainer resumes from."""
        if state.is_world_process_zero:
            self.run = record(
                self.folder,
                topology=self.topology,
                lr=args.learning_rate,
                seed=args.seed,
                steps=state.max_steps,
                batch_size=args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
                resume_from=state.global_step,
                **self.options,
            ).start()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """The mean loss since the last line; what the Trainer says at its end is no step."""
        if self.run is not None and self.run.state == "running" and logs and "loss" in logs:
            more = {"lr": logs.get("learning_rate"), "grad_norm": logs.get("grad_norm")}
            numbers = {name: value for name, value in more.items() if value is not None}
            self.run.step(logs["loss"], at=state.global_step, **numbers)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Held-out numbers, under their own names; also of an evaluation behind the end."""
        found = {name.removeprefix(EVALUATED): value for name, value in (metrics or {}).items()}
        numbers = {name: v for name, v in found.items() if name not in OWN and isinstance(v, (int, float))}
        if self.run is not None and numbers:
            self.run.evaluate(**numbers)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """It is over: finished where all steps were taken."""
        if self.run is not None:
            self.run.end(None if state.global_step >= state.max_steps else "interrupted")
