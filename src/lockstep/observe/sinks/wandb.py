"""Weights & Biases: `pip install 'lockstep-train[wandb]'`; its own variables apply, such as WANDB_MODE=offline."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.base.events import RunStarted
from lockstep.observe.sinks._tracker import Tracker, final_values

LAST_PART = 2
INIT_SECONDS = 30.0
"""Time for the server to answer before the run goes on without it."""


class Wandb(Tracker):
    name = "wandb"
    run: Any = None

    def open(self, event: RunStarted, config: Mapping[str, Any]) -> str:
        import wandb  # noqa: PLC0415 (an extra)

        self.wandb = wandb
        identity = self.id or secrets.token_hex(4)
        self.run = self.wandb.init(
            project=os.environ.get("WANDB_PROJECT", "lockstep"),  # noqa: TID251 (a variable of the tracker's)
            name=event.name,
            id=identity,
            resume="allow",
            dir=str(self.folder),
            config={**config, "world_size": event.world_size, "device": event.device, "parameters": event.parameters},
            settings=self.wandb.Settings(console="off", silent=True, init_timeout=INIT_SECONDS, x_disable_stats=True),
        )
        return identity

    def delivered(self) -> tuple[int, int]:
        """Return the last step that the server has; it ignores older ones. Offline, a kill loses what is in memory."""
        return self.run.starting_step - 1, LAST_PART

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def end(self, status: str, summary: Mapping[str, Any], files: list[Path]) -> None:
        self.run.summary.update({"status": status, **final_values(summary)})
        if files:
            artifact = self.wandb.Artifact(f"run-{self.id}", type="run")
            for file in files:
                artifact.add_file(str(file))
            self.run.log_artifact(artifact)
        self.run.finish(exit_code=1 if status == "failed" else 0)
        self.wandb.teardown()


build = Wandb
