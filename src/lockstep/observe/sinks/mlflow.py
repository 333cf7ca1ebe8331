"""MLflow: `pip install 'lockstep-train[mlflow]'`; to the server of MLFLOW_TRACKING_URI, else to `mlruns` beside the
run's folder."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.base.events import RunStarted
from lockstep.observe.run_folder import flattened
from lockstep.observe.sinks._tracker import Tracker, final_values

DEFAULTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""Limits after which a server that is down is given up."""
MOST_PARAMETERS = 100
"""Limit of parameters in one request, set by the server."""
MOST_CHARACTERS = 6000
"""Length limit of a parameter's value."""
ENDS = {"finished": "FINISHED", "stopped early": "FINISHED", "interrupted": "KILLED"}


class Mlflow(Tracker):
    name = "mlflow"
    client: Any = None

    def _connect(self) -> None:
        import mlflow  # noqa: PLC0415 (an extra)

        self.mlflow, environment = mlflow, os.environ  # noqa: TID251 (variables of the tracker's)
        for variable, value in DEFAULTS.items():
            environment.setdefault(variable, value)
        address = environment.get("MLFLOW_TRACKING_URI") or (self.folder.parent / "mlruns").absolute().as_uri()
        if address.startswith("file:"):
            environment.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else it refuses folders
        self.client = self.mlflow.MlflowClient(tracking_uri=address)

    def open(self, event: RunStarted, config: Mapping[str, Any]) -> str:
        self._connect()
        if self.id:
            self.client.update_run(self.id, status="RUNNING")
            return self.id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "lockstep")  # noqa: TID251 (as above)
        known = self.client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self.client.create_experiment(name)
        tags = {"world_size": str(event.world_size), "device": event.device, "parameters": str(event.parameters)}
        identity: str = self.client.create_run(experiment, run_name=event.name, tags=tags).info.run_id
        settings = [self.mlflow.entities.Param(name, str(value)[:MOST_CHARACTERS]) for name, value in flattened(config)]
        for first in range(0, len(settings), MOST_PARAMETERS):
            self.client.log_batch(identity, params=settings[first : first + MOST_PARAMETERS])
        return identity

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [self.mlflow.entities.Metric(name, float(value), now, step) for name, value in values.items()]
        self.client.log_batch(self.id, metrics=metrics)

    def end(self, status: str, summary: Mapping[str, Any], files: list[Path]) -> None:
        for name, value in {"status": status, **final_values(summary)}.items():
            self.client.set_tag(self.id, name, value)
        for file in files:
            self.client.log_artifact(self.id, str(file))
        self.client.set_terminated(self.id, ENDS.get(status, "FAILED"))


build = Mlflow
