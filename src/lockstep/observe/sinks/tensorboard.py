"""TensorBoard scalars, written as training runs: `tensorboard --logdir runs`."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lockstep.base import events
from lockstep.base.templates import as_markdown
from lockstep.base.yaml_text import YamlDumper
from lockstep.core.host import gpu_meter
from lockstep.core.host.phases import OF_STEPS
from lockstep.observe import event_files
from lockstep.observe.run_folder import RunFolder, flattened

HYPERPARAMETERS = "hparams"
SHAPING = ("data.", "model.", "optim.", "parallel.", "run.reproducibility", "run.seed", "schedule.", "train.")
"""Prefixes of settings that are shown as hyper-parameters."""
FIRST = ("model.kind", "optim.kind", "optim.lr", "train.epochs", "train.global_batch")
"""Five settings that TensorBoard shows by default: they are marked as differing between runs, which come first."""


class TensorBoard:
    """train/* for logged steps, test/* for evaluations, checkpoint/* for saves, time/*, memory/* and gpu/* for ranks.

    Repeated steps replace the old ones. The config and the end of the run are texts; at the end its settings get a row
    of the page HPARAMS.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tensorboard"
        self.writer: Any = None
        self.world_size = 0

    def notice(self, event: object) -> None:
        if isinstance(event, events.RunStarted):
            # also on a fresh start: the folder may hold steps of a run that was killed before its first checkpoint
            self.writer = event_files.opened(self.folder, purge_step=event.resumed_step + 1, flush_secs=10)
            self.world_size = event.world_size
            event_files.remove(self.folder, HYPERPARAMETERS)
            settings = RunFolder(self.folder.parent).known_settings()
            config = yaml.dump(settings, Dumper=YamlDumper, sort_keys=False, allow_unicode=True)
            self.writer.add_text("config", as_code(config), event.resumed_step)
        elif isinstance(event, events.StepDone) and event.values:
            self._write(event.step, tagged("train", {**event.values, "epoch": event.epoch}))
        elif isinstance(event, events.Evaluated):
            self._write(event.step, tagged("test", event.values))
        elif isinstance(event, events.TextsGenerated) and self.writer:
            self.writer.add_text("texts", as_quotes(event.samples), event.step)
        elif isinstance(event, events.RunEnded) and self.writer:
            facts = {name: event.summary.get(name) for name in ("digest", "chain", "evaluation", "steps")}
            text = json.dumps({"status": event.status, **facts}, indent=1)
            self.writer.add_text("end", as_code(text), facts["steps"])
            self._write_hyperparameters(event)
        else:
            self._write_costs(event)
        if isinstance(event, events.Evaluated | events.SaveStarted | events.RunEnded) and self.writer:
            self.writer.flush()

    def _write_costs(self, event: object) -> None:
        if isinstance(event, events.RankTimes):
            memory = tagged("memory", {"most_gigabytes": max(event.memory_bytes) / 1e9})
            gpus = tagged("gpu", gpu_meter.scalars(event.gpus))
            self._write(event.step, tagged("time", mean_milliseconds(event)) | memory | gpus)
        elif isinstance(event, events.CheckpointSaved):
            seconds = {"seconds": event.seconds, "stall_seconds": event.stall_seconds}
            self._write(event.step, tagged("checkpoint", seconds))

    def close(self) -> None:
        if self.writer:
            self.writer.close()

    def _write_hyperparameters(self, event: events.RunEnded) -> None:
        """Write the settings, and which scalars are the run's metrics: TensorBoard shows the last values of these.
        add_hparams of torch would make a run of its own of them."""
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
        from torch.utils.tensorboard.summary import hparams

        settings = hyperparameters(self.folder.parent) | {"world_size": self.world_size}
        metrics = dict.fromkeys([*(f"test/{name}" for name in event.summary.get("evaluation") or ()), "train/loss"])
        experiment, start, end = hparams(settings, metrics)
        plugin = experiment.value[0].metadata.plugin_data
        content = HParamsPluginData.FromString(plugin.content)
        for info in content.experiment.hparam_infos:
            info.differs = info.name in FIRST
        plugin.content = content.SerializeToString()
        with event_files.replacing(self.folder, HYPERPARAMETERS) as writer:
            for summary in (experiment, start, *([end] if event.status != "failed" else [])):
                writer.file_writer.add_summary(summary)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars as one event: an event for each, as add_scalar writes, takes five times as long."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.writer.file_writer.add_summary(Summary(value=scalars), step)


def tagged(group: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return GROUP/NAME -> value, as TensorBoard groups its charts."""
    return {f"{group}/{name}": value for name, value in values.items()}


def hyperparameters(folder: Path) -> dict[str, float | str]:
    """Return "section.key" -> value, of a run's settings that shape its result."""
    found: dict[str, float | str] = {}
    for name, value in flattened(RunFolder(folder).known_settings()):
        if name.startswith(SHAPING) and value is not None:
            is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
            found[name] = value if is_plain else json.dumps(value)
    return found


def mean_milliseconds(times: events.RankTimes) -> dict[str, float]:
    """Return phase -> milliseconds of a step, the mean over the ranks; `waits_most`: of the rank that waits most."""
    mean = {str(name): 1000 * statistics.fmean(times.seconds[name]) / times.steps for name in OF_STEPS}
    return {**mean, "waits_most": 1000 * max(times.seconds["exchange"]) / times.steps}


def as_code(text: str) -> str:
    """Return Markdown that shows a text as it is."""
    return "".join(f"    {line}\n" for line in text.splitlines())


def as_quotes(samples: Sequence[events.TextSample]) -> str:
    """Format each generated text as a paragraph of Markdown, its prompt in bold."""
    return "\n\n".join(f"**{as_markdown(each.prompt)}**{as_markdown(each.text)}" for each in samples)


build = TensorBoard
