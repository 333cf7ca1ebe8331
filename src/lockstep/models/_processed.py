"""Models of transformers whose inputs pass through a processor, which is saved beside them: image processors, feature
extractors."""

from pathlib import Path
from typing import Any

from torch import nn

from lockstep.base.contracts import DataSpec
from lockstep.base.model_contracts import Model
from lockstep.core.host.pretrained_files import load, untrained
from lockstep.models._pretrained import NetworkModel, save_architecture, save_network, silence


class ProcessedModel(NetworkModel):
    """Takes what its processor makes of a sample."""

    def __init__(self, network: nn.Module, spec: DataSpec, processor: Any) -> None:
        super().__init__(network, spec)
        self.processor = processor


class ModelFiles:
    """Writes and reads the files of models of a class, in the form of transformers."""

    def __init__(self, auto_class: str, model: type[ProcessedModel], processor: type[Any]) -> None:
        """`auto_class`: the name of the class of transformers; `processor` is built from a folder."""
        self.auto_class, self.model, self.processor = auto_class, model, processor

    def save(self, model: ProcessedModel, folder: Path) -> None:
        """Write the model and its processor with transformers' save_pretrained."""
        save_network(model, folder)
        model.processor.save(folder)

    def save_config(self, model: ProcessedModel, folder: Path) -> None:
        """Write the model's config.json, and its processor."""
        save_architecture(model, folder)
        model.processor.save(folder)

    def read_back(self, folder: Path, spec: DataSpec) -> Model:
        """Load what `save` wrote with plain transformers."""
        silence()
        return self._with(load(self._loader(), folder), folder, spec)

    def from_config(self, folder: Path, spec: DataSpec) -> Model:
        """Build a model from what `save_config` wrote; its weights are random."""
        from transformers import AutoConfig

        return self._with(untrained(self._loader(), load(AutoConfig, folder)), folder, spec)

    def _loader(self) -> Any:
        import transformers

        return getattr(transformers, self.auto_class)

    def _with(self, network: nn.Module, folder: Path, spec: DataSpec) -> Model:
        return self.model(network, spec, self.processor(str(folder)))
